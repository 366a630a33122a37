"""From a vector to the bytes that are sent, and back."""

from __future__ import annotations

import numpy as np

from protocol.errors import LocalProtocolError
from training.replicated.codec import dense_body, quantization_scales, sparse_body
from training.replicated.codec.payload_header import HEADER_BYTES, PayloadHeader, PayloadMode, malformed_payload, unpack_header
from training.replicated.codec.quantized_update import QuantizedUpdate
from training.replicated.tensor_layout import Float32Array, TensorLayout


def payload_bytes_max(layout: TensorLayout, mode: PayloadMode) -> int:
    """No payload is longer; a dense one is exactly this long."""
    body = sparse_body.sparse_body_bytes_max(layout, mode) if mode.sparse else dense_body.dense_body_bytes(layout, mode.bits)
    return HEADER_BYTES + len(layout.chunk_lengths) + body


def quantize_vector(header: PayloadHeader, m: Float32Array, layout: TensorLayout) -> QuantizedUpdate:
    """The update that says `m`; the same levels on every machine. `LocalProtocolError` if m has no encoding."""
    if m.shape != (layout.size,) or m.dtype != np.float32:
        raise LocalProtocolError(f"a buffer of {m.shape} {m.dtype} does not fit a layout of {layout.size} elements")
    coded = (
        sparse_body.encode_sparse(m, layout, header.mode)
        if header.mode.sparse
        else dense_body.encode_dense(m, layout, header.mode)
    )
    return QuantizedUpdate(header.mode, header.origin, layout, *coded)


def encode_payload(header: PayloadHeader, m: Float32Array, layout: TensorLayout) -> bytes:
    """The canonical payload of `m`. Raises as `quantize_vector`."""
    return quantize_vector(header, m, layout).encode()


def decode_payload(payload: bytes, expected: PayloadHeader, layout: TensorLayout) -> QuantizedUpdate:
    """The update in `payload`; `RemoteProtocolError("malformed", …)` unless it is canonical and has the expected header."""
    if unpack_header(payload)[:2] != (expected.mode, expected.origin):
        raise malformed_payload("the header names another mode, job, round, trainer, root or batch")
    return read_payload(payload, layout)


def read_payload(payload: bytes | memoryview, layout: TensorLayout) -> QuantizedUpdate:
    """As `decode_payload`, whatever the payload is said of, in whatever mode."""
    mode, origin, exponent = unpack_header(payload)
    chunks = len(layout.chunk_lengths)
    if not HEADER_BYTES + chunks <= len(payload) <= payload_bytes_max(layout, mode):
        raise malformed_payload(f"{len(payload)} bytes where at most {payload_bytes_max(layout, mode)} are right")
    codes, packed = np.split(np.frombuffer(payload, np.uint8, offset=HEADER_BYTES), [chunks])
    quantization_scales.require_normalised(codes, exponent)
    update = QuantizedUpdate(mode, origin, layout, exponent, codes, packed)
    update.body.require_canonical()
    return update
