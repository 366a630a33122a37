"""Disk: the ledger in SQLite, checks of its write-ahead log, blobs as files, durable files, crash points."""
