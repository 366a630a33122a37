"""From a vector to the bytes that are sent, and back."""

from __future__ import annotations

import numpy as np

from protocol.errors import LocalProtocolError
from training.replicated.codec import dense, scales, sparse
from training.replicated.codec.header import HEADER_BYTES, Header, Mode, malformed, unpack
from training.replicated.codec.update import Update
from training.replicated.layout import Float32Array, Layout


def payload_bytes_max(layout: Layout, mode: Mode) -> int:
    """No payload is longer; a dense one is exactly this long."""
    body = sparse.size_max(layout, mode) if mode.sparse else dense.size(layout, mode.bits)
    return HEADER_BYTES + len(layout.chunk_lengths) + body


def quantize(header: Header, m: Float32Array, layout: Layout) -> Update:
    """The update that says `m`; the same levels on every machine. `LocalProtocolError` if m has no encoding."""
    if m.shape != (layout.size,) or m.dtype != np.float32:
        raise LocalProtocolError(f"a buffer of {m.shape} {m.dtype} does not fit a layout of {layout.size} elements")
    coded = sparse.coded(m, layout, header.mode) if header.mode.sparse else dense.coded(m, layout, header.mode)
    return Update(header.mode, header.origin, layout, *coded)


def encode(header: Header, m: Float32Array, layout: Layout) -> bytes:
    """The canonical payload of `m`. Raises as `quantize`."""
    return quantize(header, m, layout).encode()


def decode(payload: bytes, expected: Header, layout: Layout) -> Update:
    """The update in `payload`; `RemoteProtocolError("malformed", …)` unless it is canonical and has the expected header."""
    if unpack(payload)[:2] != (expected.mode, expected.origin):
        raise malformed("the header names another mode, job, round, trainer, root or batch")
    return read(payload, layout)


def read(payload: bytes | memoryview, layout: Layout) -> Update:
    """As `decode`, whatever the payload is said of, in whatever mode."""
    mode, origin, exponent = unpack(payload)
    chunks = len(layout.chunk_lengths)
    if not HEADER_BYTES + chunks <= len(payload) <= payload_bytes_max(layout, mode):
        raise malformed(f"{len(payload)} bytes where at most {payload_bytes_max(layout, mode)} are right")
    codes, packed = np.split(np.frombuffer(payload, np.uint8, offset=HEADER_BYTES), [chunks])
    scales.require_normalised(codes, exponent)
    update = Update(mode, origin, layout, exponent, codes, packed)
    update.body.require_canonical()
    return update
