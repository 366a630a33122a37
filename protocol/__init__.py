"""Identities, canonical encoding, messages, Merkle trees, limits, errors, and the API of a peer."""
