"""Networks on one machine, with peers that lie."""
