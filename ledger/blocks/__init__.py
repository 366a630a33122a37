"""From transactions that wait to the body of a block, and back."""
