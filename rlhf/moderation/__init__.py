"""Blocklists and the matching of their words in responses."""
