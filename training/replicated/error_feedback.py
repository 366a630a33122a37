"""Committed error feedback (EF: Seide 2014, Karimireddy 2019): a later payload makes up for the error of an earlier one.

A trainer commits to levels of m = decay·e + Δ by their digest. Every peer with the levels and the payload can derive e, the error
feedback of the next round. An auditor can check that a payload follows from the re-executed update.

These levels are the trainer's buffer: m, or the momentum in a job with estimates. Its format is a payload of eight bits with the
header of the trainer's own payload. Trainers and auditors continue from the decoded vector. Rounding errors are lost.

Jobs with estimates aggregate estimates instead of payloads (EF21: Richtárik 2021, arXiv:2106.05203; with liars: Rammal 2024,
arXiv:2310.09804):

Every voter keeps an estimate g of each trainer's momentum v. A payload is the compressed difference v − g. Every voter adds the
payload to g, and the rule aggregates the estimates:

    payload = codec(v − g)        g' = code8(g + decoded payload)

An estimate is stored as an update with levels of eight bits, which the rule aggregates like any other. One float32 addition and
the codec's exact encoder make g', so all voters have the same bytes. Rounding errors do not add up: the trainer also knows g',
and its next payload contains the error.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final

import numpy as np

from protocol.blob_digest import blob_digest
from protocol.codec import Between, Count, Digest
from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.verdicts import Verdict
from training.job_spec import JobSpec
from training.replicated import codec
from training.replicated.codec import quantization, quantization_cells
from training.replicated.codec.payload import HEADER_BYTES, pack_header, quantize_into
from training.replicated.tensor_layout import Float32Array, TensorBlock, TensorLayout, layout_of

# Factor of a payload's distance in a job without buffers. A deviation is visible only where an element crosses the edge of a
# level. A random deviation by a fraction x of the norm has a distance of about x^1.5, and no deviation has a distance above x.
EDGES: Final = 10
ESTIMATE_BITS: Final = 8  # bits of each level in buffers and estimates
# Largest element that can be encoded: payloads have scales below 2^32, and a difference needs one bit more than an element.
CLIPPED_MAX: Final = float(1 << 30)
# Most elements of a sum that is in memory as a whole (16 MiB): the blocks of a longer sum are computed three times.
WHOLE_MAX: Final = 1 << 22
HALVINGS_MAX: Final = 64  # most halvings in a record: after these nothing is left of e

Allocate = Callable[[int], quantization.Bytes]  # a function that returns an array of this many bytes, with undefined content


@dataclass(frozen=True, slots=True)
class FeedbackRecord:
    """A record of a trainer's last accepted proposal, which determines the trainer's next error feedback e."""

    buffer: Digest | None  # digest of the trainer's buffer; None in a job without buffers
    payload: Digest
    round: Count
    took_step: bool  # True if the proposal's round took a step. Without a step nothing of m was applied.
    halvings: Annotated[int, Between(0, HALVINGS_MAX)]  # number of NORM rejections since the proposal's round
    inner: Digest | None = None  # digest of the inner state after the proposal, in a job that keeps inner states


def buffer_bytes(spec: JobSpec) -> int:
    """Return the number of bytes of each buffer; 0 in a job without buffers."""
    return codec.payload_bytes(layout_of(spec), ESTIMATE_BITS) if spec.commits_to_buffer else 0


def make_buffer(m: Float32Array, header: codec.PayloadHeader, spec: JobSpec) -> codec.QuantizedUpdate | None:
    """Return the buffer of `m`; None in a job without buffers. Raises `LocalProtocolError` if m has no encoding."""
    if not spec.commits_to_buffer:
        return None
    return codec.quantize_vector(replace(header, bits=ESTIMATE_BITS), m, layout_of(spec))


def read_buffer(path: Path, spec: JobSpec) -> codec.QuantizedUpdate:
    """Read a committed buffer. Raises `RemoteProtocolError` if the file is not a buffer of this job."""
    if path.stat().st_size != buffer_bytes(spec):
        raise RemoteProtocolError("bad-buffer", f"the buffer has {path.stat().st_size} bytes, expected {buffer_bytes(spec)}")
    return codec.read_payload(path.read_bytes(), layout_of(spec))  # This size is only possible with levels of eight bits.


def buffer_digest(buffer: codec.QuantizedUpdate) -> bytes:
    """Return the digest of a buffer, which is the value of `Proposal.buffer`."""
    return blob_digest(buffer.encode())


def next_feedback(
    record: FeedbackRecord | None,
    buffer: codec.QuantizedUpdate | None,
    payload: bytes | None,
    layout: TensorLayout,
) -> Float32Array:
    """Return the error feedback e that a trainer continues from, given buffer and payload of `record`; zero without a record.

    Raises `LocalProtocolError` if buffer or payload are not those of the record.
    """
    if record is None:
        return np.zeros(layout.size, dtype=np.float32)
    if buffer is None or payload is None:
        raise LocalProtocolError("the buffer or the payload of the record is missing")
    if (buffer_digest(buffer), blob_digest(payload)) != (record.buffer, record.payload):
        raise LocalProtocolError("the buffer or the payload does not match the record")
    e = buffer.dequantize()
    if record.took_step:
        e -= codec.read_payload(payload, layout).dequantize()
    return apply_halvings(e, record)


def apply_halvings(vector: Float32Array, record: FeedbackRecord) -> Float32Array:
    """Halve the vector, in place, once for each NORM rejection of a record."""
    vector *= np.float32(math.ldexp(1.0, -record.halvings))
    return vector


def residual_of(m: Float32Array, held: Float32Array | None) -> Float32Array:
    """Return the part of m that a payload must transmit: its difference from the estimate `held`.

    None means an estimate of zero.
    """
    return m if held is None else m - held


def accumulate_feedback(e: Float32Array, delta: Float32Array, decay: float, weight: float = 1.0) -> Float32Array:
    """Return m = decay·e + weight·Δ, rounded after each operation."""
    with np.errstate(over="ignore", invalid="ignore"):  # A diverged Δ gives a non-finite m, which has no encoding.
        m = e * np.float32(decay)
        m += delta if weight == 1 else delta * np.float32(weight)
    return m


def clip_to_encodable(m: Float32Array) -> Float32Array:
    """Return m, clipped to values that levels of any bits can encode. NaN becomes the largest value."""
    return np.clip(np.nan_to_num(m, nan=CLIPPED_MAX), -CLIPPED_MAX, CLIPPED_MAX)


def replay_deviation(
    payload: bytes,
    buffer: codec.QuantizedUpdate | None,
    e: Float32Array,
    delta: Float32Array,
    header: codec.PayloadHeader,
    layout: TensorLayout,
    decay: float,
    weight: float = 1.0,
    held: Float32Array | None = None,
) -> tuple[float, float]:
    """Return the distance of a proposal from the re-executed Δ, and the norm that the tolerance is relative to.

    No tolerance accepts an infinite distance. In a job without buffers, the payload itself is compared with Δ.
    """
    if buffer is not None:
        try:  # The residual of the buffer has exactly one encoding, or none.
            is_said = codec.encode_payload(header, residual_of(buffer.dequantize(), held), layout) == payload
        except LocalProtocolError:  # The buffer of a liar may have values that are too large for any payload.
            is_said = False
        return buffer_distances(buffer, e, delta, decay, weight) if is_said else (math.inf, 0.0)
    try:
        return payload_distances(codec.decode_payload(payload, header, layout), delta, held)
    except RemoteProtocolError:
        return math.inf, 0.0


def judge_deviation(distance: float, norm: float, tolerance: float) -> Verdict:
    return Verdict.ACCEPT if distance <= tolerance * norm else Verdict.REPLAY


def buffer_distances(
    buffer: codec.QuantizedUpdate, e: Float32Array, delta: Float32Array, decay: float, weight: float = 1.0
) -> tuple[float, float]:
    """Return the distance of decay·e + weight·Δ from the set of vectors with the buffer's encoding, and ‖weight·Δ‖."""

    def values(block: TensorBlock) -> Float32Array:
        return accumulate_feedback(e[block.elements], delta[block.elements], decay, weight)

    distance, norm = _distances(buffer, values, delta)
    return distance, weight * norm


def payload_distances(
    payload: codec.QuantizedUpdate, delta: Float32Array, held: Float32Array | None = None
) -> tuple[float, float]:
    """Return `EDGES` times the distance of Δ − `held` from the set of vectors with the payload's encoding, and ‖Δ‖."""

    def values(block: TensorBlock) -> Float32Array:
        return residual_of(delta[block.elements], None if held is None else held[block.elements])

    distance, norm = _distances(payload, values, delta)
    return EDGES * distance, norm


def _distances(
    said: codec.QuantizedUpdate, values: Callable[[TensorBlock], Float32Array], delta: Float32Array
) -> tuple[float, float]:
    """Return the distance of `values` from an encoding, and ‖Δ‖, in float64.

    Rounding differs between machines, so verdicts at the edge of the tolerance may differ, too.
    """
    if not (math.isfinite(delta.max()) and math.isfinite(delta.min())):
        return math.inf, 0.0
    parts = (delta[block.elements].astype(np.float64) for block in said.layout.blocks)
    norm = math.sqrt(sum(float(np.einsum("i,i", part, part)) for part in parts))  # `einsum`: blocks are too short for a BLAS.
    with np.errstate(over="ignore", invalid="ignore"):  # A diverged Δ has an infinite distance.
        return quantization_cells.cell_distance(said, values), norm


# Estimates ---------------------------------------------------------------------------------------------------------


def allocate_in_memory(size: int) -> quantization.Bytes:
    return np.empty(size, dtype=np.uint8)


def estimate_bytes(layout: TensorLayout) -> int:
    """Return the number of bytes of each estimate."""
    return codec.payload_bytes(layout, ESTIMATE_BITS)


def update_estimate(
    estimate: codec.QuantizedUpdate | None, payload: codec.QuantizedUpdate, room: Allocate = allocate_in_memory
) -> codec.QuantizedUpdate:
    """Return the estimate after a payload was added. It has the payload's origin, and its bytes are in an array from `room`.

    Raises `LocalProtocolError` if the sum has no encoding.
    """
    layout, chunks = payload.layout, len(payload.layout.chunk_lengths)
    said = [
        (update, quantization.scale_values(update.codes, update.exponent)) for update in (payload, estimate) if update is not None
    ]

    def total(block: TensorBlock) -> Float32Array:
        first, *others = (update.scaled_elements(block, values) for update, values in said)
        for other in others:
            first += other
        return first

    if layout.size <= WHOLE_MAX:
        whole = np.concatenate([total(block) for block in layout.blocks])
    encoded = room(estimate_bytes(layout))
    codes, packed = encoded[HEADER_BYTES : HEADER_BYTES + chunks], encoded[HEADER_BYTES + chunks :]
    values = total if layout.size > WHOLE_MAX else lambda block: whole[block.elements]
    exponent, codes[:] = quantize_into(packed, values, layout, ESTIMATE_BITS)
    encoded[:HEADER_BYTES] = np.frombuffer(pack_header(ESTIMATE_BITS, payload.origin, exponent), np.uint8)
    return codec.QuantizedUpdate(ESTIMATE_BITS, payload.origin, layout, exponent, codes, packed, encoded)
