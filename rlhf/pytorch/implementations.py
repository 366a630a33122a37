"""What PyTorch computes of the objectives of RLHF."""

from __future__ import annotations

from typing import Final

from rlhf.pytorch.ppo import PpoDeclarer, ppo_loss
from rlhf.pytorch.supervised_objectives import (
    dpo_figures,
    dpo_loss,
    fill_reference_log_probabilities,
    held_out_nats,
    instruct_loss,
    reward_loss,
    reward_metrics,
)
from training.engine_implementations import EngineImplementations, ObjectiveFunctions

_REWARD: Final = ObjectiveFunctions(loss=reward_loss, metrics=reward_metrics)

IMPLEMENTATIONS: Final = EngineImplementations(
    objectives={
        "ppo": ObjectiveFunctions(loss=ppo_loss, declarer=PpoDeclarer),
        "reward": _REWARD,
        "reward-mean": _REWARD,
        "instruct": ObjectiveFunctions(loss=instruct_loss, metrics=held_out_nats),
        "dpo": ObjectiveFunctions(loss=dpo_loss, metrics=dpo_figures, reference=fill_reference_log_probabilities),
    },
)
