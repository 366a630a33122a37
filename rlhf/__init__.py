"""People's preferences become a reward, and the reward a tuned policy: sets of preferences, rewards, losses, the filter.

The rules are pure: no clock, no disk, no network, no torch. Only `losses.py` and `pytorch/` import torch, and only the worker
imports those. No job uses the filter yet.
"""
