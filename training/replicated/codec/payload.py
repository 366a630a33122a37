"""From a vector to the bytes that are sent, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from protocol.errors import LocalProtocolError
from training.replicated.codec import quantization
from training.replicated.codec.quantized_update import (
    HEADER_BYTES,
    PayloadHeader,
    QuantizedUpdate,
    chunk_level_bytes,
    malformed_payload,
    unpack_header,
)
from training.replicated.tensor_layout import CHUNK, Float32Array, TensorBlock, TensorLayout

Values = Callable[[TensorBlock], Float32Array]


def payload_bytes(layout: TensorLayout, bits: int) -> int:
    """Bytes of every payload with levels of so many bits."""
    return HEADER_BYTES + len(layout.chunk_lengths) + int(np.sum(chunk_level_bytes(layout, bits)))


def encode_payload(header: PayloadHeader, m: Float32Array, layout: TensorLayout) -> bytes:
    """The canonical payload of `m`. Raises as `quantize_vector`."""
    return quantize_vector(header, m, layout).encode()


def decode_payload(payload: bytes, expected: PayloadHeader, layout: TensorLayout) -> QuantizedUpdate:
    """The update in `payload`; `RemoteProtocolError("malformed", …)` unless it is canonical and has the expected header."""
    if unpack_header(payload)[:2] != (expected.bits, expected.origin):
        raise malformed_payload("the header names other bits, or another job, round, trainer, root or batch")
    return read_payload(payload, layout)


def read_payload(payload: bytes | memoryview, layout: TensorLayout) -> QuantizedUpdate:
    """As `decode_payload`, whatever the payload is said of, in levels of any bits."""
    bits, origin, exponent = unpack_header(payload)
    if len(payload) != payload_bytes(layout, bits):
        raise malformed_payload(f"{len(payload)} bytes where {payload_bytes(layout, bits)} are right")
    codes, packed = np.split(np.frombuffer(payload, np.uint8, offset=HEADER_BYTES), [len(layout.chunk_lengths)])
    update = QuantizedUpdate(bits, origin, layout, exponent, codes, packed)
    update.require_canonical()
    return update


def quantize_vector(header: PayloadHeader, m: Float32Array, layout: TensorLayout) -> QuantizedUpdate:
    """The update that says `m`; the same levels on every machine. `LocalProtocolError` if m has no encoding."""
    if m.shape != (layout.size,) or m.dtype != np.float32:
        raise LocalProtocolError(f"a buffer of {m.shape} {m.dtype} does not fit a layout of {layout.size} elements")
    packed = np.empty(int(np.sum(chunk_level_bytes(layout, header.bits))), dtype=np.uint8)
    exponent, codes = quantize_into(packed, lambda block: m[block.elements], layout, header.bits)
    return QuantizedUpdate(header.bits, header.origin, layout, exponent, codes, packed)


def quantize_into(packed: quantization.Bytes, values: Values, layout: TensorLayout, bits: int) -> tuple[int, quantization.Codes]:
    """Exponent and scale codes of a vector of which `values` gives each block three times; its levels are written into
    `packed`.
    """
    unit = quantization.grid_exponent(np.array([(part.max(), part.min()) for part in map(values, layout.blocks)]))
    sums, largest = _magnitudes(values, layout, unit)
    codes, exponent = quantization.scales_of_chunks(sums, layout.chunk_lengths, largest, unit, bits)
    _pack(packed, values, layout, bits, quantization.scale_values(codes, exponent))
    return exponent, codes


def _rows(values: Values, layout: TensorLayout) -> Iterator[tuple[slice, Float32Array]]:
    """Chunks of equal length of one block, and the block's values as a matrix with a row for each of them."""
    for block in layout.blocks:
        part, full = values(block), block.size // CHUNK
        middle = block.chunks.start + full
        if full:
            yield slice(block.chunks.start, middle), part[: full * CHUNK].reshape(full, CHUNK)
        if middle < block.chunks.stop:
            yield slice(middle, block.chunks.stop), part[None, full * CHUNK :]


def _magnitudes(values: Values, layout: TensorLayout, unit: int) -> tuple[quantization.Integers, quantization.Integers]:
    """The sum and the largest of |value| / 2^unit, rounded to integers, of every chunk."""
    sums, largest = (np.empty(len(layout.chunk_lengths), dtype=np.int64) for _ in range(2))
    for chunks, rows in _rows(values, layout):
        grid = quantization.round_to_grid(rows, unit)
        sums[chunks] = grid.sum(axis=1, dtype=np.float64)
        largest[chunks] = grid.max(axis=1)
    return sums, largest


def _pack(packed: quantization.Bytes, values: Values, layout: TensorLayout, bits: int, chunk_scales: Float32Array) -> None:
    """Writes the levels of the values by the scales of chunks."""
    units, end = quantization.level_units(chunk_scales, bits), 0
    for chunks, rows in _rows(values, layout):
        part = quantization.pack_levels(quantization.quantize_levels(rows, units[chunks, None], bits), bits)
        part[chunk_scales[chunks] == 0] = 0
        start, end = end, end + part.size
        packed[start:end] = part.ravel()
    assert end == len(packed)
