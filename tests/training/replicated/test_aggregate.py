from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import LocalProtocolError
from tests.training.replicated.support import RAGGED, buffer, update
from training.replicated import aggregate, codec
from training.replicated.layout import Float32Array, of_shapes

TOY = of_shapes([("a", (3,)), ("b", (9,)), ("c", (8,))])
Matrix = npt.NDArray[np.float64]


def updates(count: int, *seed: object, common: float = 0.0) -> list[codec.Update]:
    """`common` is the part that all have in common, as honest trainers on the same text do."""
    shared = buffer(RAGGED, "common", *seed) * np.float32(common)
    return [update(buffer(RAGGED, i, *seed) + shared, RAGGED, i) for i in range(count)]


def dense(items: list[codec.Update]) -> Matrix:
    return np.array([item.dense() for item in items], dtype=np.float64)


def reference(x: Matrix, f: int) -> Matrix:
    """ARC, NNM and the trimmed mean as their papers write them, in float64."""
    n = len(x)
    f = min(f, (n - 1) // 2)
    norms = np.linalg.norm(x, axis=1)
    bound = np.sort(norms)[::-1][int(2 * f / n * (n - f))]
    x = x * np.minimum(1, bound / norms)[:, None]
    nearest = np.argsort(np.linalg.norm(x[:, None] - x[None], axis=2), axis=1)[:, : n - f]
    mixed = np.sort(x[nearest].mean(axis=1), axis=0)
    trimmed: Matrix = mixed[f : n - f].mean(axis=0)
    return trimmed


@pytest.mark.parametrize(("count", "liars"), [(1, 1), (2, 1), (3, 1), (4, 1), (5, 2), (7, 2), (10, 3), (13, 4), (4, 0)])
def test_it_agrees_with_the_rule_in_floating_point(count: int, liars: int) -> None:
    items = updates(count, "reference", common=1.0)
    items[0] = update(buffer(RAGGED, "loud", deviation=0.1), RAGGED, 0)
    exact, rough = aggregate.aggregate(items, RAGGED, liars), reference(dense(items), liars)
    assert np.abs(exact - rough).max() < 1e-5 * np.abs(rough).max()


def test_two_or_fewer_are_averaged() -> None:
    for count in (1, 2):
        items = updates(count, "few")
        assert np.array_equal(aggregate.aggregate(items, RAGGED, 1), dense(items).mean(axis=0).astype(np.float32))


@pytest.mark.parametrize(
    ("count", "liars", "tolerated"), [(1, 9, 0), (2, 9, 0), (3, 9, 1), (4, 9, 1), (5, 1, 1), (7, 2, 2), (9, 0, 0)]
)
def test_never_half_of_the_accepted_are_taken_for_liars(count: int, liars: int, tolerated: int) -> None:
    assert aggregate.tolerated(count, liars) == tolerated


def test_nothing_and_two_updates_of_one_trainer_are_our_own_mistake() -> None:
    for items in ([], [*updates(2), *updates(1)]):
        with pytest.raises(LocalProtocolError):
            aggregate.plan(items, 1)


def test_the_order_of_the_updates_does_not_matter() -> None:
    items = updates(4, "order")
    results = {aggregate.aggregate(list(order), RAGGED, 1).tobytes() for order in itertools.permutations(items)}
    assert len(results) == 1


def test_copies_do_not_make_the_result_depend_on_the_order() -> None:
    m = buffer(RAGGED, "copied")
    items = [update(m, RAGGED, number) for number in range(3)] + [update(-m, RAGGED, 3)]
    results = {aggregate.aggregate(list(order), RAGGED, 1).tobytes() for order in itertools.permutations(items)}
    assert len(results) == 1


def test_equal_distances_do_not_make_the_result_depend_on_the_order() -> None:
    layout = of_shapes([("tensor", (3,))])
    items = [update(np.array(row, dtype=np.float32), layout, i) for i, row in enumerate(([-1, 1, 1], [1, -1, 1], [1, 1, -1]))]
    results = {aggregate.aggregate(list(order), layout, 1).tobytes() for order in itertools.permutations(items)}
    assert len(results) == 1


def test_dot_products_are_exact() -> None:
    items = [*updates(3, "gram"), update(buffer(RAGGED, "tiny", deviation=1e-9), RAGGED, 3)]
    vectors = [[Fraction(float(x)) for x in item.dense()] for item in items]
    for (i, left), (j, right) in itertools.product(enumerate(items), enumerate(items)):
        unit = Fraction(2) ** (left.exponent + right.exponent)
        assert aggregate.gram(items)[i][j] * unit == sum(x * y for x, y in zip(vectors[i], vectors[j], strict=True))


def test_clipping_bounds_the_largest_by_the_next_norm() -> None:
    products = [[0] * 4 for _ in range(4)]
    for i, square in enumerate((100, 40_000, 400, 900)):
        products[i][i] = square
    one = 1 << aggregate.FACTOR_BITS
    assert aggregate.clipping(products, [0] * 4, 1) == [one, one * 30 // 200, one, one]
    assert aggregate.clipping(products, [0] * 4, 0) == [one] * 4
    assert aggregate.clipping(products, [3, 0, 0, 0], 1) == [one, one * 80 // 200, one, one]


def test_clipping_to_silence_is_silence() -> None:
    silent = [update(np.zeros(RAGGED.size, dtype=np.float32), RAGGED, number) for number in range(3)]
    assert not aggregate.aggregate([*silent, *updates(4)[3:]], RAGGED, 1).any()


@pytest.mark.parametrize("factor", [1e-20, 1e-9, 1e9])
def test_scales_far_apart_neither_overflow_nor_stop_the_others(factor: float) -> None:
    honest = updates(3, "apart")
    loud = update(buffer(RAGGED, "apart liar") * np.float32(factor), RAGGED, 3)
    result = aggregate.aggregate([*honest, loud], RAGGED, 1)
    assert np.all(np.isfinite(result))
    assert np.linalg.norm(result) <= np.linalg.norm(dense(honest), axis=1).max()


small = st.integers(-100, 100)
toy_sets = st.integers(3, 6).flatmap(
    lambda n: st.lists(st.lists(small, min_size=TOY.size, max_size=TOY.size), min_size=n, max_size=n)
)


@given(rows=toy_sets, data=st.data())
def test_any_updates_aggregate_alike_in_any_order(rows: list[list[int]], data: st.DataObject) -> None:
    items = [update(np.array(row, dtype=np.float32), TOY, number) for number, row in enumerate(rows)]
    shuffled = data.draw(st.permutations(items))
    assert np.array_equal(aggregate.aggregate(items, TOY, 1), aggregate.aggregate(shuffled, TOY, 1))


# Attacks: three honest trainers and one liar -------------------------------------------------------------------------


def lies(honest: Matrix) -> dict[str, Matrix]:
    mean, spread = honest.mean(axis=0), honest.std(axis=0)
    return {
        "sign flip": -mean,
        "loud sign flip": -10 * mean,
        "times a million": 1e6 * honest[0],
        "noise": np.linalg.norm(mean) / RAGGED.size**0.5 * np.sign(buffer(RAGGED, "noise")),
        "a little is enough (ALIE)": mean - 1.5 * spread,
        "inner product (FOE)": -0.5 * mean,
        "copy": honest[1],
        "silence": 0 * mean,
        "everything in the shortest chunk": np.where(np.arange(RAGGED.size) // 3 == 8198 // 3, 1.0, 0.0),
    }


def honest_updates(common: float) -> list[codec.Update]:
    return updates(3, "honest", common=common)


def attacked(honest: list[codec.Update], lie: Matrix) -> Float32Array:
    return aggregate.aggregate([*honest, update(lie.astype(np.float32), RAGGED, 3)], RAGGED, 1)


def diameter(honest: Matrix) -> float:
    return max(float(np.linalg.norm(x - y)) for x, y in itertools.combinations(honest, 2))


def bound(honest: Matrix) -> float:
    """What one liar among four can move the aggregate by: (4/√3 + 1/3) of the honest diameter D.

    Clipping to a ball brings nobody farther apart and moves the honest mean by at most D/3, as the threshold is at least the
    second largest honest norm. An honest update is mixed with two that are no farther from it than the honest ones, so it moves
    by at most 2D/3; it was within 2D/3 of the honest mean. Trimming one value at each end leaves every coordinate between two
    honest mixed values, so the error is at most √3 · 4D/3 around the clipped mean.
    """
    return (4 / 3**0.5 + 1 / 3) * diameter(honest) * (1 + 1e-5)


@pytest.mark.parametrize("common", [0.0, 1.0, 5.0])
@pytest.mark.parametrize("name", lies(dense(honest_updates(0.0))))
def test_one_liar_of_four_moves_the_aggregate_no_farther_than_the_honest_are_apart(name: str, common: float) -> None:
    honest = honest_updates(common)
    moved = np.linalg.norm(attacked(honest, lies(dense(honest))[name]) - dense(honest).mean(axis=0))
    assert moved <= bound(dense(honest))
    assert moved <= diameter(dense(honest))  # no proof, but what these attacks reach


@given(rows=st.lists(st.lists(small, min_size=TOY.size, max_size=TOY.size), min_size=4, max_size=4), scale=st.floats(-1e6, 1e6))
def test_no_lie_exceeds_the_proven_bound(rows: list[list[int]], scale: float) -> None:
    liar = np.array(rows[3], dtype=np.float32) * np.float32(scale)
    honest = [update(np.array(row, dtype=np.float32), TOY, number) for number, row in enumerate(rows[:3])]
    result = aggregate.aggregate([*honest, update(liar, TOY, 3)], TOY, 1)
    slack = 1e-4 * np.linalg.norm(dense(honest), axis=1).max()
    assert np.linalg.norm(result - dense(honest).mean(axis=0)) <= bound(dense(honest)) + slack


@pytest.mark.parametrize("name", ["loud sign flip", "times a million"])
def test_a_plain_mean_does_not_survive_what_this_rule_survives(name: str) -> None:
    """The negative control: the same attacks are real."""
    honest = honest_updates(5.0)
    lie = update(lies(dense(honest))[name].astype(np.float32), RAGGED, 3)
    mean = aggregate.aggregate([*honest, lie], RAGGED, 0)
    assert np.linalg.norm(mean - dense(honest).mean(axis=0)) > bound(dense(honest))


def test_a_loud_liar_cannot_turn_the_step_around() -> None:
    honest = honest_updates(1.0)
    truth = dense(honest).mean(axis=0)
    for name, lie in lies(dense(honest)).items():
        assert float(attacked(honest, lie) @ truth) > 0, name
    loud = update((-10 * truth).astype(np.float32), RAGGED, 3)
    assert float(aggregate.aggregate([*honest, loud], RAGGED, 0) @ truth) < 0
