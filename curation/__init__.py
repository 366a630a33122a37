"""Annotation: projects, tasks, annotators, answers and labels.

The rules are pure: they read no clock, disk or network. `service/` has the parts of a peer that serves annotators.
"""
