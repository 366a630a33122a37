"""Buffers of levels: the levels of a vector m, and the distance of another vector from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import RemoteProtocolError
from training.job_spec import AuditMode, FeedbackMemory, JobSpec
from training.replicated import codec, error_feedback
from training.replicated.codec import quantization_cells
from training.replicated.error_feedback import ESTIMATE_BITS
from training.replicated.tensor_layout import Float32Array, TensorLayout, layout_from_shapes
from training.transformer import ModelSpec

RAGGED = layout_from_shapes([("a", (2, 4096)), ("b", (13,)), ("c", (4095,))])
HEADER = codec.PayloadHeader(bytes(32), 3, b"t" * 32, bytes(32), 10, 8, ESTIMATE_BITS)
SEEDS = st.integers(0, 2**32 - 1)
SCALES = st.sampled_from([1e-30, 1e-9, 3e-4, 1.0, 7e4])
SHAPES = st.sampled_from(["normal", "heavy", "few", "one sign"])


def drawn(seed: int, scale: float, shape: str) -> Float32Array:
    random = np.random.default_rng(seed)
    vector = random.standard_normal(RAGGED.size)
    if shape == "heavy":
        vector = vector**5
    elif shape == "few":
        vector *= random.random(RAGGED.size) < 0.01
    elif shape == "one sign":
        vector = np.abs(vector)
    return (vector * scale).astype(np.float32)


def said(m: Float32Array, layout: TensorLayout = RAGGED) -> codec.QuantizedUpdate:
    return codec.quantize_vector(HEADER, m, layout)


def apart(update: codec.QuantizedUpdate, vector: Float32Array) -> float:
    return quantization_cells.cell_distance(update, lambda block: vector[block.elements])


@given(SEEDS, SCALES, SHAPES)
@settings(max_examples=8)
def test_levels_are_said_of_the_vector_that_they_were_made_of(seed: int, scale: float, shape: str) -> None:
    m = drawn(seed, scale, shape)
    assert apart(said(m), m) <= 1e-6 * float(np.linalg.norm(m.astype(np.float64))) + 1e-24


def test_every_scale_has_room_for_what_it_was_rounded_down_from() -> None:
    m, seen = drawn(1, 1.0, "normal"), set[int]()
    for factor in np.geomspace(1, 2, 64):
        scaled = (m * np.float32(factor)).astype(np.float32)
        update = said(scaled)
        assert apart(update, scaled) == 0
        seen.add(int(update.codes.max()))
    assert seen == set(range(240, 256)), "the largest one, too, which has no next one"


@pytest.mark.parametrize("scale", [1e-30, 1e-23, 1e-21, 1e-19])
def test_where_all_is_too_small_for_any_scale_nothing_deviates(scale: float) -> None:
    """A buffer that decays while updates are zero reaches such values, and the tolerance of a zero update is zero."""
    m = drawn(1, scale, "normal")
    update = said(m)
    assert not update.codes.any() and apart(update, m) == 0
    assert apart(update, drawn(1, 1e-12, "normal")) > 1e-12


@given(SEEDS, SCALES, SHAPES, st.sampled_from([1e-6, 1e-3, 0.1, 2.0]))
@settings(max_examples=8)
def test_another_machines_replay_is_no_farther_from_levels_than_from_the_vector_itself(
    seed: int, scale: float, shape: str, off: float
) -> None:
    """A trainer within the tolerance with float32 values is within it with levels, so rounding convicts no honest trainer."""
    m = drawn(seed, scale, shape)
    other = m + drawn(seed + 1, off * scale, "normal")
    distance = float(np.linalg.norm(other.astype(np.float64) - m.astype(np.float64)))
    assert apart(said(m), other) <= distance + 1e-6 * float(np.linalg.norm(m.astype(np.float64))) + 1e-24


@given(SEEDS, SEEDS, SCALES, SHAPES)
@settings(max_examples=8)
def test_levels_of_another_vector_are_as_far_away_as_it_is_but_for_rounding(
    seed: int, lie: int, scale: float, shape: str
) -> None:
    m, update = drawn(seed, scale, shape), said(drawn(lie, scale, "normal"))
    told, unit = update.dequantize().astype(np.float64), np.repeat(update.scales * 2.0**update.exponent, RAGGED.chunk_lengths)
    rounding = np.where(np.abs(told) == 127 * unit, np.abs(told) / 16, unit / 2)
    distance = float(np.linalg.norm(m.astype(np.float64) - told))
    assert apart(update, m) >= distance - float(np.linalg.norm(rounding)) - 1e-24


@pytest.mark.parametrize("factor", [1 / 16, 1 / 2, 17 / 16, 2, 16])
def test_a_forged_scale_is_far_away(factor: float) -> None:
    """The same levels under another scale: a canonical payload of another vector."""
    m = drawn(1, 1.0, "normal")
    assert apart(said((m * np.float32(factor)).astype(np.float32)), m) > 0.01 * float(np.linalg.norm(m))


def test_levels_that_have_nothing_but_the_signs_are_far_away() -> None:
    m = drawn(1, 1.0, "normal")
    assert apart(said(np.sign(m) * np.float32(1e-3)), m) > 0.9 * float(np.linalg.norm(m))


def test_a_negative_level_is_of_negative_values_and_an_empty_chunk_of_tiny_ones() -> None:
    m = drawn(2, 1.0, "normal")
    assert apart(said(-m), m) > float(np.linalg.norm(m))
    emptied = m.copy()
    emptied[:4096] = 0
    assert apart(said(emptied), m) == pytest.approx(float(np.linalg.norm(m[:4096])), rel=0.05)


@pytest.mark.parametrize(
    "change", [{}, {"memory": FeedbackMemory.ESTIMATES, "feedback_decay": 0.8}, {"audit": AuditMode.OFF}], ids=str
)
def test_a_buffer_is_read_as_it_was_written_and_nothing_else_is_one(tmp_path: Path, change: dict[str, Any]) -> None:
    spec = replace(JobSpec(name="job", data=bytes(32)), **change).validated()
    model = error_feedback.layout_of(spec)
    m = np.random.default_rng(3).standard_normal(model.size, dtype=np.float32)
    made = error_feedback.make_buffer(m, HEADER, spec)
    assert made is not None
    (tmp_path / "m").write_bytes(made.encode())
    assert (tmp_path / "m").stat().st_size == error_feedback.buffer_bytes(spec) < 1.01 * model.size
    again, told = error_feedback.read_buffer(tmp_path / "m", spec), error_feedback.make_buffer(made.dequantize(), HEADER, spec)
    assert told is not None and told.encode() == made.encode(), "what levels say is said by the same ones"
    assert np.array_equal(again.dequantize(), made.dequantize()) and again.encode() == made.encode()
    assert float(np.linalg.norm(made.dequantize() - m)) < 0.02 * float(np.linalg.norm(m))
    of_four_bits = codec.encode_payload(replace(HEADER, bits=4), m, model)
    for wrong in (made.encode()[:-1], of_four_bits, m.tobytes(), bytes(error_feedback.buffer_bytes(spec))):
        (tmp_path / "m").write_bytes(wrong)
        with pytest.raises(RemoteProtocolError):
            error_feedback.read_buffer(tmp_path / "m", spec)


def test_a_job_that_carries_nothing_over_has_no_buffer() -> None:
    spec = JobSpec(name="job", data=bytes(32), feedback_decay=0.0).validated()
    assert (
        error_feedback.buffer_bytes(spec),
        error_feedback.make_buffer(np.ones(error_feedback.layout_of(spec).size, np.float32), HEADER, spec),
    ) == (0, None)


@pytest.mark.parametrize(("bits", "decay"), [(1, 0.95), (8, 0.0)])
def test_buffers_and_payloads_have_fewer_bytes_than_parameters(bits: int, decay: float) -> None:
    """Tensors of few elements have the most scales."""
    for model in (ModelSpec(), ModelSpec(width=8, heads=2, kv_heads=1, hidden=1, layers=64)):
        spec = JobSpec(name="job", data=bytes(32), model=model, bits=bits, feedback_decay=decay).validated()
        payload = codec.payload_bytes(error_feedback.layout_of(spec), bits)
        assert model.parameters < max(error_feedback.buffer_bytes(spec), payload) <= spec.object_bytes_max
