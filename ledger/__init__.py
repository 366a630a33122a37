"""Decided state: members, jobs, audits, rules of the network, and the state root. No I/O: `storage` writes it."""
