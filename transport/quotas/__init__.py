"""Quotas of peers and hosts: connections, memory, processor time."""
