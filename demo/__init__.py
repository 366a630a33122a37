"""Networks on one machine, with dishonest peers."""
