"""Disk: the ledger in SQLite, the write-ahead log, blobs as files, durable files, crash points."""
