"""Committed error feedback (EF: Seide 2014, Karimireddy 2019): what a payload could not say is said by a later one.

A trainer commits to levels of m = decay·e + Δ by their digest. Everybody who holds levels and payload can derive the next e, and
an auditor can check that a payload follows from the update it re-executed.

These levels are the trainer's buffer: a payload of eight bits under the header of the trainer's own payload, of its m, or with
estimates of its momentum. Trainers and auditors go on from the vector that the levels decode to. Rounding errors are lost.

Estimates in the place of messages (EF21: Richtárik 2021, arXiv:2106.05203; with liars: Rammal 2024, arXiv:2310.09804).

Every voter holds an estimate g of each trainer's momentum v. A payload is the difference v − g, compressed. Every voter adds it
to g, and the rule aggregates the estimates:

    said = v − g        payload = codec(said)        g' = code8(g + decoded payload)

An estimate is stored as an update with levels of eight bits: the rule takes it as it takes any update. One float32
addition and the codec's exact encoder make g', so all voters have the same bytes. Rounding errors do not add up: the trainer
holds g', too, and its next payload contains the error.
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

# A deviation shows only where an element crosses the edge of a level. A random deviation by a share x of the norm has a
# distance of about x to the power of 1.5, and no deviation has more than x.
EDGES: Final = 10
ESTIMATE_BITS: Final = 8  # of a level of a buffer, or of an estimate
CLIPPED_MAX: Final = float(1 << 30)  # of an element: payloads have scales below 2^32, of which a difference takes one bit
WHOLE_MAX: Final = 1 << 22  # elements of a sum that is held, in 16 MiB; blocks of a longer one are made three times
HALVINGS_MAX: Final = 64  # by then nothing is left of e; bounds the count in the replicated state

Allocate = Callable[[int], quantization.Bytes]  # an array of so many bytes, with anything in it


@dataclass(frozen=True, slots=True)
class FeedbackRecord:
    """A trainer's last accepted proposal, from which its next e follows."""

    buffer: Digest | None  # of the levels of m; None in a job without feedback
    payload: Digest
    round: Count
    took_step: bool  # whether that round took a step; if not, nothing of m was applied
    halvings: Annotated[int, Between(0, HALVINGS_MAX)]  # norm rejections since
    inner: Digest | None = None  # of the inner optimizer's state after it, where the job keeps that


def buffer_bytes(spec: JobSpec) -> int:
    """Bytes of every buffer; 0 in a job that has none."""
    return codec.payload_bytes(layout_of(spec), ESTIMATE_BITS) if spec.commits_to_buffer else 0


def make_buffer(m: Float32Array, header: codec.PayloadHeader, spec: JobSpec) -> codec.QuantizedUpdate | None:
    """The buffer of `m`; None in a job that carries nothing from round to round. `LocalProtocolError` if m has no levels."""
    if not spec.commits_to_buffer:
        return None
    return codec.quantize_vector(replace(header, bits=ESTIMATE_BITS), m, layout_of(spec))


def read_buffer(path: Path, spec: JobSpec) -> codec.QuantizedUpdate:
    """A committed buffer; `RemoteProtocolError` if the file holds none of this job."""
    if path.stat().st_size != buffer_bytes(spec):
        raise RemoteProtocolError("bad-buffer", f"{path.stat().st_size} bytes where {buffer_bytes(spec)} are right")
    return codec.read_payload(path.read_bytes(), layout_of(spec))  # levels of fewer bits have fewer bytes


def buffer_digest(buffer: codec.QuantizedUpdate) -> bytes:
    """The digest in `Proposal.buffer`."""
    return blob_digest(buffer.encode())


def next_feedback(
    record: FeedbackRecord | None,
    buffer: codec.QuantizedUpdate | None,
    payload: bytes | None,
    layout: TensorLayout,
) -> Float32Array:
    """The e that a trainer continues from, given its last accepted buffer and payload (both of `record`; None without one)."""
    if record is None:
        return np.zeros(layout.size, dtype=np.float32)
    if buffer is None or payload is None:
        raise LocalProtocolError("buffer and payload of the record are missing")
    if (buffer_digest(buffer), blob_digest(payload)) != (record.buffer, record.payload):
        raise LocalProtocolError("buffer and payload are not those of the record")
    e = buffer.dequantize()
    if record.took_step:
        e -= codec.read_payload(payload, layout).dequantize()
    return apply_halvings(e, record)


def apply_halvings(vector: Float32Array, record: FeedbackRecord) -> Float32Array:
    """The vector after the NORM rejections of a record. It is overwritten."""
    vector *= np.float32(math.ldexp(1.0, -record.halvings))
    return vector


def residual_of(m: Float32Array, held: Float32Array | None) -> Float32Array:
    """What a payload is to say of m: the difference to what everybody holds of it already. `held` None is zero."""
    return m if held is None else m - held


def accumulate_feedback(e: Float32Array, delta: Float32Array, decay: float, weight: float = 1.0) -> Float32Array:
    """m = decay·e + weight·Δ, rounded after each operation."""
    with np.errstate(over="ignore", invalid="ignore"):  # a diverged Δ gives a non-finite m, which has no encoding
        m = e * np.float32(decay)
        m += delta if weight == 1 else delta * np.float32(weight)
    return m


def clip_to_encodable(m: Float32Array) -> Float32Array:
    """The buffer m, clipped to values that levels of any bits can encode. Not a number becomes the largest value."""
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
    """Distance of a proposal from the re-executed Δ, and the norm that the tolerance is relative to. No tolerance accepts an
    infinite distance.

    A job without feedback has no buffer, and the payload itself is compared with Δ.
    """
    if buffer is not None:
        try:  # the only encoding of what is left of the buffer, which may have none
            is_said = codec.encode_payload(header, residual_of(buffer.dequantize(), held), layout) == payload
        except LocalProtocolError:  # a liar's levels may be too large for any payload
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
    """The distance of decay·e + weight·Δ from the vectors with these levels, and ‖weight·Δ‖."""

    def values(block: TensorBlock) -> Float32Array:
        return accumulate_feedback(e[block.elements], delta[block.elements], decay, weight)

    distance, norm = _distances(buffer, values, delta)
    return distance, weight * norm


def payload_distances(
    payload: codec.QuantizedUpdate, delta: Float32Array, held: Float32Array | None = None
) -> tuple[float, float]:
    """`EDGES` times the distance of Δ − held from the vectors with this encoding, and ‖Δ‖."""

    def values(block: TensorBlock) -> Float32Array:
        return residual_of(delta[block.elements], None if held is None else held[block.elements])

    distance, norm = _distances(payload, values, delta)
    return EDGES * distance, norm


def _distances(
    said: codec.QuantizedUpdate, values: Callable[[TensorBlock], Float32Array], delta: Float32Array
) -> tuple[float, float]:
    """In float64. Two machines' results differ by rounding, so their verdicts differ only at the edge of the tolerance."""
    if not (math.isfinite(delta.max()) and math.isfinite(delta.min())):
        return math.inf, 0.0
    parts = (delta[block.elements].astype(np.float64) for block in said.layout.blocks)
    norm = math.sqrt(sum(float(np.einsum("i,i", part, part)) for part in parts))  # in this thread: too short for a BLAS
    with np.errstate(over="ignore", invalid="ignore"):  # a diverged Δ is far away
        return quantization_cells.cell_distance(said, values), norm


# Estimates ---------------------------------------------------------------------------------------------------------


def allocate_in_memory(size: int) -> quantization.Bytes:
    return np.empty(size, dtype=np.uint8)


def estimate_bytes(layout: TensorLayout) -> int:
    """Bytes of every estimate."""
    return codec.payload_bytes(layout, ESTIMATE_BITS)


def update_estimate(
    estimate: codec.QuantizedUpdate | None, payload: codec.QuantizedUpdate, room: Allocate = allocate_in_memory
) -> codec.QuantizedUpdate:
    """The estimate after a payload, with the payload's origin, in bytes that `room` gives.

    `LocalProtocolError` if the sum is too large for any encoding.
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
