"""The part of training that every peer computes alike, bit for bit: layout, codec, checks, aggregation, outer step (numpy only).

Only operations that IEEE 754 rounds correctly are used, one at a time, and sums are sums of integers; `docs/decisions` says why.
"""
