"""Annotation: projects, tasks, annotators, answers and labels.

The rules in `ledger/`, `estimation/` and `tasks/` are pure: they use no clock, disk or network. `service/` has the code of a peer
that serves annotators.
"""
