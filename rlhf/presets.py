"""What a job of RLHF says unless somebody sets something else."""

from __future__ import annotations

from typing import Any, Final

from training.spec import Compression, InnerStatePolicy, Outer

# The update that the trainers agree on is taken as it is: a policy moves, and what was left unsaid of an older one, or its
# momentum, points to where the rewards no longer are.
PPO: Final[dict[str, Any]] = {
    "local_steps": 16,  # four epochs of four inner steps
    "batch": 16,
    "compression": Compression.DENSE,
    "bits": 8,
    "feedback_decay": 0.0,
    "inner_rate": 1e-3,
    "inner_state": InnerStatePolicy.RESET,
    "outer": Outer.SGD,
    "outer_rate": 1.0,
    "warmup_rounds": 0,
    "weight_decay": 0.0,
}

# A reward model sees each pair a few times: few, small steps, so that it does not learn them by heart.
REWARD: Final[dict[str, Any]] = PPO | {"local_steps": 8, "batch": 8}
