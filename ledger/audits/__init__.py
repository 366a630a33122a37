"""Sampled audits: their draws, reports, disputes and results."""
