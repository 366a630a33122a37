"""What the network trains: job specifications, data and the model; `replicated` is exact (numpy), `compute` is fast (torch)."""
