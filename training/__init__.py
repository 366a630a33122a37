"""Job specifications, data and models. `replicated` is exact and uses numpy; `engines` are fast."""
