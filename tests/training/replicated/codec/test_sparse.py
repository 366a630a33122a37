"""Supports and their bytes: the worst ones, many spans, and forged ones that a decoder has to see through."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from protocol.errors import RemoteProtocolError
from tests.training.replicated.codec import reference
from tests.training.replicated.codec.samples import SPARSE, name_of
from tests.training.replicated.support import RAGGED, buffer, header
from training.job_spec import KEEP_MAX, KEEP_MIN, Compression
from training.replicated import codec
from training.replicated.codec import PayloadMode, payload_bytes_max, sparse_body, top_k_support
from training.replicated.tensor_layout import CHUNK, ElementRun, Float32Array, TensorLayout, layout_from_shapes

TOP_64 = PayloadMode(Compression.SPARSE, 1, 64)
MILLION = layout_from_shapes([("tensor", (1 << 20,))])
SCATTERED = layout_from_shapes([(f"tensor {number}", (3 + 700 * number,)) for number in range(30)])  # blocks of every size
each_sparse_mode = pytest.mark.parametrize("mode", SPARSE, ids=name_of)


def supported(layout: TensorLayout, keep: int, place: str) -> Float32Array:
    """A buffer whose largest elements in every chunk are the first or the last ones, or make the code as long as can be."""
    m, start = np.full(layout.size, 1e-3, dtype=np.float32), 0
    for length in layout.chunk_lengths.tolist():
        count = reference.kept(length, keep)
        longest = np.cumsum(1 + longest_gaps(length - count, count, reference.rice(keep))) - 1
        positions = {"first": np.arange(count), "last": np.arange(length - count, length), "longest": longest}[place]
        m[start + positions] = 1
        start += length
    return m


def longest_gaps(free: int, count: int, p: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Gaps that sum to at most `free`, all of them multiples of 2^p: nothing is left for remainders."""
    whole, gaps = free >> p, np.zeros(count, dtype=np.int64)
    gaps += (whole // count) << p
    gaps[: whole % count] += 1 << p
    return gaps


def test_uniform_supports_of_64_cost_less_than_0172_bytes_a_parameter() -> None:
    payload = codec.encode_payload(header(0, TOP_64), buffer(MILLION, "uniform"), MILLION)
    assert len(payload) / MILLION.size <= 0.0172


@pytest.mark.parametrize("place", ["first", "last", "longest"])
def test_no_support_of_64_costs_more_than_0185_bytes_a_parameter(place: str) -> None:
    payload = codec.encode_payload(header(0, TOP_64), supported(MILLION, 64, place), MILLION)
    assert len(payload) <= payload_bytes_max(MILLION, TOP_64) <= 0.0185 * MILLION.size


@pytest.mark.parametrize("keep", [4, 5, 16, 64, 333, 1000, 2048, 3000, 4096])
def test_the_longest_support_is_as_long_as_the_bound(keep: int) -> None:
    layout, mode = layout_from_shapes([("tensor", (16 * CHUNK,))]), PayloadMode(Compression.SPARSE, 1, keep)
    payload = codec.encode_payload(header(0, mode), supported(layout, keep, "longest"), layout)
    assert len(payload) == payload_bytes_max(layout, mode)
    assert codec.read_payload(payload, layout).encode() == payload


def test_the_bound_of_a_chunk_is_proven_for_every_k() -> None:
    """A support of k among 4096 has gaps that sum to at most 4096 − k, and a sum of quotients is at most the sum's quotient."""
    for keep in range(KEEP_MIN, KEEP_MAX + 1):
        p = top_k_support.rice_parameter(keep)
        assert p == reference.rice(keep)
        most = top_k_support.quotient_bits_max(np.array([CHUNK]), np.array([keep]), p)
        assert keep <= most == keep + (CHUNK - keep) // 2**p <= 2 * CHUNK
    assert 0.0176 * 8 * CHUNK >= 64 * (5 + 1) + 64 + 4032 // 32 and top_k_support.rice_parameter(64) == 5


@each_sparse_mode
@pytest.mark.parametrize("span", [1, 7, 1 << 14])
def test_blocks_are_read_alike_in_any_order_alone_and_together(
    mode: PayloadMode, span: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    payload = codec.encode_payload(header(0, mode), buffer(SCATTERED, "spans"), SCATTERED)
    expected = codec.read_payload(payload, SCATTERED).to_dense()
    monkeypatch.setattr(sparse_body, "SPAN", span)
    update = codec.read_payload(payload, SCATTERED)
    scales = (update.scales * 2.0**update.exponent).astype(np.float32)
    assert np.array_equal(update.to_dense(), expected)
    for number in np.argsort(buffer(layout_from_shapes([("order", (len(SCATTERED.blocks),))]), "order")):
        run = ElementRun.of_blocks(SCATTERED.blocks[number : number + 3])
        assert np.array_equal(update.scaled_elements(run, scales), expected[run.elements])


# Forged --------------------------------------------------------------------------------------------------------------


def said(mode: PayloadMode, layout: TensorLayout = RAGGED) -> reference.Said:
    payload = codec.encode_payload(header(0, mode), buffer(layout, "forged"), layout)
    return reference.read(payload, layout.chunk_lengths.tolist())


def refused(forged: reference.Said, layout: TensorLayout = RAGGED) -> bool:
    with pytest.raises(RemoteProtocolError) as caught:
        codec.read_payload(reference.write(forged), layout)
    return caught.value.reason == "malformed"


@each_sparse_mode
def test_a_position_beyond_its_chunk_is_refused(mode: PayloadMode) -> None:
    for chunk, length in enumerate(RAGGED.chunk_lengths.tolist()):
        forged = said(mode)
        forged.supports[chunk][-1] = length
        assert refused(forged)


@pytest.mark.parametrize("mode", [mode for mode in SPARSE if mode.bits == 8], ids=name_of)
def test_a_level_of_zero_is_refused(mode: PayloadMode) -> None:
    forged = said(mode)
    forged.levels[0][forged.levels[0].index(min(forged.levels[0], key=abs))] = 0
    assert refused(forged)


@pytest.mark.parametrize("mode", [mode for mode in SPARSE if mode.bits > 1], ids=name_of)
def test_a_chunk_that_leaves_its_scale_unused_is_refused(mode: PayloadMode) -> None:
    forged = said(mode)
    forged.levels[1] = [1] * len(forged.levels[1])
    assert refused(forged)


@each_sparse_mode
def test_a_chunk_of_scale_zero_has_no_entries(mode: PayloadMode) -> None:
    forged = said(mode)
    forged.codes[1] = 0
    assert refused(forged)
    forged.supports[1] = forged.levels[1] = []
    update = codec.read_payload(reference.write(forged), RAGGED)
    assert not update.to_dense()[CHUNK : 2 * CHUNK].any()


def test_idle_bits_are_refused() -> None:
    mode = PayloadMode(Compression.SPARSE, 1, 1000)
    payload = codec.encode_payload(header(0, mode), buffer(RAGGED, "idle"), RAGGED)
    update = codec.read_payload(payload, RAGGED)
    entries, p = int(update.body.before[-1]), top_k_support.rice_parameter(1000)  # type: ignore[union-attr]
    remainders, body = -(-entries * p // 8), len(payload) - len(update.packed)
    assert entries * p % 8 and entries % 8, "there are idle bits in both streams"
    for last in (body + remainders - 1, body + remainders + -(-entries // 8) - 1):
        assert not payload[last] & 1
        with pytest.raises(RemoteProtocolError, match="padding"):
            codec.read_payload(payload[:last] + bytes([payload[last] | 1]) + payload[last + 1 :], RAGGED)


def test_quotients_cannot_make_a_decoder_take_memory() -> None:
    """As many bytes as a payload may have, and as many ones or zeros as they hold; and sizes no layout stands for."""
    mode = PayloadMode(Compression.SPARSE, 1, 4)
    honest = codec.encode_payload(header(0, mode), buffer(MILLION, "memory"), MILLION)
    most = payload_bytes_max(MILLION, mode)
    codec.read_payload(honest, MILLION)
    for filler in (b"\x00", b"\xff", b"\x80", b"\x01"):
        forged = honest[:400] + filler * (most - 400)
        tracemalloc.start()
        with pytest.raises(RemoteProtocolError):
            codec.read_payload(forged, MILLION)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1 << 18, filler
    with pytest.raises(RemoteProtocolError, match="bytes"):
        codec.read_payload(honest + bytes(1 << 20), MILLION)
