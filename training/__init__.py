"""What the network trains: job specifications, data and the model; `replicated` is exact (numpy), `engines` are fast."""
