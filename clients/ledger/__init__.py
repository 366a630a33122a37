"""The ledger's module of client runs."""
