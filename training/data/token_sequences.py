"""A text as tokens, and which of its sequences a step is made of."""

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
    held_out: TokenArray  # never trained on
    token_bytes: npt.NDArray[np.int64]  # how many bytes of text each token id stands for

    @classmethod
    def without_text(cls, token_bytes: npt.NDArray[np.int64]) -> TokenizedText:
        """Of a job whose objective reads no text."""
        return cls(np.empty(0, dtype=np.uint8), np.empty(0, dtype=np.uint8), token_bytes)


def batch_offsets(
    job: bytes, round_number: int, trainer: bytes, step: int, *, batch: int, tokens: int, context: int, seed: int
) -> npt.NDArray[np.int64]:
    """Where the `batch` sequences of one inner step begin, in 0 .. tokens-context-1.

    Drawn by SHA-256, so that everybody can check who trains on what, and nobody can choose.
    """
    assert tokens > context
    draw = hashlib.sha256(b"folkmoot/batch/1" + job + trainer)
    draw.update(b"".join(number.to_bytes(8, "big") for number in (round_number, step, seed)))
    key = draw.digest()
    drawn = (hashlib.sha256(key + index.to_bytes(4, "big")).digest() for index in range(batch))
    # 64 drawn bits over at most 2^36 offsets: the modulo bias is below 2^-28
    return np.array([int.from_bytes(digest[:8], "big") % (tokens - context) for digest in drawn], dtype=np.int64)


def sequence_batch(
    tokens: TokenArray, starts: npt.NDArray[np.int64], context: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Inputs and next-token targets of shape (B, T)."""
    taken_BT = np.stack([tokens[start : start + context + 1] for start in starts]).astype(np.int64)
    return taken_BT[:, :-1], taken_BT[:, 1:]
