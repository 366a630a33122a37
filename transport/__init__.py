"""Authenticated links between peers, over TCP or circuits."""
