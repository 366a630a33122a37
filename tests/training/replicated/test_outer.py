from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from tests.training.replicated.support import RAGGED, SMALL, buffer
from training.job_spec import OUTER_SLOTS, JobSpec, OuterOptimizerKind
from training.objectives.objective import AdamWTerms
from training.replicated import outer_optimizer
from training.replicated.outer_optimizer import inner_rate
from training.replicated.tensor_layout import Float32Array

P, V, G = (buffer(RAGGED, name) for name in ("parameters", "momentum", "gradient"))
ADAMW = replace(SMALL, outer=OuterOptimizerKind.ADAMW, local_steps=1, beta1=0.9, weight_decay=0.5, warmup_rounds=0)
NORMAL = np.finfo(np.float32).smallest_normal
one = np.float32


def spec_of(kind: OuterOptimizerKind) -> JobSpec:
    return replace(ADAMW, outer=kind)


def stepped(optimizer: outer_optimizer.OuterOptimizer, *vectors: Float32Array, decayed: bool = True) -> list[Float32Array]:
    """Return the parameters and slots after a step. The arguments stay unchanged."""
    parameters, *slots, gradient = (vector.copy() for vector in vectors)
    optimizer.step(parameters, slots, gradient, decayed)
    return [parameters, *slots]


def test_nesterov_rounds_every_operation_on_its_own() -> None:
    parameters, momentum = stepped(outer_optimizer.OuterNesterov(0.7, 0.5), P, V, G)
    for i in range(0, RAGGED.size, 97):
        following = one(one(one(0.5) * V[i]) + G[i])
        change = one(one(0.7) * one(one(one(0.5) * following) + G[i]))
        assert momentum[i] == following and parameters[i] == one(P[i] - change)


def test_nesterov_without_momentum_and_sgd_are_plain_descent() -> None:
    parameters, _ = stepped(outer_optimizer.OuterNesterov(1.0, 0.0), P, np.zeros_like(P), G)
    assert np.array_equal(parameters, P - G)
    assert np.array_equal(stepped(outer_optimizer.OuterSgd(0.7), P, G)[0], P - one(0.7) * G)


def test_sign_moves_everything_by_the_rate_against_the_momentum() -> None:
    parameters, momentum = stepped(outer_optimizer.OuterSignum(0.25, 0.9), P, V, G)
    assert np.array_equal(momentum, one(0.9) * V + G)
    assert np.array_equal(parameters, P - one(0.25) * np.sign(momentum))
    assert np.array_equal(stepped(outer_optimizer.OuterSignum(0.25, 0.9), P, np.zeros_like(P), np.zeros_like(P))[0], P)


@pytest.mark.parametrize("decayed", [True, False])
def test_adamw_rounds_every_operation_on_its_own(decayed: bool) -> None:
    second = V * V
    optimizer = outer_optimizer.OuterAdamW(AdamWTerms(0.01, 0.9, 0.95, 1e-8, 0.5), (0.9**3, 0.95**3))
    parameters, m, v = stepped(optimizer, P, V, second, G, decayed=decayed)
    for i in range(0, RAGGED.size, 97):
        first = one(one(one(0.9) * V[i]) + one(G[i] * one(1 - 0.9)))
        square = one(one(one(0.95) * second[i]) + one(one(G[i] * G[i]) * one(1 - 0.95)))
        root = one(one(one(math.sqrt(square)) * one(1 / math.sqrt(1 - 0.95**3))) + one(1e-8))
        change = one(one(first / root) * one(0.01 / (1 - 0.9**3)))
        before = one(P[i] * one(1 - 0.01 * 0.5)) if decayed else P[i]
        assert (m[i], v[i], parameters[i]) == (first, square, one(before - change))


def test_adamw_is_the_adamw_of_its_paper() -> None:
    theta, m, v = P.astype(np.float64), np.zeros(RAGGED.size), np.zeros(RAGGED.size)
    exact = [P, np.zeros_like(P), np.zeros_like(P)]
    powers = outer_optimizer.initial_beta_powers(ADAMW)
    for number in range(20):
        gradient, rate = buffer(RAGGED, "gradient", number), inner_rate(ADAMW, number)
        powers = outer_optimizer.next_beta_powers(ADAMW, powers)
        exact = stepped(outer_optimizer.make_outer_optimizer(ADAMW, number, powers), *exact, gradient)
        m, v = 0.9 * m + 0.1 * gradient, 0.95 * v + 0.05 * np.square(gradient, dtype=np.float64)
        root = np.sqrt(v / (1 - 0.95 ** (number + 1))) + 1e-8
        theta = theta * (1 - rate * 0.5) - rate * m / (1 - 0.9 ** (number + 1)) / root
    assert np.abs(exact[0] - theta).max() < 1e-6


def test_powers_of_beta_are_products_and_become_zero_where_they_no_longer_matter() -> None:
    powers = outer_optimizer.initial_beta_powers(ADAMW)
    for count in range(1, 1000):
        powers = outer_optimizer.next_beta_powers(ADAMW, powers)
        assert powers == pytest.approx((0.9**count, 0.95**count), rel=1e-12, abs=outer_optimizer.POWER_LEAST)
    assert powers == (0.0, 0.0)
    assert outer_optimizer.next_beta_powers(SMALL, outer_optimizer.initial_beta_powers(SMALL)) == ()


@pytest.mark.parametrize("kind", OuterOptimizerKind)
def test_what_a_job_names_is_what_moves_it(kind: OuterOptimizerKind) -> None:
    spec = spec_of(kind)
    optimizer = outer_optimizer.make_outer_optimizer(
        spec, 0, outer_optimizer.next_beta_powers(spec, outer_optimizer.initial_beta_powers(spec))
    )
    slots = {"nesterov": ("momentum",), "sgd": (), "sign": ("momentum",), "adamw": ("first", "second")}
    named = {"nesterov": "OuterNesterov", "sgd": "OuterSgd", "sign": "OuterSignum", "adamw": "OuterAdamW"}
    assert type(optimizer).__name__ == named[kind.value] and OUTER_SLOTS[spec.outer] == slots[kind.value]


# Exact multiples of 2^-123, large and tiny, as gradients and as values that have decayed for many rounds.
TINY = np.array([2.0**-e * f for e in range(1, 140, 3) for f in (1, -1.75, 0)], dtype=np.float32)


@pytest.mark.parametrize("kind", OuterOptimizerKind)
@pytest.mark.parametrize("factor", [0.0, 1e-30, 2.0**-24, 0.5, 1.0])
def test_nothing_ever_becomes_subnormal_or_depends_on_what_a_flush_to_zero_would_change(
    kind: OuterOptimizerKind, factor: float
) -> None:
    """Every step is made twice: unchanged, and with every subnormal intermediate result replaced by zero."""
    spec = replace(spec_of(kind), outer_momentum=factor, beta1=factor * 0.999, beta2=factor * 0.99, weight_decay=3.0)
    gradients = [
        np.where(np.abs(g) < outer_optimizer.FLUSH_BELOW, one(0), g) for g in (TINY, np.zeros_like(TINY), -np.roll(TINY, 7))
    ]
    plain = [np.zeros(len(TINY), dtype=np.float32) for _ in range(1 + len(OUTER_SLOTS[spec.outer]))]
    flushed = [vector.view(Flushing) for vector in plain]
    powers = outer_optimizer.initial_beta_powers(spec)
    for number in range(60):
        powers = outer_optimizer.next_beta_powers(spec, powers)
        optimizer = outer_optimizer.make_outer_optimizer(spec, number, powers)
        gradient = gradients[min(number, 2)]
        plain = stepped(optimizer, *plain, gradient)
        flushed = stepped(optimizer, *flushed, gradient.view(Flushing))
        for ours, theirs in zip(plain, flushed, strict=True):
            assert np.array_equal(ours, np.asarray(theirs))
            assert not np.any((ours != 0) & (np.abs(ours) < NORMAL))


class Flushing(np.ndarray):
    """Arrays with numpy's results after a library has set flush-to-zero and denormals-are-zero."""

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **kwargs):  # type: ignore[no-untyped-def]
        flat = [flushed(x) if isinstance(x, np.ndarray) else x for x in inputs]
        result = flushed(getattr(ufunc, method)(*flat, **kwargs))
        if out is None:
            return result.view(Flushing) if isinstance(result, np.ndarray) else result
        np.copyto(np.asarray(out[0]), result)
        return out[0]


def flushed(x: np.ndarray) -> np.ndarray:
    x = np.asarray(x)
    return np.where(np.abs(x) < NORMAL, x.dtype.type(0), x) if x.dtype == np.float32 else x


def test_a_step_that_does_not_flush_would_be_seen() -> None:
    """The negative control: 2^-100 · 2^-24 · 2^-24 is subnormal."""
    vector = np.full(4, 2.0**-100, dtype=np.float32)
    small = vector * one(2.0**-24) * one(2.0**-24)
    assert small.any() and not np.asarray(vector.view(Flushing) * one(2.0**-24) * one(2.0**-24)).any()


def test_rates_beyond_all_reason_leave_finite_numbers() -> None:
    wild = replace(ADAMW, inner_rate=10.0, weight_decay=100.0, beta1=1 - 2.0**-53, beta2=1 - 2.0**-53)
    vectors = [P, np.zeros_like(P), np.zeros_like(P)]
    powers = outer_optimizer.initial_beta_powers(wild)
    for number in range(5):
        powers = outer_optimizer.next_beta_powers(wild, powers)
        vectors = stepped(outer_optimizer.make_outer_optimizer(wild, number, powers), *vectors, G * one(2.0**40))
    assert all(np.isfinite(vector).all() for vector in vectors)


def test_named_terms_take_the_place_of_those_of_the_specification() -> None:
    """Fifty steps of changing rates, with a tiny epsilon and weight decay, are those of AdamW in float64."""
    theta, m, v = P.astype(np.float64), np.zeros(RAGGED.size), np.zeros(RAGGED.size)
    exact = [P, np.zeros_like(P), np.zeros_like(P)]
    powers = outer_optimizer.initial_beta_powers(ADAMW)
    for number in range(50):
        terms = AdamWTerms(1e-3 / (1 + number % 7), 0.8, 0.99, 1e-12, 0.1)
        gradient = buffer(RAGGED, "gradient", number, deviation=1e-4)
        powers = outer_optimizer.next_beta_powers(ADAMW, powers, terms)
        exact = stepped(outer_optimizer.make_outer_optimizer(ADAMW, number, powers, terms), *exact, gradient)
        m, v = 0.8 * m + 0.2 * gradient, 0.99 * v + 0.01 * np.square(gradient, dtype=np.float64)
        root = np.sqrt(v / (1 - 0.99 ** (number + 1))) + 1e-12
        theta = theta * (1 - terms.rate * 0.1) - terms.rate * m / (1 - 0.8 ** (number + 1)) / root
    assert np.abs(exact[0] - theta).max() < 1e-6 and np.abs(exact[0] - P).max() > 1e-3
