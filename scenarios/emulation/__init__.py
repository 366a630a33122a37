"""Emulated networks for tests: links with latency, loss and bandwidth, in memory."""
