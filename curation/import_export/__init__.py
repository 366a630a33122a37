"""Tasks from foreign files, labels to files, and proofs of exports."""
