"""Connections to peers: dialing, the connection table, failure detection, inbound queues."""
