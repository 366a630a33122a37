"""Committed error feedback (EF: Seide 2014, Karimireddy 2019): what a payload could not say is said by a later one.

A trainer commits to m = decay·e + Δ by its digest. Everybody who holds m and the payload can derive the next e, and an auditor
can check that a payload follows from the update it re-executed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Final

import numpy as np
import numpy.typing as npt

from protocol.codec import Between, Count, Digest
from protocol.digests import digest_of
from protocol.errors import LocalProtocolError
from protocol.reasons import Verdict
from training.replicated import codec
from training.replicated.codec import cells
from training.replicated.layout import BLOCK, Block, Float32Array, Layout

# A deviation shows only where an element crosses the edge of a level. A random deviation by a share x of the norm has a
# distance of about x to the power of 1.5, and no deviation has more than x.
EDGES: Final = 10
HALVINGS_MAX: Final = 64  # by then nothing is left of e; bounds the count in the replicated state


@dataclass(frozen=True, slots=True)
class Record:
    """A trainer's last accepted proposal, from which its next e follows."""

    buffer: Digest | None  # of m; None in a job without feedback
    payload: Digest
    round: Count
    stepped: bool  # whether that round took a step; if not, nothing of m was applied
    halvings: Annotated[int, Between(0, HALVINGS_MAX)]  # norm rejections since
    inner: Digest | None = None  # of the inner optimizer's state after it, where the job keeps that


def buffer_digest(m: Float32Array, in_parts: bool = False) -> bytes:
    """Of the little-endian float32 bytes: what `Proposal.buffer` commits to. `in_parts` as the job says."""
    return digest_of(np.ascontiguousarray(m, dtype="<f4").data, in_parts=in_parts)


def feedback_after(
    record: Record | None,
    m: Float32Array | None,
    payload: bytes | None,
    layout: Layout,
    in_parts: bool = False,
    said: codec.Update | None = None,
) -> Float32Array:
    """The e that a trainer continues from, given its last accepted buffer and payload (both of `record`; None without one).

    `said` is what m was read from, where the job's buffers are levels.
    """
    if record is None:
        return np.zeros(layout.size, dtype=np.float32)
    named = record.buffer, record.payload
    of_buffer = None if m is None else digest_of(said.encode(), in_parts) if said else buffer_digest(m, in_parts)
    if m is None or payload is None or (of_buffer, digest_of(payload, in_parts)) != named:
        raise LocalProtocolError("buffer and payload are not those of the record")
    left = codec.read(payload, layout).dense() if record.stepped else np.zeros_like(m)
    with np.errstate(over="ignore", invalid="ignore"):  # somebody else's m may be any bytes
        np.subtract(m, left, out=left)
        left *= np.float32(math.ldexp(1.0, -record.halvings))
    return left


def unsaid(m: Float32Array, held: Float32Array | None) -> Float32Array:
    """What a payload is to say of m: the difference to what everybody holds of it already. `held` None is zero."""
    return m if held is None else m - held


def accumulate(e: Float32Array, delta: Float32Array, decay: float, weight: float = 1.0) -> Float32Array:
    """m = decay·e + weight·Δ, rounded after each operation."""
    with np.errstate(over="ignore", invalid="ignore"):  # a diverged Δ gives a non-finite m, which has no encoding
        m = e * np.float32(decay)
        m += delta if weight == 1 else delta * np.float32(weight)
    return m


def judge_replay(
    m: Float32Array,
    e: Float32Array,
    delta_replay: Float32Array,
    payload: bytes,
    header: codec.Header,
    layout: Layout,
    decay: float,
    tolerance: float,
    weight: float = 1.0,
    held: Float32Array | None = None,
    said: codec.Update | None = None,
) -> Verdict:
    """Whether `payload` says the committed `m` exactly, and `m` is what re-execution gives, up to `tolerance` · ‖weight · Δ‖.

    `held` is what everybody knows of m already: the trainer's estimate, where the job has estimates. `said` as in
    `replay_distances`.
    """
    for vector in (m, e, delta_replay):
        if vector.shape != (layout.size,) or not _is_finite(vector):
            return Verdict.REPLAY
    if not encodes(unsaid(m, held), payload, header, layout):
        return Verdict.REPLAY
    error, norm = replay_distances(m, e, delta_replay, decay, weight, said)
    return Verdict.ACCEPT if error <= tolerance * norm else Verdict.REPLAY


def encodes(m: Float32Array, payload: bytes, header: codec.Header, layout: Layout) -> bool:
    """Whether `payload` is the one encoding of a committed buffer, somebody else's and perhaps without any."""
    try:
        return codec.encode(header, m, layout) == payload
    except LocalProtocolError:  # m is the other trainer's: it may be too large for any payload
        return False


def _is_finite(vector: Float32Array) -> bool:
    return math.isfinite(vector.max()) and math.isfinite(vector.min())


def replay_distances(
    m: Float32Array,
    e: Float32Array,
    delta: Float32Array,
    decay: float,
    weight: float = 1.0,
    said: codec.Update | None = None,
) -> tuple[float, float]:
    """‖m − (decay·e + weight·Δ)‖ and ‖weight·Δ‖ in float64; opinions of honest judges differ only at the edge of a wide gap.

    Where m was read from levels, `said`, it is the nearest vector that these are said of: rounding an honest m is no deviation.
    """
    error = norm = 0.0
    with np.errstate(over="ignore", invalid="ignore"):  # a liar's values overflow: that is far away
        for start in range(0, len(m), BLOCK):
            part = slice(start, start + BLOCK)
            norm += _sum_of_squares(delta[part].astype(np.float64))
            if said is None:
                replayed = accumulate(e[part], delta[part], decay, weight)
                error += _sum_of_squares(np.subtract(m[part], replayed, dtype=np.float64))
        if said is not None:
            error = cells.distance(said, lambda block: accumulate(e[block.elements], delta[block.elements], decay, weight)) ** 2
    return math.sqrt(error), weight * math.sqrt(norm)


def payload_distances(said: codec.Update, delta: Float32Array, held: Float32Array | None = None) -> tuple[float, float]:
    """`EDGES` times the distance of Δ − held from the vectors with the encoding `said`, and ‖Δ‖: for jobs without feedback."""
    if not _is_finite(delta):
        return math.inf, 0.0

    def values(block: Block) -> Float32Array:
        part = delta[block.elements]
        return part if held is None else part - held[block.elements]

    norm = sum(_sum_of_squares(delta[block.elements].astype(np.float64)) for block in said.layout.blocks)
    with np.errstate(over="ignore", invalid="ignore"):  # a diverged Δ is far away
        return EDGES * cells.distance(said, values), math.sqrt(norm)


def _sum_of_squares(part: npt.NDArray[np.float64]) -> float:
    return float(np.einsum("i,i", part, part))  # in this thread: blocks are too short for those of a BLAS
