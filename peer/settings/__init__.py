"""Settings of a peer, its data directory with identity and address book, and invitations."""
