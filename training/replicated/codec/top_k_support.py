"""Which elements a sparse payload says: of each chunk the k with the largest |m|, in ascending order; and how they are written.

The gap before an element, counted from the one before it in its chunk, is written in Rice's code (Rice and Plaunt 1971): a
quotient by 2^p in unary, as that many zeros and a one, and a remainder of p bits. Gaps of random supports are geometrically
distributed, for which this is the best prefix code there is (Gallager and Van Voorhis 1975), within 2 % of their entropy.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from training.job_spec import KEEP_MIN
from training.replicated.codec.bit_packing import WIDTH_MAX
from training.replicated.tensor_layout import CHUNK, Float32Array, TensorLayout

Positions = npt.NDArray[np.int32]
Counts = npt.NDArray[np.int64]


@functools.cache
def rice_parameter(keep: int) -> int:
    """p, for which the longest code of a full chunk's support is shortest; of two the smaller one."""
    return min(range(WIDTH_MAX + 2), key=lambda p: keep * (p + 1) + (CHUNK - keep >> p))


assert rice_parameter(KEEP_MIN) <= WIDTH_MAX


def kept_counts(layout: TensorLayout, keep: int) -> Counts:
    """(chunks,): how many elements of each chunk are said: `keep` of 4096, and as many of less, rounded down, but one."""
    return np.maximum(1, layout.chunk_lengths * keep // CHUNK)


def quotient_bits_max(lengths: Counts, kept: Counts, p: int) -> int:
    """What the quotients of these chunks take at most: a one for each, and the zeros that fit between them."""
    return int(np.sum(kept + (lengths - kept >> p)))


def choose_top_k(part: Float32Array, kept: Counts) -> Positions:
    """Positions of the largest |part| in each of its chunks, which keep `kept`; of equals the first."""
    magnitudes = part.view(np.uint32) & np.uint32(0x7FFFFFFF)  # in the order of the floats, without their signs
    full = len(part) // CHUNK
    chosen = [_largest(magnitudes[: full * CHUNK].reshape(full, CHUNK), int(kept[0]))] if full else []
    if len(part) % CHUNK:
        chosen.append(_largest(magnitudes[full * CHUNK :][None], int(kept[-1])) + np.int32(full * CHUNK))
    return np.concatenate(chosen)


def _largest(rows: npt.NDArray[np.uint32], keep: int) -> Positions:
    """Positions, in all rows together, of the `keep` largest of each."""
    place = rows.shape[1] - keep
    least = np.partition(rows, place, axis=1)[:, place, None]
    chosen = rows >= least
    for row in np.flatnonzero(np.count_nonzero(chosen, axis=1) > keep):
        equal = np.flatnonzero(rows[row] == least[row])
        chosen[row, equal[keep - np.count_nonzero(rows[row] > least[row]) :]] = False
    return np.flatnonzero(chosen).astype(np.int32)


def rice_encode(positions: Positions, kept: Counts, p: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint16]]:
    """Quotients, as an array of bits, and remainders of a block's ascending positions, of which each chunk has `kept`."""
    before = np.concatenate([np.full(1, -1, np.int32), positions[:-1]])
    filled = np.flatnonzero(kept)
    before[(np.cumsum(kept) - kept)[filled]] = CHUNK * filled - 1  # the first gap of a chunk begins with the chunk
    gaps = positions - before - 1
    ends = np.cumsum((gaps >> p) + 1)
    bits = np.zeros(ends[-1] if len(ends) else 0, dtype=np.uint8)
    bits[ends - 1] = 1
    return bits, (gaps & (1 << p) - 1).astype(np.uint16)
