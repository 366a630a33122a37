"""Sampled audits: their draws, their reports, disputes about proposals, and results."""
