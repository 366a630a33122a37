"""Statistics of one trainer's responses, which its declaration says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from rlhf.objectives.ppo import MILLIONTHS, in_millionths

SCORE_VARIANCE: Final = 1e-4  # added to that of the scores: whoever's differ by 1e-4 finds the same correlation within .01
Floats = npt.NDArray[np.float64]


def distinct_2(responses: Sequence[npt.NDArray[np.int64]], vocabulary: int) -> int:
    """In millionths, rounded down; all of them where no response has two tokens."""
    pairs = np.concatenate([response[:-1] * vocabulary + response[1:] for response in responses])
    return MILLIONTHS * len(np.unique(pairs)) // len(pairs) if len(pairs) else MILLIONTHS


def length_score_correlation(lengths: Floats, scores: Floats) -> int:
    """Pearson's, in millionths; 0 where all lengths are the same."""
    lengths, scores = lengths - lengths.mean(), scores - scores.mean()
    spread = np.sqrt(np.square(lengths).mean() * (np.square(scores).mean() + SCORE_VARIANCE))
    found = in_millionths(float((lengths * scores).mean() / spread)) if spread else 0
    return max(-MILLIONTHS, min(MILLIONTHS, found))  # where a score is no number it is the largest
