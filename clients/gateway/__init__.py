"""The gateway: what a peer does for the programs that it serves."""
