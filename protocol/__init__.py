"""Ground floor: identity, canonical encoding, typed messages, Merkle trees, limits, errors and the peer's API."""
