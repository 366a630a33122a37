"""The pairs of a set of preferences that a step of training is made of. All peers draw the same ones."""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from training import random_stream


def draw_pairs(job: bytes, round: int, trainer: bytes, step: int, *, count: int, pairs: int, seed: int) -> npt.NDArray[np.int64]:
    """The numbers in 0 .. pairs−1 of the `count` pairs of one step: nobody chooses, and everybody can check.

    One pair may be drawn twice, as one stretch of a text may (`training.data.token_sequences.batch_offsets`).
    """
    draw = hashlib.sha256(b"folkmoot/pairs/1" + job + trainer)
    draw.update(b"".join(number.to_bytes(8, "big") for number in (round, step, seed)))
    key = draw.digest()
    drawn = (hashlib.sha256(key + index.to_bytes(4, "big")).digest() for index in range(count))
    # 64 drawn bits over at most 2^20 pairs: the modulo bias is below 2^-44
    return np.array([int.from_bytes(digest[:8], "big") % pairs for digest in drawn], dtype=np.int64)


def draw_pairs_by_epoch(
    job: bytes, round: int, trainer: bytes, step: int, *, steps: int, count: int, pairs: int, seed: int
) -> npt.NDArray[np.int64]:
    """As `draw_pairs`, but a trainer meets each pair once in each of its passes over them. `steps` are those of a round."""
    first = (round * steps + step) * count
    places = np.arange(first, first + count, dtype=np.int64)
    passes: npt.NDArray[np.int64] = places // pairs
    orders = {number: _order_of_pairs(job, trainer, int(number), pairs, seed) for number in np.unique(passes)}
    return np.array([orders[number][place % pairs] for number, place in zip(passes, places, strict=True)], dtype=np.int64)


@lru_cache(maxsize=8)  # one for each trainer and pass whose steps are trained or replayed in turn; 8 MB each at most
def _order_of_pairs(job: bytes, trainer: bytes, number_of_pass: int, pairs: int, seed: int) -> npt.NDArray[np.int64]:
    """In which order a trainer meets the pairs in one pass over them."""
    drawn = np.frombuffer(random_stream.random_bytes(8 * pairs, "pairs-in-turn", job, trainer, number_of_pass, seed), dtype="<u8")
    return np.argsort(drawn, kind="stable")
