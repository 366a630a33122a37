"""Engines, which compute gradients in the worker process."""
