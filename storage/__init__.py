"""What a peer writes to its disk, and what it trusts of it after a crash: the ledger in SQLite, blobs as files."""
