"""Audits of accepted proposals: downloads, replays, reports, and their schedule."""
