"""A whole network on one machine, beside peers that lie."""
