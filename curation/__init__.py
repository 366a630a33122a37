"""Annotation: projects, tasks, annotators, answers and labels.

The rules are pure: they use no clock, disk or network. `service/` has the code of a peer that serves annotators.
"""
