"""Answers to calls about preferences and the jobs that learned from them."""
