"""What people said of tasks, decided by the peers: projects, annotators, assignments, answers and labels.

The rules are pure: no clock, no disk, no network. `peer/serving` serves annotators, and `web/` speaks HTTP to them.
"""
