"""What a peer is told, and what it keeps beside its ledger: settings, identity, invitations, addresses."""
