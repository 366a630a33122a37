"""The roles of a peer in a round: trainer and voter."""
