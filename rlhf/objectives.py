"""The objectives of this feature."""

from __future__ import annotations

from typing import Final

from rlhf.objective import PPO
from rlhf.reward import MEAN_REWARD, REWARD
from rlhf.supervised import DPO, INSTRUCT

OBJECTIVES: Final = (PPO, REWARD, MEAN_REWARD, INSTRUCT, DPO)
