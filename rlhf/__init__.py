"""RLHF: preference sets, reward models, PPO, DPO, instruction tuning.

The rules are pure: no clock, no disk, no network, no torch. Only `pytorch/` imports torch, and only the worker imports that.
`services.py` is what every peer does beside agreeing.
"""
