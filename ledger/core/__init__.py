"""What every part of the ledger stands on: the first page of a network, and what a module is."""
