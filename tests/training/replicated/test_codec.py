from __future__ import annotations

import dataclasses
import hashlib
import struct
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import LocalProtocolError, RemoteProtocolError
from tests.training.replicated.support import RAGGED, buffer, header
from training.replicated import codec
from training.replicated.layout import Float32Array, Layout, of_shapes

HEADER_BYTES = 115
CHUNKS = len(RAGGED.chunk_lengths)
SIGNS_AT = HEADER_BYTES + 2 * CHUNKS
TOY = of_shapes([("a", (3,)), ("b", (9,)), ("c", (8,))])

elements = st.floats(width=32, min_value=-(2.0**31), max_value=2.0**31, allow_nan=False)
toy_buffers = st.lists(elements, min_size=TOY.size, max_size=TOY.size).map(lambda values: np.array(values, dtype=np.float32))


def chunks_of(m: Float32Array, layout: Layout) -> list[Float32Array]:
    return np.split(m, np.cumsum(layout.chunk_lengths)[:-1])


@pytest.fixture(scope="module")
def payload() -> bytes:
    return codec.encode(header(), buffer(RAGGED, "payload"), RAGGED)


def changed(payload: bytes, at: int, new: bytes) -> bytes:
    return payload[:at] + new + payload[at + len(new) :]


def refused(payload: bytes, layout: Layout = RAGGED) -> bool:
    with pytest.raises(RemoteProtocolError) as caught:
        codec.decode(payload, header(), layout)
    return caught.value.reason == "malformed"


@given(toy_buffers)
def test_decoding_gives_back_signs_and_mean_magnitudes(m: Float32Array) -> None:
    dense = codec.decode(codec.encode(header(), m, TOY), header(), TOY).dense()
    means = [sum((abs(Fraction(float(x))) for x in chunk), Fraction(0)) / len(chunk) for chunk in chunks_of(m, TOY)]
    precision = max(means) / 2**16 + Fraction(1, 2**81)
    for mean, chunk, decoded in zip(means, chunks_of(m, TOY), chunks_of(dense, TOY), strict=True):
        assert len(set(np.abs(decoded).tolist())) == 1
        assert abs(Fraction(float(abs(decoded[0]))) - mean) <= precision or max(means) < Fraction(1, 2**64)
        assert decoded[0] == 0 or np.array_equal(np.signbit(decoded), np.signbit(chunk))


@given(toy_buffers)
def test_an_update_encodes_to_the_payload_it_was_decoded_from(m: Float32Array) -> None:
    payload = codec.encode(header(), m, TOY)
    update = codec.decode(payload, header(), TOY)
    assert update.encode() == payload
    assert codec.encode(header(), update.dense(), TOY) == payload


@given(toy_buffers)
def test_the_norm_is_exact(m: Float32Array) -> None:
    update = codec.decode(codec.encode(header(), m, TOY), header(), TOY)
    assert update.norm_squared() == float(sum(Fraction(float(x)) ** 2 for x in update.dense()))


@settings(max_examples=300)
@given(data=st.data())
def test_mutated_bytes_are_refused_or_canonical(payload: bytes, data: st.DataObject) -> None:
    mutated = bytearray(payload)
    for _ in range(data.draw(st.integers(1, 4))):
        place = st.one_of(st.integers(0, SIGNS_AT + 8), st.integers(SIGNS_AT + 1020, len(payload) - 1))
        mutated[data.draw(place) % len(mutated)] = data.draw(st.integers(0, 255))
    del mutated[len(mutated) - data.draw(st.sampled_from([0, 0, 0, 1, 600])) :]
    mutated += data.draw(st.sampled_from([b"", b"", b"", b"\0"]))
    try:
        update = codec.read(bytes(mutated), RAGGED)
    except RemoteProtocolError as error:
        assert error.reason == "malformed"
    else:
        assert codec.encode(update.header, update.dense(), RAGGED) == mutated


@given(st.binary(max_size=2 * HEADER_BYTES))
def test_garbage_is_refused(garbage: bytes) -> None:
    assert refused(garbage) and refused(garbage, TOY)


def test_a_payload_has_its_golden_hash(payload: bytes) -> None:
    assert hashlib.sha256(payload).hexdigest() == "16556243bdfc21b9ca1d89520698efacd6317b3f8fe60b8a340858da2593e9fb"


def test_a_payload_costs_one_bit_per_parameter_and_half_a_percent() -> None:
    layout = of_shapes([("tensor", (1 << 20,))])
    assert codec.payload_bytes_max(layout) / layout.size < 1.006 / 8


def test_a_payload_is_laid_out_as_documented() -> None:
    m = np.array([1, -1, 1] + [-0.5] * 9 + [0] * 8, dtype=np.float32)
    expected = struct.pack("<BB32sQ32s32sIIb", 1, 1, header().job, 3, header().trainer, b"b" * 32, 15, 8, -15)
    expected += struct.pack("<3H", 0x8000, 0x4000, 0) + bytes([0b01000000, 0xFF, 0b10000000, 0])
    assert codec.encode(header(), m, TOY) == expected


@pytest.mark.parametrize("extra", [b"\0", b"\1", bytes(4096)])
def test_trailing_bytes_are_refused(payload: bytes, extra: bytes) -> None:
    assert refused(payload + extra)


def test_a_short_payload_is_refused(payload: bytes) -> None:
    assert refused(payload[:-1]) and refused(b"")


@pytest.mark.parametrize(
    ("field", "value"),
    [("job", b"x" * 32), ("round", 4), ("trainer", b"x" * 32), ("base", b"x" * 32), ("local_steps", 16), ("batch", 7)],
)
def test_another_header_is_refused(payload: bytes, field: str, value: object) -> None:
    with pytest.raises(RemoteProtocolError, match="header"):
        codec.decode(payload, dataclasses.replace(header(), **{field: value}), RAGGED)  # type: ignore[arg-type]


@pytest.mark.parametrize("at", [0, 1])
def test_another_version_or_mode_is_refused(payload: bytes, at: int) -> None:
    assert refused(changed(payload, at, b"\x02"))


@pytest.mark.parametrize("exponent", [-81, 17, 127, -128])
def test_a_forged_exponent_is_refused(payload: bytes, exponent: int) -> None:
    assert refused(changed(payload, HEADER_BYTES - 1, struct.pack("<b", exponent)))


def test_mantissas_that_are_not_normalised_are_refused(payload: bytes) -> None:
    assert refused(changed(payload, HEADER_BYTES, struct.pack(f"<{CHUNKS}H", *[0x7FFF] * CHUNKS)))


def test_an_update_of_zeros_has_one_form() -> None:
    zero = codec.encode(header(), np.zeros(RAGGED.size, dtype=np.float32), RAGGED)
    assert not codec.decode(zero, header(), RAGGED).dense().any()
    assert codec.encode(header(), np.full(RAGGED.size, -0.0, dtype=np.float32), RAGGED) == zero
    assert codec.encode(header(), np.full(RAGGED.size, -1e-40, dtype=np.float32), RAGGED) == zero
    assert refused(changed(zero, HEADER_BYTES - 1, b"\0"))


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_signs_in_an_empty_chunk_are_refused(chunk: int) -> None:
    m = np.ones(RAGGED.size, dtype=np.float32)
    chunks_of(m, RAGGED)[chunk][:] = -1e-9
    sparse = codec.encode(header(), m, RAGGED)
    assert codec.decode(sparse, header(), RAGGED).mantissas[chunk] == 0
    assert refused(changed(sparse, SIGNS_AT + int(RAGGED.sign_starts[chunk]), b"\x80"))


@pytest.mark.parametrize(("at", "bit"), [(1024, 1), (1024, 2), (1025, 1), (1025, 16)])
def test_padding_bits_are_refused(payload: bytes, at: int, bit: int) -> None:
    assert refused(changed(payload, SIGNS_AT + at, bytes([payload[SIGNS_AT + at] | bit])))


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e38])
def test_a_buffer_without_an_encoding_is_our_own_mistake(poison: float) -> None:
    m = buffer(RAGGED, "poison")
    m[5000] = poison
    with pytest.raises(LocalProtocolError):
        codec.encode(header(), m, RAGGED)


def test_a_buffer_of_another_shape_or_type_is_our_own_mistake() -> None:
    for m in (np.zeros(5, dtype=np.float32), np.zeros(RAGGED.size)):
        with pytest.raises(LocalProtocolError, match="does not fit"):
            codec.encode(header(), m, RAGGED)  # type: ignore[arg-type]


def test_the_largest_mean_may_round_up_to_the_next_power_of_two() -> None:
    m = np.full(RAGGED.size, np.nextafter(np.float32(1), np.float32(0)), dtype=np.float32)
    update = codec.decode(codec.encode(header(), m, RAGGED), header(), RAGGED)
    assert np.all(update.dense() == 1) and update.mantissas.max() == 0x8000


def test_scales_a_thousand_times_apart_keep_their_precision() -> None:
    """Eight bits under one exponent would not: real chunks differ by more than an octave."""
    m = np.concatenate([np.full(3, 1.0), np.full(9, 0.001), np.full(8, 0.1)]).astype(np.float32)
    scales = codec.decode(codec.encode(header(), m, TOY), header(), TOY).dense()
    assert scales[3] == pytest.approx(0.001, rel=0.02) and scales[12] == pytest.approx(0.1, rel=2e-4)
