"""Sampled audits: their state, what is drawn, and how a dispute ends."""
