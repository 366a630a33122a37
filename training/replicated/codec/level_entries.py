"""What an update says of a run of elements."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from training.replicated.codec.quantization_levels import Levels


@dataclass(frozen=True, slots=True, eq=False)
class LevelEntries:
    """Element `positions[i]` of the run is `levels[i]` times its chunk's scale; all others are zero.

    Levels in a chunk of scale zero mean nothing.
    """

    positions: npt.NDArray[np.int32] | None  # ascending, counted from the run's first element; None: every element
    levels: Levels
    counts: npt.NDArray[np.int64]  # entries of each of the run's chunks
