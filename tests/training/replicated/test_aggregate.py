from __future__ import annotations

import itertools
import tracemalloc
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import LocalProtocolError
from protocol.limits import TRAINERS_MAX
from tests.training.replicated.support import RAGGED, aggregate_updates, buffer, update
from training import random_stream
from training.job_spec import BITS, BITS_ROBUST_MAX, AggregationRule
from training.replicated import aggregate, codec
from training.replicated.aggregate import aggregation_plan, robust_rules
from training.replicated.tensor_layout import BLOCK, CHUNK, Float32Array, layout_from_shapes

ARC = AggregationRule.ARC_NNM_TRIM
TOY = layout_from_shapes([("a", (3,)), ("b", (9,)), ("c", (8,))])
Matrix = npt.NDArray[np.float64]


every_width = pytest.mark.parametrize("bits", [bits for bits in BITS if bits <= BITS_ROBUST_MAX])


def updates(count: int, *seed: object, common: float = 0.0, bits: int = 1) -> list[codec.QuantizedUpdate]:
    """Return updates with a common part, scaled by `common`, as honest trainers on the same text have."""
    shared = buffer(RAGGED, "common", *seed) * np.float32(common)
    return [update(buffer(RAGGED, i, *seed) + shared, RAGGED, i, bits) for i in range(count)]


def ordered(items: list[codec.QuantizedUpdate]) -> Matrix:
    """Return (updates, elements) in the order of the rules."""
    return dense(sorted(items, key=lambda item: item.origin))


def dense(items: list[codec.QuantizedUpdate]) -> Matrix:
    return np.array([item.dequantize() for item in items], dtype=np.float64)


# Levels of 16 bits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("deviation", [1e-20, 1e-9, 1e-2, 1e6])
def test_the_mean_of_updates_of_sixteen_bits_is_exact_but_for_one_rounding(count: int, deviation: float) -> None:
    """Their chunks differ a thousandfold, so that the smallest scales would vanish in sums of 32 bits."""
    size = RAGGED.chunk_lengths
    spread = np.repeat(np.geomspace(1e-3, 1, len(size)), size).astype(np.float32)
    items = [update(buffer(RAGGED, i, deviation=deviation) * spread, RAGGED, i, 16) for i in range(count)]
    mean = aggregate_updates(items, RAGGED, AggregationRule.MEAN, 0)
    wanted = [float(sum(column, Fraction()) / count) for column in zip(*exact(items), strict=True)]
    assert np.array_equal(mean, np.array(wanted).astype(np.float32))


def exact(items: list[codec.QuantizedUpdate]) -> list[list[Fraction]]:
    return [[Fraction(float(x)) for x in item.dequantize()] for item in items]


# The rules as their papers write them, in float64 ----------------------------------------------------------------------


def arc_nnm_trim(x: Matrix, f: int) -> Matrix:
    n = len(x)
    norms = np.linalg.norm(x, axis=1)
    bound = np.sort(norms)[::-1][int(2 * f / n * (n - f))]
    x = x * np.minimum(1, bound / norms)[:, None]
    nearest = np.argsort(np.linalg.norm(x[:, None] - x[None], axis=2), axis=1)[:, : n - f]
    return trimmed_mean(x[nearest].mean(axis=1), f)


def trimmed_mean(x: Matrix, f: int) -> Matrix:
    trimmed: Matrix = np.sort(x, axis=0)[f : len(x) - f].mean(axis=0)
    return trimmed


def krum(x: Matrix, f: int) -> Matrix:
    squares = np.linalg.norm(x[:, None] - x[None], axis=2) ** 2
    scores = np.sort(squares, axis=1)[:, 1 : 1 + max(1, len(x) - f - 2)].sum(axis=1)
    best: Matrix = x[np.argmin(scores)]
    return best


def centered_clipping(x: Matrix, f: int) -> Matrix:
    v = np.zeros(x.shape[1])
    for _ in range(robust_rules.CLIPPING_ITERATIONS):
        far = np.linalg.norm(x - v, axis=1)
        v = v + ((x - v) * np.minimum(1, np.sort(far)[(len(x) - 1) // 2] / far)[:, None]).mean(axis=0)
    return v


def geometric_median(x: Matrix, f: int) -> Matrix:
    v = x.mean(axis=0)
    for _ in range(robust_rules.WEISZFELD_ITERATIONS):
        weights = 1 / np.linalg.norm(x - v, axis=1)
        v = weights @ x / weights.sum()
    return v


REFERENCES = {
    AggregationRule.ARC_NNM_TRIM: arc_nnm_trim,
    AggregationRule.CENTERED_CLIPPING: centered_clipping,
    AggregationRule.MEAN: lambda x, f: x.mean(axis=0),
    AggregationRule.MEDIAN: lambda x, f: np.median(x, axis=0),
    AggregationRule.TRIMMED_MEAN: trimmed_mean,
    AggregationRule.KRUM: krum,
    AggregationRule.GEOMETRIC_MEDIAN: geometric_median,
}
SIZES = [(1, 1), (2, 1), (3, 1), (4, 1), (5, 2), (7, 2), (10, 3), (13, 4), (4, 0)]


def reference(rule: AggregationRule, x: Matrix, liars: int) -> Matrix:
    if len(x) <= 2:
        rule = AggregationRule.MEAN
    result: Matrix = REFERENCES[rule](x, min(liars, (len(x) - 1) // 2))
    return result


@pytest.mark.parametrize(("count", "liars"), SIZES)
@pytest.mark.parametrize("rule", AggregationRule)
def test_it_agrees_with_the_rule_in_floating_point(rule: AggregationRule, count: int, liars: int) -> None:
    items = updates(count, "reference", common=1.0)
    items[0] = update(buffer(RAGGED, "loud", deviation=0.1), RAGGED, 0)
    require_close(rule, items, liars)


@every_width
@pytest.mark.parametrize("rule", AggregationRule)
def test_it_does_so_whatever_payloads_say(rule: AggregationRule, bits: int) -> None:
    items = updates(6, "widths", common=1.0, bits=bits)
    items[0] = update(buffer(RAGGED, "loud", deviation=0.1), RAGGED, 0, bits)
    require_close(rule, items, 2)


def require_close(rule: AggregationRule, items: list[codec.QuantizedUpdate], liars: int) -> None:
    exact, rough = aggregate_updates(items, RAGGED, rule, liars), reference(rule, ordered(items), liars)
    assert np.abs(exact - rough).max() < 2e-5 * np.abs(rough).max()


@pytest.mark.parametrize("rule", AggregationRule)
def test_equal_updates_are_their_own_aggregate(rule: AggregationRule) -> None:
    m = buffer(RAGGED, "equal")
    items = [update(m, RAGGED, number) for number in range(5)]
    assert np.allclose(aggregate_updates(items, RAGGED, rule, 2), items[0].dequantize(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("rule", AggregationRule)
def test_silence_of_all_is_silence(rule: AggregationRule) -> None:
    items = [update(np.zeros(RAGGED.size, dtype=np.float32), RAGGED, number) for number in range(4)]
    assert not aggregate_updates(items, RAGGED, rule, 1).any()


@every_width
@pytest.mark.parametrize("rule", AggregationRule)
def test_no_rule_depends_on_the_order_whatever_payloads_say(rule: AggregationRule, bits: int) -> None:
    items = updates(5, "orders", bits=bits)
    results = {aggregate_updates(order, RAGGED, rule, 2).tobytes() for order in (items, items[::-1], items[2:] + items[:2])}
    assert len(results) == 1


def test_who_alone_says_something_of_a_coordinate_does_not_own_it() -> None:
    """A mean over the nonzero values would let one liar choose such a coordinate."""
    layout = layout_from_shapes([("tensor", (CHUNK,))])
    rows = np.zeros((4, CHUNK), dtype=np.float32)
    for number, row in enumerate(rows):
        row[8 * number : 8 * number + 4] = 1.0
    items = [update(row, layout, number, 8) for number, row in enumerate(rows)]
    assert aggregate_updates(items, layout, AggregationRule.MEAN, 1)[:32].max() == pytest.approx(0.25, rel=0.05)
    for rule in (AggregationRule.MEDIAN, AggregationRule.TRIMMED_MEAN):
        assert not aggregate_updates(items, layout, rule, 1).any()


@pytest.mark.parametrize("count", range(3, 14))
def test_the_middle_ranks_are_those_that_sorting_finds(count: int) -> None:
    """By the zero-one principle (Knuth 5.3.4): a network is right if it is right for all rows of zeros and ones."""
    bits = np.arange(1 << count) >> np.arange(count)[:, None] & 1
    for f in range(1, (count - 1) // 2 + 1):
        kept = aggregation_plan.select_middle([row.astype(np.int32) for row in bits], f)
        assert np.array_equal(sum(kept), np.sort(bits, axis=0)[f : count - f].sum(axis=0))


@pytest.mark.parametrize(("count", "f"), [(40, 13), (200, 66), (200, 99)])
def test_they_are_so_for_many_rows(count: int, f: int) -> None:
    rows = np.frombuffer(random_stream.random_bytes(count * 500, "ranks"), dtype=np.int8).reshape(count, 500).astype(np.int32)
    kept = aggregation_plan.select_middle([row.copy() for row in rows], f)
    assert np.array_equal(sum(kept), np.sort(rows, axis=0)[f : count - f].sum(axis=0))


@pytest.mark.parametrize("rule", AggregationRule)
@pytest.mark.parametrize("liars", [1, 66, 99])
def test_the_most_trainers_that_a_round_may_have_overflow_nothing(rule: AggregationRule, liars: int) -> None:
    layout = layout_from_shapes([("tensor", (3,))])
    items = [update(np.full(3, 3.0, dtype=np.float32), layout, number, 8) for number in range(TRAINERS_MAX)]
    # 15 bits of a scale
    assert aggregate_updates(items, layout, rule, liars) == pytest.approx(items[0].dequantize(), rel=2e-5)


def test_two_or_fewer_are_averaged() -> None:
    for count in (1, 2):
        items = updates(count, "few")
        assert np.array_equal(aggregate_updates(items, RAGGED, ARC, 1), dense(items).mean(axis=0).astype(np.float32))


@pytest.mark.parametrize(
    ("count", "liars", "tolerated"), [(1, 9, 0), (2, 9, 0), (3, 9, 1), (4, 9, 1), (5, 1, 1), (7, 2, 2), (9, 0, 0)]
)
def test_never_half_of_the_accepted_are_taken_for_liars(count: int, liars: int, tolerated: int) -> None:
    assert aggregate.tolerated_faults(count, liars) == tolerated


def test_nothing_and_two_updates_of_one_trainer_are_our_own_mistake() -> None:
    for items in ([], [*updates(2), *updates(1)]):
        with pytest.raises(LocalProtocolError):
            aggregate.plan_aggregation(items, ARC, 1)


def test_the_order_of_the_updates_does_not_matter() -> None:
    items = updates(4, "order")
    results = {aggregate_updates(list(order), RAGGED, ARC, 1).tobytes() for order in itertools.permutations(items)}
    assert len(results) == 1


def test_copies_do_not_make_the_result_depend_on_the_order() -> None:
    m = buffer(RAGGED, "copied")
    items = [update(m, RAGGED, number) for number in range(3)] + [update(-m, RAGGED, 3)]
    results = {aggregate_updates(list(order), RAGGED, ARC, 1).tobytes() for order in itertools.permutations(items)}
    assert len(results) == 1


def test_equal_distances_do_not_make_the_result_depend_on_the_order() -> None:
    layout = layout_from_shapes([("tensor", (3,))])
    items = [update(np.array(row, dtype=np.float32), layout, i) for i, row in enumerate(([-1, 1, 1], [1, -1, 1], [1, 1, -1]))]
    results = {aggregate_updates(list(order), layout, ARC, 1).tobytes() for order in itertools.permutations(items)}
    assert len(results) == 1


@every_width
def test_dot_products_are_exact(bits: int) -> None:
    items = [*updates(3, "gram", bits=bits), update(buffer(RAGGED, "tiny", deviation=1e-9), RAGGED, 3, bits)]
    units = [[int(x) for x in np.ldexp(item.dequantize().astype(np.float64), -item.exponent)] for item in items]
    products = aggregate.gram_matrix(items)
    for (i, left), (j, right) in itertools.product(enumerate(units), enumerate(units)):
        assert products[i][j] == sum(x * y for x, y in zip(left, right, strict=True))


def test_dot_products_of_the_largest_levels_and_scales_are_exact() -> None:
    layout = layout_from_shapes([("tensor", (16 * CHUNK + 5,))])
    item = update(np.full(layout.size, 1.99, dtype=np.float32), layout, 0, 8)
    assert abs(int(item.levels_of(layout.blocks[0])[0])) == codec.LEVEL_MAX
    element = codec.LEVEL_MAX * int(item.scales[0])
    assert aggregate.gram_matrix([item, item]) == [[layout.size * element**2] * 2] * 2


def test_clipping_bounds_the_largest_by_the_next_norm() -> None:
    one = robust_rules.ONE
    assert robust_rules.arc_factors([100, 40_000, 400, 900], 1) == [one, one * 30 // 200, one, one]
    assert robust_rules.arc_factors([100, 40_000, 400, 900], 0) == [one] * 4
    assert robust_rules.align_exponents([[100, 7], [7, 40_000]], [3, 0]) == [[6_400, 56], [56, 40_000]]


def test_clipping_to_silence_is_silence() -> None:
    silent = [update(np.zeros(RAGGED.size, dtype=np.float32), RAGGED, number) for number in range(3)]
    assert not aggregate_updates([*silent, *updates(4)[3:]], RAGGED, ARC, 1).any()


@pytest.mark.parametrize("factor", [1e-20, 1e-9, 1e9])
def test_scales_far_apart_neither_overflow_nor_stop_the_others(factor: float) -> None:
    honest = updates(3, "apart")
    loud = update(buffer(RAGGED, "apart liar") * np.float32(factor), RAGGED, 3)
    result = aggregate_updates([*honest, loud], RAGGED, ARC, 1)
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
    assert np.array_equal(aggregate_updates(items, TOY, ARC, 1), aggregate_updates(shuffled, TOY, ARC, 1))


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


def honest_updates(common: float) -> list[codec.QuantizedUpdate]:
    return updates(3, "honest", common=common)


def attacked(honest: list[codec.QuantizedUpdate], lie: Matrix) -> Float32Array:
    return aggregate_updates([*honest, update(lie.astype(np.float32), RAGGED, 3)], RAGGED, ARC, 1)


def diameter(honest: Matrix) -> float:
    return max(float(np.linalg.norm(x - y)) for x, y in itertools.combinations(honest, 2))


def bound(honest: Matrix) -> float:
    """Bound the distance by which one liar among four can move the aggregate: (4/√3 + 1/3) of the honest diameter D.

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
    assert moved <= diameter(dense(honest))  # no proof; the reach of these attacks


@given(rows=st.lists(st.lists(small, min_size=TOY.size, max_size=TOY.size), min_size=4, max_size=4), scale=st.floats(-1e6, 1e6))
def test_no_lie_exceeds_the_proven_bound(rows: list[list[int]], scale: float) -> None:
    liar = np.array(rows[3], dtype=np.float32) * np.float32(scale)
    honest = [update(np.array(row, dtype=np.float32), TOY, number) for number, row in enumerate(rows[:3])]
    result = aggregate_updates([*honest, update(liar, TOY, 3)], TOY, ARC, 1)
    slack = 1e-4 * np.linalg.norm(dense(honest), axis=1).max()
    assert np.linalg.norm(result - dense(honest).mean(axis=0)) <= bound(dense(honest)) + slack


@pytest.mark.parametrize("name", ["loud sign flip", "times a million"])
def test_a_plain_mean_does_not_survive_what_this_rule_survives(name: str) -> None:
    """The negative control: the same attacks are real."""
    honest = honest_updates(5.0)
    lie = update(lies(dense(honest))[name].astype(np.float32), RAGGED, 3)
    mean = aggregate_updates([*honest, lie], RAGGED, ARC, 0)
    assert np.linalg.norm(mean - dense(honest).mean(axis=0)) > bound(dense(honest))


def test_a_loud_liar_cannot_turn_the_step_around() -> None:
    honest = honest_updates(1.0)
    truth = dense(honest).mean(axis=0)
    for name, lie in lies(dense(honest)).items():
        assert float(attacked(honest, lie) @ truth) > 0, name
    loud = update((-10 * truth).astype(np.float32), RAGGED, 3)
    assert float(aggregate_updates([*honest, loud], RAGGED, ARC, 0) @ truth) < 0


def test_an_update_more_takes_a_few_bytes_for_each_element_of_a_block() -> None:
    layout = layout_from_shapes([("long", (2 * BLOCK,))])

    def peak(count: int) -> int:
        updates = [update(buffer(layout, "memory", number), layout, number) for number in range(count)]
        tracemalloc.start()
        try:
            aggregate_updates(updates, layout, AggregationRule.ARC_NNM_TRIM, count // 3)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(4)  # allocates all that is made once
    least, most = peak(16), peak(48)
    assert (most - least) / 32 < 5 * BLOCK
