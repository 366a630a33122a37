"""What a peer does in a round: the trainer, the voter, and the liar of demos."""
