"""Pseudo-random bytes and numbers that are the same on all machines: SHA-256 in counter mode."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
import numpy.typing as npt

DIGEST_BYTES = 32
# Number of 16-bit uniforms in the sum for one number: near enough to normal for initial parameters, with 8 bytes of hash.
IRWIN_HALL_TERMS = 4
# Standard deviation of a sum of `IRWIN_HALL_TERMS` uniforms.
IRWIN_HALL_DEVIATION = math.sqrt((2**32 - 1) / 12 * IRWIN_HALL_TERMS)


def random_bytes(length: int, *seed: Any) -> bytes:
    """Return the first `length` bytes of SHA-256(seed ‖ 0) ‖ SHA-256(seed ‖ 1) ‖ ….

    The seed is the concatenation of its parts, each after its length.
    """
    parts = [part if isinstance(part, bytes) else str(part).encode() for part in seed]
    start = hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts))
    return b"".join(_block(start, counter) for counter in range(-(-length // DIGEST_BYTES)))[:length]


def _block(start: Any, counter: int) -> bytes:
    state = start.copy()
    state.update(counter.to_bytes(8, "little"))
    return state.digest()


UNIFORM_MAX = 65_535  # largest absolute value of `uniform_integers`


def uniform_integers(count: int, *seed: Any) -> npt.NDArray[np.int32]:
    """Return `count` odd integers from −`UNIFORM_MAX` to `UNIFORM_MAX`, all equally likely."""
    return 2 * np.frombuffer(random_bytes(2 * count, *seed), dtype="<u2").astype(np.int32) - UNIFORM_MAX


def irwin_hall_integers(count: int, *seed: Any) -> npt.NDArray[np.int32]:
    """Return `count` integers, nearly normal, with mean 0 and standard deviation `IRWIN_HALL_DEVIATION`."""
    uniform = np.frombuffer(random_bytes(2 * IRWIN_HALL_TERMS * count, *seed), dtype="<u2").reshape(count, IRWIN_HALL_TERMS)
    return uniform.sum(axis=1, dtype=np.int32) - IRWIN_HALL_TERMS * 65535 // 2
