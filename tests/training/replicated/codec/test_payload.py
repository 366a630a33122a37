"""Encoding and decoding of payloads, against a second implementation made from docs/protocol/codec.md."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import LocalProtocolError, RemoteProtocolError
from tests.training.replicated.codec import reference
from tests.training.replicated.codec.samples import LAYOUTS, TOY, changed, fields_of, toy_buffers
from tests.training.replicated.support import RAGGED, buffer, header
from training.job_spec import BITS
from training.replicated import codec
from training.replicated.codec import payload_bytes, quantization
from training.replicated.tensor_layout import CHUNK, ElementRun, Float32Array, TensorLayout, layout_from_shapes

HEADER_BYTES = 34
SCATTERED = layout_from_shapes([(f"tensor {number}", (3 + 700 * number,)) for number in range(30)])  # blocks of every size
widths = st.sampled_from(BITS)
each_width = pytest.mark.parametrize("bits", BITS)


def read_both(payload: bytes, layout: TensorLayout) -> codec.QuantizedUpdate | None:
    """Return the update if both implementations read it alike, or None if both refuse."""
    try:
        said = reference.read(payload, layout.chunk_lengths.tolist())
    except reference.Malformed:
        said = None
    try:
        update = codec.read_payload(payload, layout)
    except RemoteProtocolError as error:
        assert error.reason == "malformed" and said is None
        return None
    assert said is not None
    assert said.values() == [Fraction(float(x)) for x in update.dequantize()]
    return update


def refused(payload: bytes, bits: int, layout: TensorLayout = RAGGED) -> bool:
    with pytest.raises(RemoteProtocolError) as caught:
        codec.decode_payload(payload, header(0, bits), layout)
    return caught.value.reason == "malformed" and read_both(payload, layout) is None


@settings(max_examples=100)
@given(toy_buffers, widths)
def test_a_payload_is_the_one_that_the_page_prescribes(m: Float32Array, bits: int) -> None:
    said = reference.said_of(fields_of(header(0, bits)), m.tolist(), TOY.chunk_lengths.tolist())
    assert codec.encode_payload(header(0, bits), m, TOY) == reference.write(said)


@each_width
def test_a_payload_of_whole_and_ragged_chunks_is_the_one_that_the_page_prescribes(bits: int) -> None:
    m = buffer(RAGGED, "reference", bits)
    said = reference.said_of(fields_of(header(0, bits)), m.tolist(), RAGGED.chunk_lengths.tolist())
    assert codec.encode_payload(header(0, bits), m, RAGGED) == reference.write(said)


@each_width
def test_neighbouring_chunks_of_equal_length_are_each_padded(bits: int) -> None:
    layout = layout_from_shapes([(name, (5,)) for name in "abc"])
    m = buffer(layout, "neighbours", bits)
    said = reference.said_of(fields_of(header(0, bits)), m.tolist(), layout.chunk_lengths.tolist())
    assert codec.encode_payload(header(0, bits), m, layout) == reference.write(said)


@each_width
@pytest.mark.parametrize("power", [-149, -126, -100, -80, *range(-72, -60)])
def test_the_least_buffers_are_what_the_page_prescribes_or_zero(bits: int, power: int) -> None:
    m = np.ldexp(np.arange(-10, 11, dtype=np.float32), power)
    said = reference.said_of(fields_of(header(0, bits)), m.tolist(), TOY.chunk_lengths.tolist())
    assert codec.encode_payload(header(0, bits), m, TOY) == reference.write(said)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("power", [-84, -30, 27])
def test_levels_next_to_an_edge_are_those_of_exact_quotients(bits: int, power: int) -> None:
    scales = np.ldexp(np.arange(16, 32, dtype=np.float32), power)[:, None]
    edges = np.arange(1, 8) * np.float32(2) if bits < 8 else np.arange(127, dtype=np.float32) + np.float32(0.5)
    at = scales * edges
    m = np.concatenate([at, np.nextafter(at, np.float32(0)), np.nextafter(at, np.float32(np.inf))], axis=1)
    codes = quantization.quantize_levels(-m, quantization.level_units(scales, bits), bits)
    said = quantization.unpack_levels(quantization.pack_levels(codes, bits), bits)[:, : m.shape[1]]
    for scale, row, found in zip(scales[:, 0].tolist(), m.tolist(), said.tolist(), strict=True):
        ratios = [Fraction(element) / Fraction(scale) for element in row]
        exact = [round(ratio) if bits == 8 else 2 * math.floor(ratio / 2) + 1 for ratio in ratios]
        assert found == [-min(level, quantization.TOP[bits]) for level in exact]


@given(toy_buffers, widths)
def test_an_update_encodes_to_the_payload_it_was_decoded_from(m: Float32Array, bits: int) -> None:
    payload = codec.encode_payload(header(0, bits), m, TOY)
    update = read_both(payload, TOY)
    assert update is not None and update.encode() == payload and (update.bits, update.origin) == (bits, header(0, bits).origin)


@given(toy_buffers, widths)
def test_the_norm_is_exact(m: Float32Array, bits: int) -> None:
    update = codec.read_payload(codec.encode_payload(header(0, bits), m, TOY), TOY)
    assert update.norm_squared() == float(sum(Fraction(float(x)) ** 2 for x in update.dequantize()))


@each_width
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_there_is_a_level_for_every_element_in_order(bits: int, layout: TensorLayout) -> None:
    update = codec.read_payload(codec.encode_payload(header(0, bits), buffer(layout, "levels"), layout), layout)
    dense, scales = update.dequantize().astype(np.float64), update.scales * 2.0**update.exponent
    for block in layout.blocks:
        levels = update.levels_of(block)
        assert levels.dtype == (np.int16 if bits == 16 else np.int8)
        assert np.abs(levels.astype(int)).max() <= quantization.TOP[bits]
        assert np.array_equal(levels * np.repeat(scales[block.chunks], layout.chunk_lengths[block.chunks]), dense[block.elements])


@each_width
def test_blocks_are_read_alike_in_any_order_alone_and_together(bits: int) -> None:
    payload = codec.encode_payload(header(0, bits), buffer(SCATTERED, "runs"), SCATTERED)
    update, expected = codec.read_payload(payload, SCATTERED), codec.read_payload(payload, SCATTERED).dequantize()
    scales = (update.scales * 2.0**update.exponent).astype(np.float32)
    for number in np.argsort(buffer(layout_from_shapes([("order", (len(SCATTERED.blocks),))]), "order")):
        run = ElementRun.of_blocks(SCATTERED.blocks[number : number + 3])
        assert np.array_equal(update.scaled_elements(run, scales), expected[run.elements])


@each_width
def test_a_block_with_other_scales_keeps_its_levels(bits: int) -> None:
    update = codec.read_payload(codec.encode_payload(header(0, bits), buffer(RAGGED, "signed"), RAGGED), RAGGED)
    dense = update.dequantize()
    for kind in (np.int32 if bits <= 8 else np.int64, np.int64, np.float32):
        rows = [update.scaled_elements(block, (3 * update.scales).astype(kind)) for block in RAGGED.blocks]
        assert all(row.dtype == kind for row in rows)
        assert np.array_equal(np.concatenate(rows), (3 * dense / np.float32(2.0**update.exponent)).astype(kind))


@each_width
def test_scales_and_levels_keep_to_the_bounds_that_others_rely_on(bits: int) -> None:
    update = codec.read_payload(codec.encode_payload(header(0, bits), buffer(RAGGED, "bounds"), RAGGED), RAGGED)
    assert update.scales.dtype == np.int64 and int(update.scales.max()).bit_length() == codec.SCALE_BITS
    assert codec.EXPONENT_MIN <= update.exponent <= codec.EXPONENT_MAX


# One form ------------------------------------------------------------------------------------------------------------


def mutated(payload: bytes, data: st.DataObject) -> bytes:
    """Return the payload with a few changed bytes or bits in sensitive places, or with another length."""
    result = bytearray(payload)
    body = HEADER_BYTES - 1
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.one_of(st.integers(0, 3), st.integers(body, len(payload) - 1), st.integers(-3, -1))) % len(result)
        result[at] = data.draw(
            st.one_of(st.integers(0, 255), st.sampled_from([0, 128, 240, 255, result[at] ^ 1, result[at] ^ 128]))
        )
    if data.draw(st.booleans()) and len(result) > 1:
        at = data.draw(st.integers(body, len(payload) - 1))
        result[at] ^= 1 << data.draw(st.integers(0, 7))
    del result[len(result) - data.draw(st.sampled_from([0, 0, 0, 0, 1, 2, 30])) :]
    return bytes(result) + data.draw(st.sampled_from([b"", b"", b"", b"", b"\0", b"\1", b"\x80"]))


@settings(max_examples=150)
@given(toy_buffers, widths, st.data())
def test_mutated_bytes_are_refused_or_canonical(m: Float32Array, bits: int, data: st.DataObject) -> None:
    payload = mutated(codec.encode_payload(header(0, bits), m, TOY), data)
    update = read_both(payload, TOY)
    assert update is None or update.encode() == payload


@settings(max_examples=150)
@given(widths, st.data())
def test_two_payloads_never_say_the_same(bits: int, data: st.DataObject) -> None:
    """Accepted payloads are unique: levels with a common divisor or another scale are refused."""
    codes = data.draw(st.lists(st.sampled_from([0, 1, 16, 224, 239, 240, 241, 255]), min_size=4, max_size=4))
    levels = st.sampled_from([level for level in range(-128, 128) if bits == 8 or level % 2])
    lengths = TOY.chunk_lengths.tolist()
    said = reference.Said(
        lengths,
        fields_of(header(0, bits)),
        data.draw(st.sampled_from([-84, -83, 0, 12])),
        codes,
        [[data.draw(levels) for _ in range(length)] if code else [] for length, code in zip(lengths, codes, strict=True)],
    )
    try:
        payload = reference.write(said)
    except ValueError:  # so few bits cannot encode this level
        return
    update = read_both(payload, TOY)
    if update is not None:
        assert seen.setdefault((bits, update.dequantize().tobytes()), payload) == payload


seen: dict[tuple[int, bytes], bytes] = {}


@given(st.binary(max_size=2 * HEADER_BYTES))
def test_garbage_is_refused(garbage: bytes) -> None:
    assert all(refused(garbage, 1, layout) for layout in LAYOUTS.values())


@each_width
def test_trailing_and_missing_bytes_are_refused(bits: int) -> None:
    payload = codec.encode_payload(header(0, bits), buffer(RAGGED, "trailing"), RAGGED)
    for other in (payload + b"\0", payload + b"\1", payload + bytes(4096), payload[:-1], payload[:HEADER_BYTES], b""):
        assert refused(other, bits)


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_padding_of_a_chunk_is_refused(bits: int) -> None:
    payload = codec.encode_payload(header(0, bits), buffer(TOY, "padding"), TOY)
    last = HEADER_BYTES + len(TOY.chunk_lengths) + -(-3 * bits // 8) - 1  # of the first chunk, which has three elements
    with pytest.raises(RemoteProtocolError, match="padding"):
        codec.read_payload(changed(payload, last, bytes([payload[last] | 1])), TOY)


@each_width
def test_an_update_of_zeros_has_one_form(bits: int) -> None:
    zero = codec.encode_payload(header(0, bits), np.zeros(RAGGED.size, dtype=np.float32), RAGGED)
    assert not codec.decode_payload(zero, header(0, bits), RAGGED).dequantize().any()
    for nothing in (-0.0, -1e-40, 1e-30):
        assert codec.encode_payload(header(0, bits), np.full(RAGGED.size, nothing, dtype=np.float32), RAGGED) == zero
    assert refused(changed(zero, HEADER_BYTES - 1, b"\0"), bits)


@pytest.mark.parametrize(
    ("at", "value"),
    [(0, 0), (0, 3), (0, 32), (HEADER_BYTES - 1, 13), (HEADER_BYTES - 1, 256 - 85)],
)
@each_width
def test_other_bits_or_an_exponent_out_of_range_is_refused(bits: int, at: int, value: int) -> None:
    assert refused(changed(codec.encode_payload(header(0, bits), buffer(TOY, "range"), TOY), at, bytes([value])), bits, TOY)


@pytest.mark.parametrize(
    ("field", "value"),
    [("job", b"x" * 32), ("round", 4), ("trainer", b"x" * 32), ("base", b"x" * 32), ("local_steps", 16), ("batch", 7)],
)
def test_another_header_is_refused(field: str, value: object) -> None:
    payload = codec.encode_payload(header(), buffer(TOY, "header"), TOY)
    with pytest.raises(RemoteProtocolError, match="header"):
        codec.decode_payload(payload, dataclasses.replace(header(), **{field: value}), TOY)  # type: ignore[arg-type]


def test_a_payload_of_other_bits_is_refused() -> None:
    for bits in BITS[1:]:
        payload = codec.encode_payload(header(0, bits), buffer(TOY, "bits"), TOY)
        with pytest.raises(RemoteProtocolError, match="other bits"):
            codec.decode_payload(payload, header(0, 1), TOY)


@each_width
def test_a_chunk_of_scale_zero_has_no_levels(bits: int) -> None:
    said = forged(bits)
    said.codes[1] = 0
    with pytest.raises(RemoteProtocolError, match="scale zero"):
        codec.read_payload(reference.write(said), RAGGED)
    said.levels[1] = []
    assert not codec.read_payload(reference.write(said), RAGGED).dequantize()[CHUNK : 2 * CHUNK].any()


@pytest.mark.parametrize("bits", BITS[1:])
def test_a_chunk_that_leaves_its_scale_unused_is_refused(bits: int) -> None:
    said = forged(bits)
    said.levels[1] = [1] * len(said.levels[1])
    with pytest.raises(RemoteProtocolError, match="range"):
        codec.read_payload(reference.write(said), RAGGED)


def forged(bits: int) -> reference.Said:
    payload = codec.encode_payload(header(0, bits), buffer(RAGGED, "forged"), RAGGED)
    return reference.read(payload, RAGGED.chunk_lengths.tolist())


# Encoding ------------------------------------------------------------------------------------------------------------


@each_width
def test_levels_are_within_half_a_step_of_what_they_stand_for(bits: int) -> None:
    """Values beyond the scale's range are an exception: they are clipped."""
    m = buffer(RAGGED, "steps")
    update = codec.read_payload(codec.encode_payload(header(0, bits), m, RAGGED), RAGGED)
    dense, top = update.dequantize(), quantization.TOP[bits]
    steps = np.repeat(update.scales * 2.0**update.exponent, RAGGED.chunk_lengths)
    said = dense != 0
    inside = said & (np.abs(m) < top * steps) & (bits > 1)
    half = 0.5 if bits >= 8 else 1.0  # a step lies between neighbouring levels, which are two scales apart below 8 bits
    assert np.all(np.abs(dense - m)[inside] <= half * steps[inside] * (1 + 1e-6))
    assert np.all(np.abs(dense)[said & ~inside] <= np.maximum(np.abs(m), top * steps)[said & ~inside] * (1 + 1e-6))
    assert np.array_equal(np.signbit(dense)[said], np.signbit(m)[said])


@given(toy_buffers, widths)
def test_what_a_payload_does_not_say_is_left_over_exactly(m: Float32Array, bits: int) -> None:
    """Error feedback: e = m − decoded in float32 loses only the rounding of that subtraction."""
    dense = codec.read_payload(codec.encode_payload(header(0, bits), m, TOY), TOY).dequantize()
    exact = [Fraction(float(a)) - Fraction(float(b)) for a, b in zip(m, dense, strict=True)]
    assert [np.float32(float(x)) for x in exact] == list(m - dense)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 3e38])
@each_width
def test_a_buffer_without_an_encoding_is_our_own_mistake(bits: int, poison: float) -> None:
    m = np.full(RAGGED.size, poison, dtype=np.float32)
    with pytest.raises(LocalProtocolError):
        codec.encode_payload(header(0, bits), m, RAGGED)


def test_a_buffer_of_another_shape_or_type_is_our_own_mistake() -> None:
    for m in (np.zeros(5, dtype=np.float32), np.zeros(RAGGED.size)):
        with pytest.raises(LocalProtocolError, match="does not fit"):
            codec.encode_payload(header(), m, RAGGED)  # type: ignore[arg-type]


# Golden hashes -------------------------------------------------------------------------------------------------------

GOLDEN = {
    1: "d08dfddc9f2203d80df86fde1e3cdee6cff7cb239a73ec3ce5dd3fcbb98df539",
    2: "b0babe78fb55d2d450352e5d2d3ed347928c094a87dd690e51eb704aceabe43b",
    4: "9eba02cb78ef4a96680c30bb78b3a70fd6ab3c07768a51379dbc6f09dc4a954e",
    8: "9ac34bc64271939a83199c9192af6eea0aa183eabd7dc0a5c810b95d6e1c9e8b",
    16: "d8d655959ba2f247b0579fa41755560b26d3ac53794d62837e0c3cf972e8e6ae",
}


@each_width
def test_payloads_have_their_golden_hashes(bits: int) -> None:
    """The buffers are made from integers, so that a change of any bit on any machine is noticed."""
    digest = hashlib.sha256()
    for number, deviation in enumerate((1e-2, 3e4, 1e-20)):
        m = buffer(RAGGED, "payload", number, deviation=deviation)
        payload = codec.encode_payload(header(0, bits), m, RAGGED)
        assert len(payload) == payload_bytes(RAGGED, bits)
        digest.update(payload + codec.read_payload(payload, RAGGED).dequantize().astype("<f4").tobytes())
    assert digest.hexdigest() == GOLDEN[bits]
