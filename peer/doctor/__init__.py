"""What a peer needs, looked at before it runs or while it does: what is wrong, and what its operator can do."""
