"""Distance of a vector from those that a payload may stand for, with any bits: zero for honest work, all of a lie."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.training.replicated.test_buffers import HEADER, RAGGED, SCALES, SEEDS, drawn
from training.job_spec import BITS
from training.replicated import codec
from training.replicated.codec import quantization_cells
from training.replicated.tensor_layout import Float32Array

WIDTHS = st.sampled_from(BITS)
SHAPES = st.sampled_from(["normal", "heavy", "few", "one sign", "faint"])


def vector(seed: int, scale: float, shape: str) -> Float32Array:
    m = drawn(seed, scale, shape)
    if shape == "faint":  # chunks whose scale is 0
        m[:4_096] *= np.float32(1e-7)
        m[8_192:8_200] = 0
    return m


def said(bits: int, m: Float32Array) -> codec.QuantizedUpdate:
    return codec.read_payload(codec.encode_payload(replace(HEADER, bits=bits), m, RAGGED), RAGGED)


def apart(update: codec.QuantizedUpdate, m: Float32Array) -> float:
    return quantization_cells.cell_distance(update, lambda block: m[block.elements])


def norm(m: Float32Array) -> float:
    return float(np.linalg.norm(m.astype(np.float64)))


@given(WIDTHS, SEEDS, SCALES, SHAPES)
@settings(max_examples=40)
def test_a_vector_has_the_encoding_that_it_has(bits: int, seed: int, scale: float, shape: str) -> None:
    m = vector(seed, scale, shape)
    assert apart(said(bits, m), m) <= 1e-6 * norm(m) + 1e-24


@given(WIDTHS, SEEDS, SCALES, SHAPES, st.sampled_from([1e-6, 1e-3, 0.1, 2.0]))
@settings(max_examples=40)
def test_another_machines_replay_is_no_farther_from_an_encoding_than_from_what_was_encoded(
    bits: int, seed: int, scale: float, shape: str, off: float
) -> None:
    m = vector(seed, scale, shape)
    other = m + drawn(seed + 1, off * scale, "normal")
    assert apart(said(bits, m), other) <= norm(other - m) + 1e-6 * (norm(m) + norm(other)) + 1e-24


@pytest.fixture
def m() -> np.ndarray:
    return vector(1, 1.0, "normal")


@pytest.mark.parametrize("factor", [1 / 16, 1 / 2, 17 / 16, 2, 16])
@pytest.mark.parametrize("bits", BITS)
def test_scales_of_another_vector_are_far_away(m: np.ndarray, bits: int, factor: float) -> None:
    assert apart(said(bits, (m * np.float32(factor)).astype(np.float32)), m) > 0.002 * norm(m)


@pytest.mark.parametrize("bits", BITS)
def test_signs_and_levels_of_another_vector_are_far_away(m: np.ndarray, bits: int) -> None:
    kept = norm(said(bits, m).dequantize())
    assert apart(said(bits, -m), m) > 0.4 * kept
    assert apart(said(bits, vector(2, 1.0, "normal")), m) > 0.4 * kept
    emptied = m.copy()
    emptied[:4_096] = 0
    assert apart(said(bits, emptied), m) > 0.1 * min(kept, norm(m[:4_096]))


@pytest.mark.parametrize("bits", BITS[:3])
def test_levels_of_another_vector_are_far_away_under_the_right_scales(m: np.ndarray, bits: int) -> None:
    """A few elements change their sign, and the scales stay unchanged."""
    lie = m.copy()
    lie[::50] *= -1
    assert norm(m[::50]) / 2 < apart(said(bits, lie), m) < 2.1 * norm(m[::50])


@pytest.mark.parametrize("bits", BITS[:3])
@pytest.mark.parametrize("count", [1, 16, 64])
def test_an_emptied_chunk_is_as_far_away_as_its_few_elements_are_large(m: np.ndarray, bits: int, count: int) -> None:
    """Zeros cannot shrink, so the mean of such a chunk falls by its other elements alone."""
    m[:4_096] = 0
    m[:count] = 5
    lie = m.copy()
    lie[:4_096] = 0
    assert apart(said(bits, lie), m) > 0.9 * norm(m[:4_096])


@given(SEEDS, st.integers(1, 300), st.floats(0.01, 0.99))
@settings(max_examples=30)
def test_no_vector_with_a_smaller_mean_is_nearer_than_is_told(seed: int, count: int, share: float) -> None:
    random = np.random.default_rng(seed)
    sizes = np.abs(random.standard_normal(count)) * (random.random(count) < 0.5)
    most = np.array([share * sizes.mean()])
    told = quantization_cells._lowered(sizes, np.array([0]), np.array([count]), np.array([sizes.mean()]), most)[0]
    for offset in np.linspace(0, sizes.max(), 400):
        smaller = np.maximum(sizes - offset, 0)
        if smaller.mean() <= most[0] * (1 + 1e-12):
            assert told <= np.sum((sizes - smaller) ** 2) + 1e-9
