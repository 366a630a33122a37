"""Annotation: projects, tasks, annotators, answers and labels.

The rules are pure: no clock, no disk, no network. `service/` is what a peer does that serves annotators.
"""
