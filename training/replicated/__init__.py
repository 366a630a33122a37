"""Computations that are bit-identical on all peers: layout, codec, checks, aggregation, outer step. The only library is numpy.

The code uses only operations that IEEE 754 rounds correctly, one at a time, and sums of integers (reasons: `docs/decisions`).
"""
