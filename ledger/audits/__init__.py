"""Sampled audits: which ones are drawn, their reports, disputes and results."""
