"""Ternary weights: the scale, the levels, and latent weights that give both again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ledger.core.genesis import ModuleVersion
from protocol.errors import UserError
from training.job_spec import JobSpec
from training.model_store import JobModelStore
from training.replicated.tensor_layout import Float32Array, initial_parameters
from training.ternary import (
    SCALE_MIN,
    latent_weights,
    split_ternary,
    ternary_levels,
    ternary_scale,
    ternary_weights,
)
from training.transformer import LayerPlace, ModelSpec, TernaryLinear, find_layer, int8_problem, model_tensors

SHAPES = ((1, 1), (1, 2), (3, 5), (64, 48), (17, 1000))
SIZES = (1e-6, 1e-5, 0.02, 1.0, 1e4)
TERNARY = ModelSpec(context=16, width=16, layers=2, heads=2, kv_heads=1, hidden=24, tied=False, linear="ternary")
SPEC = JobSpec(name="t", data=bytes(32), model=TERNARY)


def drawn(shape: tuple[int, ...], size: float, seed: int = 0) -> Float32Array:
    return (np.random.default_rng(seed).standard_normal(shape) * size).astype(np.float32)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", SIZES)
def test_scale_and_levels_are_those_of_the_paper(shape: tuple[int, ...], size: float) -> None:
    latent = drawn(shape, size)
    scale = ternary_scale(latent)
    assert scale == pytest.approx(np.abs(latent.astype(np.float64)).mean() + 1e-5, rel=2e-7)
    assert np.array_equal(ternary_levels(latent, scale), np.clip(np.rint(latent / scale), -1, 1))
    assert np.array_equal(ternary_weights(latent), scale * ternary_levels(latent, scale).astype(np.float32))


def test_a_half_is_rounded_to_zero_and_the_next_number_is_not() -> None:
    scale = np.float32(0.75)
    half = scale / np.float32(2)
    around = np.array([half, np.nextafter(half, np.float32(1)), -half, -np.nextafter(half, np.float32(1))], dtype=np.float32)
    assert ternary_levels(around, scale).tolist() == [0, 1, 0, -1]
    assert not np.signbit(ternary_weights(np.array([-0.01, 5.0], dtype=np.float32)))[0], "a zero is never negative"


def test_the_scale_does_not_depend_on_the_order_of_the_elements() -> None:
    latent, draw = drawn((400, 300), 0.05), np.random.default_rng(1)
    assert len({ternary_scale(draw.permutation(latent.ravel())).tobytes() for _ in range(20)}) == 1


def test_a_matrix_of_zeros_has_a_scale_and_a_matrix_without_numbers_shows() -> None:
    zeros = np.zeros((4, 4), dtype=np.float32)
    assert ternary_scale(zeros) == np.float32(SCALE_MIN) and not ternary_weights(zeros).any()
    for value in (np.nan, np.inf):
        broken = zeros.copy()
        broken[1, 2] = value
        with np.errstate(invalid="ignore"):
            assert np.isnan(ternary_weights(broken)).all()
            assert split_ternary(ternary_weights(broken)) is None


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", SIZES)
def test_weights_have_latent_weights_that_give_them_again_bit_for_bit(shape: tuple[int, ...], size: float) -> None:
    for seed in range(20):
        weights = ternary_weights(drawn(shape, size, seed))
        split = split_ternary(weights)
        assert split is not None
        latent = latent_weights(*split)
        assert latent is not None and ternary_weights(latent).tobytes() == weights.tobytes()


def test_a_plain_second_rounding_would_change_the_scale() -> None:
    """The reason for `latent_weights`: the mean of ternary weights is smaller than their scale."""
    weights = ternary_weights(drawn((64, 48), 0.05))
    assert ternary_scale(weights) < 0.8 * weights.max()


def test_a_scale_that_no_matrix_has_is_refused() -> None:
    levels = np.ones((4, 4), dtype=np.int8)
    for scale in (0.0, -1.0, SCALE_MIN, np.nan, np.inf):
        assert latent_weights(np.float32(scale), levels) is None
    assert latent_weights(np.float32(1.5e-5), levels) is None, "with a mean of 5e-6 all levels are 0"
    with np.errstate(over="raise"):
        assert latent_weights(np.float32(1e38), np.eye(8, dtype=np.int8)) is None, "the latent weights are beyond float32"


def test_weights_of_two_sizes_are_not_ternary() -> None:
    assert split_ternary(np.array([0.5, -0.5, 0.25], dtype=np.float32)) is None


# The kind of layer


def test_matrices_of_the_layers_are_ternary_and_nothing_else() -> None:
    dense = replace(TERNARY, linear="dense")
    found = {name for name, tensor in model_tensors(TERNARY).items() if tensor.parameter.is_ternary}
    matrices = ("query", "key", "value", "output", "gate", "up", "down")
    assert found == {f"layers.{layer}.{name}.weight" for layer in range(2) for name in matrices}
    assert not any(tensor.parameter.is_ternary for tensor in model_tensors(dense).values())
    assert np.array_equal(initial_parameters(SPEC), initial_parameters(replace(SPEC, model=dense)))
    assert int8_problem(TERNARY) is None and "linear 'dense'" in str(int8_problem(dense))


def test_a_network_must_know_the_kind(tmp_path: Path) -> None:
    assert isinstance(find_layer("ternary", LayerPlace.LINEAR), TernaryLinear)
    store, dense = JobModelStore(tmp_path), replace(SPEC, model=replace(TERNARY, linear="dense"))
    assert ModuleVersion("jobs", 2) in store.terms_of_spec(SPEC.encode()).requires
    assert store.terms_of_spec(dense.encode()).requires == (ModuleVersion("jobs", 1),)


def test_an_unknown_kind_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match=r"unknown layer model\.linear 'binary': choose one of dense, ternary$"):
        replace(SPEC, model=replace(TERNARY, linear="binary")).validated()
