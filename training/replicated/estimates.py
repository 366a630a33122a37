"""Estimates in the place of messages (EF21: Richtárik 2021, arXiv:2106.05203; with liars: Rammal 2024, arXiv:2310.09804).

Every voter holds an estimate g of each trainer's momentum v. A payload is the difference v − g, compressed. Every voter adds it
to g, and the rule aggregates the estimates:

    said = v − g        payload = codec(said)        g' = code8(g + decoded payload)

An estimate is stored as an update in the codec's dense form of eight bits: the rule takes it as it takes any update. One float32
addition and the codec's exact encoder make g', so all voters have the same bytes. Rounding errors do not add up: the trainer
holds g', too, and its next payload contains the error.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from protocol.errors import LocalProtocolError
from training.replicated.codec import Mode, Update, dense, payload_bytes_max, scales
from training.replicated.feedback import Record, buffer_digest, unsaid
from training.replicated.layout import CHUNK, Float32Array, Layout
from training.spec import Compression

MODE: Final = Mode(Compression.DENSE, 8, CHUNK)


def size(layout: Layout) -> int:
    """Bytes of every estimate."""
    return payload_bytes_max(layout, MODE)


def momentum_after(record: Record, v: Float32Array) -> Float32Array:
    """The momentum that a trainer continues from: `v`, which its record commits to, halved for each NORM rejection since."""
    if buffer_digest(v) != record.buffer:
        raise LocalProtocolError("the buffer is not that of the record")
    with np.errstate(over="ignore", invalid="ignore"):
        return v * np.float32(math.ldexp(1.0, -record.halvings))


def said(target: Float32Array, estimate: Update | None) -> Float32Array:
    """The vector that a payload encodes: `target` − estimate. A new trainer's estimate is None, which counts as zero."""
    return unsaid(target, None if estimate is None else estimate.dense())


def moved(estimate: Update | None, payload: Update) -> Update:
    """The estimate after a payload, with the payload's origin. `LocalProtocolError` if the sum is too large for any encoding."""
    total = payload.dense()
    if estimate is not None:
        values = scales.values(estimate.codes, estimate.exponent)
        for block in payload.layout.blocks:
            total[block.elements] += estimate.signed(block, values)
    return Update(MODE, payload.origin, payload.layout, *dense.coded(total, payload.layout, MODE))
