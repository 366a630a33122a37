"""The objectives of this feature."""

from __future__ import annotations

from typing import Final

from rlhf.objectives.ppo import PPO
from rlhf.objectives.reward_model import MEAN_REWARD, REWARD, REWARD_NAMES
from rlhf.objectives.supervised_objectives import DPO, INSTRUCT

OBJECTIVES: Final = (PPO, REWARD, MEAN_REWARD, INSTRUCT, DPO)
PAIR_OBJECTIVES: Final = (*REWARD_NAMES, DPO.name)  # whose jobs learn from a set of preferences
