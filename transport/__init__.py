"""Authenticated links between peers, over TCP or circuits, and an in-memory twin."""
