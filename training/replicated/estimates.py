"""Estimates in the place of messages (EF21: Richtárik 2021, arXiv:2106.05203; with liars: Rammal 2024, arXiv:2310.09804).

Every voter holds, for each trainer, an estimate g of the vector v that the trainer wants the others to know. A payload says
v − g, compressed; every voter adds what it says to g, and the rule aggregates the estimates:

    said = v − g        payload = codec(said)        g' = code8(g + decoded payload)

An estimate is itself an update in the codec's dense form of eight bits, so that the rule works with it as with any other. One
float32 addition and the codec's exact encoder make g': the same bytes everywhere. What eight bits cannot hold is not lost: the
trainer sees g' too, and its next payload says what is missing.
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
    """The v that a trainer continues from, given that of its record; halved once for each time its norm was refused since."""
    if buffer_digest(v) != record.buffer:
        raise LocalProtocolError("the buffer is not that of the record")
    with np.errstate(over="ignore", invalid="ignore"):
        return v * np.float32(math.ldexp(1.0, -record.halvings))


def said(target: Float32Array, estimate: Update | None) -> Float32Array:
    """What a payload is to say of `target`. None is the estimate of a trainer that is new."""
    return unsaid(target, None if estimate is None else estimate.dense())


def moved(estimate: Update | None, payload: Update) -> Update:
    """The estimate after a payload, of which it takes the origin. `LocalProtocolError` if no estimate is as large as the sum."""
    total = payload.dense()
    if estimate is not None:
        values = scales.values(estimate.codes, estimate.exponent)
        for block in payload.layout.blocks:
            total[block.elements] += estimate.signed(block, values)
    return Update(MODE, payload.origin, payload.layout, *dense.coded(total, payload.layout, MODE))
