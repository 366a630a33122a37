"""Configuration, the data directory, identity, invitations, the address book."""
