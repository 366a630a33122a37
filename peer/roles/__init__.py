"""What a peer does in a round: the trainer and the voter."""
