"""Training objectives of RLHF: reward models, PPO and its rollouts, DPO, instruction tuning."""
