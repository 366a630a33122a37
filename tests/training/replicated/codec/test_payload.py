"""Buffers to payloads and back, against a second implementation made from docs/protocol/codec.md."""

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
from tests.training.replicated.codec.samples import LAYOUTS, MODES, TOY, changed, chunks_of, fields_of, name_of, toy_buffers
from tests.training.replicated.support import RAGGED, buffer, header
from training.replicated import codec
from training.replicated.codec import PayloadMode, payload_bytes_max, quantization_levels
from training.replicated.tensor_layout import Float32Array, TensorLayout, layout_from_shapes

HEADER_BYTES = 37
modes = st.sampled_from(MODES)
each_mode = pytest.mark.parametrize("mode", MODES, ids=name_of)


def read_both(payload: bytes, layout: TensorLayout) -> codec.QuantizedUpdate | None:
    """The update, if both implementations read it alike; None if both refuse."""
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
    assert said.values() == [Fraction(float(x)) for x in update.to_dense()]
    return update


def refused(payload: bytes, mode: PayloadMode, layout: TensorLayout = RAGGED) -> bool:
    with pytest.raises(RemoteProtocolError) as caught:
        codec.decode_payload(payload, header(0, mode), layout)
    return caught.value.reason == "malformed" and read_both(payload, layout) is None


@settings(max_examples=100)
@given(toy_buffers, modes)
def test_a_payload_is_the_one_that_the_page_prescribes(m: Float32Array, mode: PayloadMode) -> None:
    said = reference.said_of(fields_of(header(0, mode)), m.tolist(), TOY.chunk_lengths.tolist())
    assert codec.encode_payload(header(0, mode), m, TOY) == reference.write(said)


@each_mode
def test_a_payload_of_whole_and_ragged_chunks_is_the_one_that_the_page_prescribes(mode: PayloadMode) -> None:
    m = buffer(RAGGED, "reference", mode.bits)
    said = reference.said_of(fields_of(header(0, mode)), m.tolist(), RAGGED.chunk_lengths.tolist())
    assert codec.encode_payload(header(0, mode), m, RAGGED) == reference.write(said)


@each_mode
def test_neighbouring_chunks_of_equal_length_are_each_padded(mode: PayloadMode) -> None:
    layout = layout_from_shapes([(name, (5,)) for name in "abc"])
    m = buffer(layout, "neighbours", mode.bits)
    said = reference.said_of(fields_of(header(0, mode)), m.tolist(), layout.chunk_lengths.tolist())
    assert codec.encode_payload(header(0, mode), m, layout) == reference.write(said)


@each_mode
@pytest.mark.parametrize("power", [-149, -126, -100, -80, *range(-72, -60)])
def test_the_least_buffers_are_what_the_page_prescribes_or_zero(mode: PayloadMode, power: int) -> None:
    m = np.ldexp(np.arange(-10, 11, dtype=np.float32), power)
    said = reference.said_of(fields_of(header(0, mode)), m.tolist(), TOY.chunk_lengths.tolist())
    assert codec.encode_payload(header(0, mode), m, TOY) == reference.write(said)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("power", [-84, -30, 27])
def test_levels_next_to_an_edge_are_those_of_exact_quotients(bits: int, power: int) -> None:
    scales = np.ldexp(np.arange(16, 32, dtype=np.float32), power)[:, None]
    edges = np.arange(1, 8) * np.float32(2) if bits < 8 else np.arange(127, dtype=np.float32) + np.float32(0.5)
    at = scales * edges
    m = np.concatenate([at, np.nextafter(at, np.float32(0)), np.nextafter(at, np.float32(np.inf))], axis=1)
    codes = quantization_levels.quantize_levels(-m, quantization_levels.level_units(scales, bits), bits)
    said = quantization_levels.unpack_levels(quantization_levels.pack_levels(codes, bits), bits)[:, : m.shape[1]]
    for scale, row, found in zip(scales[:, 0].tolist(), m.tolist(), said.tolist(), strict=True):
        ratios = [Fraction(element) / Fraction(scale) for element in row]
        exact = [round(ratio) if bits == 8 else 2 * math.floor(ratio / 2) + 1 for ratio in ratios]
        assert found == [-min(level, quantization_levels.TOP[bits]) for level in exact]


@given(toy_buffers, modes)
def test_an_update_encodes_to_the_payload_it_was_decoded_from(m: Float32Array, mode: PayloadMode) -> None:
    payload = codec.encode_payload(header(0, mode), m, TOY)
    update = read_both(payload, TOY)
    assert update is not None and update.encode() == payload and (update.mode, update.origin) == (mode, header(0, mode).origin)


@given(toy_buffers, modes)
def test_the_norm_is_exact(m: Float32Array, mode: PayloadMode) -> None:
    update = codec.read_payload(codec.encode_payload(header(0, mode), m, TOY), TOY)
    assert update.norm_squared() == float(sum(Fraction(float(x)) ** 2 for x in update.to_dense()))


@each_mode
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_entries_say_every_element_once_and_in_order(mode: PayloadMode, layout: TensorLayout) -> None:
    update = codec.read_payload(codec.encode_payload(header(0, mode), buffer(layout, "entries"), layout), layout)
    dense, scales = update.to_dense().astype(np.float64), update.scales * 2.0**update.exponent
    for block in layout.blocks:
        entries, said = update.entries(block), np.zeros(block.size)
        assert entries.levels.dtype == np.int8 and np.abs(entries.levels.astype(int)).max() <= codec.LEVEL_MAX
        assert (entries.positions is None) is not mode.sparse
        if entries.positions is not None:
            assert entries.positions.dtype == np.int32 and np.all(np.diff(entries.positions) > 0)
        where = slice(None) if entries.positions is None else entries.positions
        said[where] = entries.levels * np.repeat(scales[block.chunks], entries.counts)
        assert np.array_equal(said, dense[block.elements])


@each_mode
def test_a_block_with_other_scales_keeps_its_levels(mode: PayloadMode) -> None:
    update = codec.read_payload(codec.encode_payload(header(0, mode), buffer(RAGGED, "signed"), RAGGED), RAGGED)
    dense = update.to_dense()
    for kind in (np.int32, np.int64, np.float32):
        rows = [update.scaled_elements(block, (3 * update.scales).astype(kind)) for block in RAGGED.blocks]
        assert all(row.dtype == kind for row in rows)
        assert np.array_equal(np.concatenate(rows), (3 * dense / np.float32(2.0**update.exponent)).astype(kind))


@each_mode
def test_scales_and_levels_keep_to_the_bounds_that_others_rely_on(mode: PayloadMode) -> None:
    update = codec.read_payload(codec.encode_payload(header(0, mode), buffer(RAGGED, "bounds"), RAGGED), RAGGED)
    assert update.scales.dtype == np.int64 and int(update.scales.max()).bit_length() == codec.SCALE_BITS
    assert codec.EXPONENT_MIN <= update.exponent <= codec.EXPONENT_MAX


# One form ------------------------------------------------------------------------------------------------------------


def mutated(payload: bytes, data: st.DataObject) -> bytes:
    """A few bytes or bits changed, where that is most telling; or another length."""
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
@given(toy_buffers, modes, st.data())
def test_mutated_bytes_are_refused_or_canonical(m: Float32Array, mode: PayloadMode, data: st.DataObject) -> None:
    payload = mutated(codec.encode_payload(header(0, mode), m, TOY), data)
    update = read_both(payload, TOY)
    assert update is None or update.encode() == payload


@settings(max_examples=150)
@given(modes, st.data())
def test_two_payloads_never_say_the_same(mode: PayloadMode, data: st.DataObject) -> None:
    """Whatever is accepted: levels with a common divisor, supports with zeros or another scale are refused."""
    compression, bits, keep, *rest = fields_of(header(0, mode))
    codes = data.draw(st.lists(st.sampled_from([0, 1, 16, 224, 239, 240, 241, 255]), min_size=4, max_size=4))
    counts = [reference.kept(int(length), keep) for length in TOY.chunk_lengths]
    levels = st.sampled_from([level for level in range(-128, 128) if bits == 8 or level % 2])
    supports = [sorted(data.draw(st.permutations(range(int(n))))[:k]) for n, k in zip(TOY.chunk_lengths, counts, strict=True)]
    said = reference.Said(
        TOY.chunk_lengths.tolist(),
        (compression, bits, keep, *rest),
        data.draw(st.sampled_from([-84, -83, 0, 12])),
        codes,
        [support if code else [] for support, code in zip(supports, codes, strict=True)],
        [[data.draw(levels) for _ in support] if code else [] for support, code in zip(supports, codes, strict=True)],
    )
    try:
        payload = reference.write(said)
    except ValueError:  # a level that this mode has no form for
        return
    update = read_both(payload, TOY)
    if update is not None:
        again = seen.setdefault((name_of(mode), update.to_dense().tobytes()), payload)
        assert again == payload


seen: dict[tuple[str, bytes], bytes] = {}


@given(st.binary(max_size=2 * HEADER_BYTES))
def test_garbage_is_refused(garbage: bytes) -> None:
    assert all(refused(garbage, MODES[0], layout) for layout in LAYOUTS.values())


@each_mode
def test_trailing_and_missing_bytes_are_refused(mode: PayloadMode) -> None:
    payload = codec.encode_payload(header(0, mode), buffer(RAGGED, "trailing"), RAGGED)
    for other in (payload + b"\0", payload + b"\1", payload + bytes(4096), payload[:-1], payload[:HEADER_BYTES], b""):
        assert refused(other, mode)


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_padding_of_a_dense_chunk_is_refused(bits: int) -> None:
    mode = next(mode for mode in MODES if not mode.sparse and mode.bits == bits)
    payload = codec.encode_payload(header(0, mode), buffer(TOY, "padding"), TOY)
    last = HEADER_BYTES + len(TOY.chunk_lengths) + -(-3 * bits // 8) - 1  # of the first chunk, which has three elements
    with pytest.raises(RemoteProtocolError, match="padding"):
        codec.read_payload(changed(payload, last, bytes([payload[last] | 1])), TOY)


@each_mode
def test_an_update_of_zeros_has_one_form(mode: PayloadMode) -> None:
    zero = codec.encode_payload(header(0, mode), np.zeros(RAGGED.size, dtype=np.float32), RAGGED)
    assert not codec.decode_payload(zero, header(0, mode), RAGGED).to_dense().any()
    for nothing in (-0.0, -1e-40, 1e-30):
        assert codec.encode_payload(header(0, mode), np.full(RAGGED.size, nothing, dtype=np.float32), RAGGED) == zero
    assert refused(changed(zero, HEADER_BYTES - 1, b"\0"), mode)


@pytest.mark.parametrize(
    ("at", "value"),
    [(0, 0), (0, 3), (1, 0), (1, 3), (1, 16), (HEADER_BYTES - 1, 13), (HEADER_BYTES - 1, 256 - 85)],
)
@each_mode
def test_another_mode_or_exponent_out_of_range_is_refused(mode: PayloadMode, at: int, value: int) -> None:
    payload = codec.encode_payload(header(0, mode), buffer(TOY, "range"), TOY)
    assert refused(changed(payload, at, bytes([value])), mode, TOY)


@pytest.mark.parametrize("keep", [0, 3, 4095, 4097, 65535])
def test_a_dense_payload_keeps_all_and_a_sparse_one_at_least_four_of_a_chunk(keep: int) -> None:
    for mode in (MODES[0], MODES[4]):
        payload = codec.encode_payload(header(0, mode), buffer(TOY, "keep"), TOY)
        assert (mode.sparse and keep == 4095) or refused(changed(payload, 2, keep.to_bytes(2, "little")), mode, TOY)


@pytest.mark.parametrize(
    ("field", "value"),
    [("job", b"x" * 32), ("round", 4), ("trainer", b"x" * 32), ("base", b"x" * 32), ("local_steps", 16), ("batch", 7)],
)
def test_another_header_is_refused(field: str, value: object) -> None:
    payload = codec.encode_payload(header(), buffer(TOY, "header"), TOY)
    with pytest.raises(RemoteProtocolError, match="header"):
        codec.decode_payload(payload, dataclasses.replace(header(), **{field: value}), TOY)  # type: ignore[arg-type]


def test_a_payload_in_another_mode_is_refused() -> None:
    for mode in MODES[1:]:
        payload = codec.encode_payload(header(0, mode), buffer(TOY, "mode"), TOY)
        with pytest.raises(RemoteProtocolError, match="mode"):
            codec.decode_payload(payload, header(0, MODES[0]), TOY)


# What is encoded -----------------------------------------------------------------------------------------------------


@each_mode
def test_levels_are_within_half_a_step_of_what_they_stand_for(mode: PayloadMode) -> None:
    """But for what lies beyond the scale's range, which is cut off."""
    m = buffer(RAGGED, "steps")
    update = codec.read_payload(codec.encode_payload(header(0, mode), m, RAGGED), RAGGED)
    dense, top = update.to_dense(), {1: 1, 2: 3, 4: 15, 8: 127}[mode.bits]
    steps = np.repeat(update.scales * 2.0**update.exponent, RAGGED.chunk_lengths)
    said = dense != 0
    inside = said & (np.abs(m) < top * steps) & (mode.bits > 1)
    half = 0.5 if mode.bits == 8 else 1.0  # a step lies between neighbouring levels, which are two scales apart below 8 bits
    assert np.all(np.abs(dense - m)[inside] <= half * steps[inside] * (1 + 1e-6))
    assert np.all(np.abs(dense)[said & ~inside] <= np.maximum(np.abs(m), top * steps)[said & ~inside] * (1 + 1e-6))
    assert np.array_equal(np.signbit(dense)[said], np.signbit(m)[said])


@given(toy_buffers, modes)
def test_what_a_payload_does_not_say_is_left_over_exactly(m: Float32Array, mode: PayloadMode) -> None:
    """Error feedback: e = m − decoded, in float32, loses nothing but that subtraction's rounding."""
    dense = codec.read_payload(codec.encode_payload(header(0, mode), m, TOY), TOY).to_dense()
    exact = [Fraction(float(a)) - Fraction(float(b)) for a, b in zip(m, dense, strict=True)]
    assert [np.float32(float(x)) for x in exact] == list(m - dense)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode.sparse], ids=name_of)
def test_a_sparse_payload_says_the_largest_and_of_equals_the_first(mode: PayloadMode) -> None:
    m = np.round(buffer(RAGGED, "ties", deviation=2.0)).astype(np.float32) + np.float32(0)
    update = codec.read_payload(codec.encode_payload(header(0, mode), m, RAGGED), RAGGED)
    for chunk, decoded in zip(chunks_of(m, RAGGED), chunks_of(update.to_dense(), RAGGED), strict=True):
        count = max(1, len(chunk) * mode.keep // 4096)
        assert np.flatnonzero(decoded).tolist() == sorted(np.argsort(-np.abs(chunk), kind="stable")[:count].tolist())


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 3e38])
@each_mode
def test_a_buffer_without_an_encoding_is_our_own_mistake(mode: PayloadMode, poison: float) -> None:
    m = np.full(RAGGED.size, poison, dtype=np.float32)
    with pytest.raises(LocalProtocolError):
        codec.encode_payload(header(0, mode), m, RAGGED)


def test_a_buffer_of_another_shape_or_type_is_our_own_mistake() -> None:
    for m in (np.zeros(5, dtype=np.float32), np.zeros(RAGGED.size)):
        with pytest.raises(LocalProtocolError, match="does not fit"):
            codec.encode_payload(header(), m, RAGGED)  # type: ignore[arg-type]


# Golden hashes -------------------------------------------------------------------------------------------------------

GOLDEN = {
    "dense-1-4096": "3d1cce761c7ffe878a54f2bc36593ab357debe29951917a901f1329b45a12521",
    "dense-2-4096": "0424eedf15aacddfe680c65bd1f42a8a4442db16451c78c2e14076d3cf73984f",
    "dense-4-4096": "6eab0d3715fdb75d6bbcb4692cb7086423984d1cfcf7cb67ec5d3cbad8d37db1",
    "dense-8-4096": "66f650565a3a7d7cbdf78bdf5044712051e6b56b9b1f9cd54033e5ff8d66821f",
    "sparse-1-64": "dbc79154ee885b3771d9e5cb02fe2222670aa85a70d0d120ce8bc402f7eb8c65",
    "sparse-1-2048": "1999debc4c6d677ac7fcd55df39980f08363007e2cdea7643477efe37cdaf6df",
    "sparse-2-64": "c2cbe9709d08bf46d0033e503313e06ff6991023a67d5dec262931be7114f9ab",
    "sparse-2-2048": "fdd34cd47afde42cc53e33b10b81f8e86e624cb0e1f1cc1be915446883c41562",
    "sparse-4-64": "9d1aeced3620aaa3e715c1bd1cf47a7e16a5819d4d30970e58163839f5bd0397",
    "sparse-4-2048": "f85d8b43930585fd340c2aba038f2e0e413a37d4f714e674bae64d5f26ec8839",
    "sparse-8-64": "eac254a664bbe59ae0e62420560514e6490eed5eb4bdcb909afb9347ebc5ac2b",
    "sparse-8-2048": "5e2ae7ef8b4a97bd370449fe29d4615a33f97aacb4af3785c800cacc70733831",
    "sparse-1-4": "5d6c93974618129cd3d0ce030ff4d3b6f53e2d69d7a53fa03bab513144bf8039",
    "sparse-1-5": "625ff4fe4dd90caf9844397fa648190bce894569878f87b163606c32d8ed7417",
    "sparse-1-1000": "ec51ae06dc47159050bf2f7ccf547ab40898c335be15745e6898b1c4961d2847",
    "sparse-1-3000": "017a00ec73b767ceff76c8350ac68382eafbf3f54ee9dcfabab7824420366c57",
    "sparse-1-4096": "4f4e86d05ec75af6c8c74768f725210a9e95d1ce777030115aa0cee144490be0",
}


@each_mode
def test_payloads_have_their_golden_hashes(mode: PayloadMode) -> None:
    """Of buffers made from integers, so that a change of any bit on any machine is seen."""
    digest = hashlib.sha256()
    for number, deviation in enumerate((1e-2, 3e4, 1e-20)):
        m = buffer(RAGGED, "payload", number, deviation=deviation)
        payload = codec.encode_payload(header(0, mode), m, RAGGED)
        assert len(payload) <= payload_bytes_max(RAGGED, mode)
        digest.update(payload + codec.read_payload(payload, RAGGED).to_dense().astype("<f4").tobytes())
    assert digest.hexdigest() == GOLDEN[name_of(mode)]
