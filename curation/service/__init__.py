"""What a peer that serves annotators does: sites and calls for annotators, operators and programs."""
