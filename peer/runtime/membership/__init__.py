"""This peer's place among the members: joining, liveness, inactivity, peer classes."""
