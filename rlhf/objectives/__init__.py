"""Training objectives of RLHF: reward models, PPO, DPO, instruction tuning."""
