"""People answer tasks, and the peers decide what follows: projects, annotators, assignments, answers and labels.

The rules are pure: no clock, no disk, no network. `peer/serving` serves annotators, and `web/` speaks HTTP to them.
"""
