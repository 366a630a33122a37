"""Whether a reward model is as sure as it is right. numpy only."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

BINS: Final = 10
Floats = npt.NDArray[np.floating[Any]]


def calibration_error(chances: Floats, p: Floats) -> float:
    """Expected calibration error (Guo et al. 2017, arXiv:1706.04599) of N pairs.

    `chances`: σ(d), how likely the model finds the first response the better one; `p`: how likely people do. Both (N,). Each pair
    counts in both orders, so that nothing depends on which response stands first.
    """
    said, right = np.concatenate([chances, 1 - chances]).astype(np.float64), np.concatenate([p, 1 - p]).astype(np.float64)
    bins = np.minimum((said * BINS).astype(np.int64), BINS - 1)
    # Of each bin, its share of the pairs times how far its mean chance is from its mean p.
    gaps = np.bincount(bins, weights=said - right, minlength=BINS)
    return float(np.abs(gaps).sum() / len(said))
