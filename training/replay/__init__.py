"""What a trainer commits to, and its re-execution."""
