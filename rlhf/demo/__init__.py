"""Synthetic preferences for the demo."""
