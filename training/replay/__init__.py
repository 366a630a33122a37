"""What a trainer commits to, and how somebody else computes it again."""
