"""Blocklists, and the search for their words in responses."""
