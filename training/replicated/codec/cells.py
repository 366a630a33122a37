"""Which vectors an update of eight bits is said of, and how far another vector is from the nearest of them.

    level l, |l| < 127   values from |l| − ½ to |l| + ½ scales, with its sign; of level 0 with either
    level ±127           values from 126½ scales up to 127 times the next larger scale
    scale 0              values up to 127 times the least scale; where all scales are 0, up to 127 · 2^−65

The codec rounds a scale down from a 127th of the largest |value|, and a canonical chunk uses its largest level. So a scale that
is too large puts that level beyond every value, and one that is too small leaves values beyond that level.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from training.replicated.codec import scales
from training.replicated.codec.levels import LEVEL_MAX
from training.replicated.codec.update import Update
from training.replicated.layout import Float32Array, Run

EMPTY = np.ldexp(1.0, scales.EXPONENT_MIN + scales.SCALE_BITS - 1)  # where the largest scale is below this, all are 0
NEXT = np.append(scales.SCALES[1:], 1 << scales.SCALE_BITS)  # of each code the next larger scale


def squared_distance(update: Update, values: Callable[[Run], Float32Array]) -> float:
    """‖v − the nearest vector that `update` is said of‖², in float64, where `values` gives v of each block."""
    assert update.mode.bits == 8 and not update.mode.sparse
    step, total = np.ldexp(1.0, update.exponent), 0.0
    units, tops = update.scales * step, LEVEL_MAX * NEXT[update.codes] * step
    if not update.codes.any():
        tops[:] = LEVEL_MAX * EMPTY
    for block in update.layout.blocks:
        outside = _outside(update, block, values(block).astype(np.float64), units, tops)
        total += float(np.einsum("i,i", outside, outside))  # in this thread: blocks are too short for those of a BLAS
    return total


def _outside(
    update: Update,
    block: Run,
    values: npt.NDArray[np.float64],
    units: npt.NDArray[np.float64],
    tops: npt.NDArray[np.float64],
) -> npt.NDArray[np.float64]:
    entries = update.entries(block)
    unit, top = (np.repeat(of[block.chunks], entries.counts) for of in (units, tops))
    magnitudes = np.abs(entries.levels.astype(np.float64))
    sizes = np.where(entries.levels == 0, np.abs(values), values * np.sign(entries.levels))
    highest = np.where((magnitudes == LEVEL_MAX) | (unit == 0), top, (magnitudes + 0.5) * unit)
    outside = np.maximum((magnitudes - 0.5) * unit - sizes, sizes - highest)
    return np.maximum(outside, 0.0, out=outside)
