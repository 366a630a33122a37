"""The objectives of this feature."""

from __future__ import annotations

from typing import Final

from rlhf.objective import PPO
from rlhf.reward import MEAN_REWARD, REWARD, REWARD_NAMES
from rlhf.supervised import DPO, INSTRUCT

OBJECTIVES: Final = (PPO, REWARD, MEAN_REWARD, INSTRUCT, DPO)
OF_PAIRS: Final = (*REWARD_NAMES, DPO.name)  # whose jobs learn from a set of preferences
