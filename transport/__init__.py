"""Authenticated links between peers: a sans-IO Noise session, the TCP swarm, payload exchange and an in-memory twin."""
