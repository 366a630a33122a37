"""Membership in the daemon: joining, liveness of voters, inactive members, classes of peers."""
