"""Handlers of RPC calls about tuning plans, and the construction of their jobs."""
