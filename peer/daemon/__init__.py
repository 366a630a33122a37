"""Startup and shutdown of a running peer."""
