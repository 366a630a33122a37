"""RLHF: preference sets, reward models, PPO, DPO, instruction tuning.

The rules are pure: no clock, no disk, no network, no torch. Only `pytorch/` imports torch, and the daemon never imports it.
`services.py` holds the tasks that peers run beside agreement.
"""
