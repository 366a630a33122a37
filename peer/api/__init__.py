"""Answers to calls of people and programs, and the control socket."""
