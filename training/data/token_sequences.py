"""A text as tokens, and the random choice of the sequences of an inner step."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

TokenArray = npt.NDArray[np.unsignedinteger]


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """A job's text as token ids, memory-mapped: uint8 for the bytes of a text, uint16 otherwise."""

    train: TokenArray
    held_out: TokenArray  # tokens that are never used in training
    token_bytes: npt.NDArray[np.int64]  # for each token id, the number of bytes of text that it stands for

    @classmethod
    def without_text(cls, token_bytes: npt.NDArray[np.int64]) -> TokenizedText:
        """Return the empty text of a job whose objective reads none."""
        return cls(np.empty(0, dtype=np.uint8), np.empty(0, dtype=np.uint8), token_bytes)


def batch_offsets(
    job: bytes, round_number: int, trainer: bytes, step: int, *, batch: int, tokens: int, context: int, seed: int
) -> npt.NDArray[np.int64]:
    """Return the offsets of the `batch` sequences of one inner step, in 0 .. tokens-context-1, shape (B,).

    SHA-256 determines the offsets, so that every peer can check them and no trainer can choose them.
    """
    assert tokens > context
    draw = hashlib.sha256(b"folkmoot/batch/1" + job + trainer)
    draw.update(b"".join(number.to_bytes(8, "big") for number in (round_number, step, seed)))
    key = draw.digest()
    drawn = (hashlib.sha256(key + index.to_bytes(4, "big")).digest() for index in range(batch))
    # An offset is 64 random bits modulo at most 2^36 offsets, so the bias is below 2^-28.
    return np.array([int.from_bytes(digest[:8], "big") % (tokens - context) for digest in drawn], dtype=np.int64)


def sequence_batch(
    tokens: TokenArray, starts: npt.NDArray[np.int64], context: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the inputs and the next-token targets of the sequences at these offsets, each of shape (B, T)."""
    taken_BT = np.stack([tokens[start : start + context + 1] for start in starts]).astype(np.int64)
    return taken_BT[:, :-1], taken_BT[:, 1:]
