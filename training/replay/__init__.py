"""A trainer's commitments and their re-execution."""
