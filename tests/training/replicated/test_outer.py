from __future__ import annotations

import numpy as np

from tests.training.replicated.support import RAGGED, buffer
from training.replicated import outer

P, V, G = (buffer(RAGGED, name) for name in ("parameters", "momentum", "gradient"))


def test_every_operation_is_rounded_on_its_own() -> None:
    parameters, momentum = outer.step(P, V, G, 0.7, 0.5)
    eta, mu = np.float32(0.7), np.float32(0.5)
    for i in range(0, RAGGED.size, 97):
        following = np.float32(np.float32(mu * V[i]) + G[i])
        change = np.float32(eta * np.float32(np.float32(mu * following) + G[i]))
        assert momentum[i] == following and parameters[i] == np.float32(P[i] - change)


def test_the_arguments_are_left_alone() -> None:
    before = P.copy(), V.copy(), G.copy()
    outer.step(P, V, G, 0.7, 0.9)
    assert all(np.array_equal(x, y) for x, y in zip(before, (P, V, G), strict=True))


def test_without_momentum_it_is_plain_descent() -> None:
    parameters, _ = outer.step(P, np.zeros_like(P), G, 1.0, 0.0)
    assert np.array_equal(parameters, P - G)


def test_momentum_never_becomes_subnormal() -> None:
    momentum, still = V, np.zeros_like(P)
    for _ in range(200):
        _, momentum = outer.step(P, momentum, still, 0.7, 0.5)
        assert not np.any((momentum != 0) & (np.abs(momentum) < np.finfo(np.float32).smallest_normal))
    assert not momentum.any()
