"""Simulated annotators for demos."""
