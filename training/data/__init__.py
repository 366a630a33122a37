"""What a job trains on: text, shards, tokens."""
