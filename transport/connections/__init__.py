"""Connections to peers: the connection table, links, the queue of received messages."""
