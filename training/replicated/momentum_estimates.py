"""Estimates in the place of messages (EF21: Richtárik 2021, arXiv:2106.05203; with liars: Rammal 2024, arXiv:2310.09804).

Every voter holds an estimate g of each trainer's momentum v. A payload is the difference v − g, compressed. Every voter adds it
to g, and the rule aggregates the estimates:

    said = v − g        payload = codec(said)        g' = code8(g + decoded payload)

An estimate is stored as an update with levels of eight bits: the rule takes it as it takes any update. One float32
addition and the codec's exact encoder make g', so all voters have the same bytes. Rounding errors do not add up: the trainer
holds g', too, and its next payload contains the error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from training.replicated.codec import QuantizedUpdate, payload_bytes, quantization
from training.replicated.codec.payload import HEADER_BYTES, pack_header, quantize_into
from training.replicated.error_feedback import ESTIMATE_BITS
from training.replicated.tensor_layout import Float32Array, TensorBlock, TensorLayout

WHOLE_MAX: Final = 1 << 22  # elements of a sum that is held, in 16 MiB; blocks of a longer one are made three times

Allocate = Callable[[int], quantization.Bytes]  # an array of so many bytes, with anything in it


def allocate_in_memory(size: int) -> quantization.Bytes:
    return np.empty(size, dtype=np.uint8)


def estimate_bytes(layout: TensorLayout) -> int:
    """Bytes of every estimate."""
    return payload_bytes(layout, ESTIMATE_BITS)


def update_estimate(
    estimate: QuantizedUpdate | None, payload: QuantizedUpdate, room: Allocate = allocate_in_memory
) -> QuantizedUpdate:
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
    return QuantizedUpdate(ESTIMATE_BITS, payload.origin, layout, exponent, codes, packed, encoded)
