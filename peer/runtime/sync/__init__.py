"""Blocks and snapshots for peers that are behind."""
