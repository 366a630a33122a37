"""Job specifications, data and models. `replicated` is exact, with numpy; `engines` are fast."""
