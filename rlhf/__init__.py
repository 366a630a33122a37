"""RLHF: preference sets, reward models, PPO, DPO, instruction tuning.

The rules of the ledger and of the objectives are pure: they use no clock, disk, network or torch. Only `pytorch/` imports torch,
and the daemon never imports `pytorch/`. `services.py` contains the tasks that a peer runs beside agreement.
"""
