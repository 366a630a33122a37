"""Texts, shards, tokenizers and tokens of jobs."""
