"""Answers to calls, by topic."""
