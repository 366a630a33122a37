"""The running estimate of a label and the whole estimate, with integer logarithms and powers beside those of floats."""

from __future__ import annotations

import math
import time
from fractions import Fraction
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from curation.estimation.dawid_skene import PRIOR_RIGHT, DawidSkene
from curation.estimation.dawid_skene import likeliest_classes as likeliest_of
from curation.estimation.fixed_point import LOG_ONE, ONE, Ints, log2, negative_power_of_two, normalize_scores
from curation.estimation.online_dawid_skene import (
    LABEL_CONFIDENCE_MIN,
    PRIOR_WRONG,
    class_weights,
    estimate_label,
    likeliest_class,
    updated_counts,
    vote_likelihood,
)
from curation.tasks.answers import Answer, QuestionKind
from tests.curation.whole_estimates import run_dawid_skene

# The running estimate -------------------------------------------------------------------------------------------------


def test_two_strangers_who_agree_are_enough_and_one_is_not() -> None:
    assert likeliest_class(2, [((), 1)]) == (1, Fraction(3, 4))
    assert likeliest_class(2, [((), 1), ((), 1)]) == (1, LABEL_CONFIDENCE_MIN)
    assert likeliest_class(2, [((), 1), ((), 0)]) == (0, Fraction(1, 2)), "the lowest of equally likely ones"


@given(st.integers(2, 6), st.data())
def test_the_posterior_is_the_product_of_likelihoods(classes: int, data: st.DataObject) -> None:
    votes = data.draw(
        st.lists(
            st.tuples(st.one_of(st.just(()), st.tuples(*[st.integers(0, 40)] * classes**2)), st.integers(0, classes - 1)),
            min_size=1,
            max_size=7,
        )
    )
    weights = [
        prod(Fraction(*vote_likelihood(counts, classes, label, vote)) for counts, vote in votes) for label in range(classes)
    ]
    found = class_weights(classes, votes)
    assert [Fraction(weight, sum(found)) for weight in found] == [weight / sum(weights) for weight in weights]


@given(st.integers(2, 6), st.integers(0, 5))
def test_an_annotator_says_something(classes: int, label: int) -> None:
    counts = tuple(range(classes**2))
    label %= classes
    assert sum(Fraction(*vote_likelihood(counts, classes, label, vote)) for vote in range(classes)) == 1


def test_who_was_wrong_often_is_believed_the_contrary() -> None:
    counts: tuple[int, ...] = ()
    for _ in range(20):
        counts = updated_counts(QuestionKind.LABEL, 2, False, counts, (0,), (1,))
        counts = updated_counts(QuestionKind.LABEL, 2, False, counts, (1,), (0,))
    assert counts == (0, 20, 20, 0)
    label, chance = estimate_label(QuestionKind.LABEL, 2, False, [(counts, (0,)), (counts, (0,))])
    assert label == (1,) and chance > LABEL_CONFIDENCE_MIN


def test_a_rating_has_the_class_below_it() -> None:
    assert updated_counts(QuestionKind.RATING, 3, False, (), (3,), (2,)) == (0, 0, 0, 0, 0, 0, 0, 1, 0)
    assert estimate_label(QuestionKind.RATING, 3, False, [((), (3,)), ((), (3,))])[0] == (3,)


def test_each_of_many_options_is_a_question_of_its_own() -> None:
    votes: list[tuple[tuple[int, ...], Answer]] = [((), (0, 2)), ((), (0,))]
    label, chance = estimate_label(QuestionKind.LABEL, 3, True, votes)
    assert (label, chance) == ((0,), Fraction(1, 2)), "of the third option nobody is sure"
    assert estimate_label(QuestionKind.LABEL, 3, True, [*votes, ((), (0,)), ((), (0,))]) == ((0,), LABEL_CONFIDENCE_MIN)
    assert updated_counts(QuestionKind.LABEL, 3, True, (), (0,), (0, 2)) == (0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 0, 0)


def test_a_ranking_is_that_of_ranked_pairs() -> None:
    assert estimate_label(QuestionKind.RANKING, 0, False, [((), (2, 0, 1)), ((), (2, 0, 1))]) == ((2, 0, 1), LABEL_CONFIDENCE_MIN)
    assert updated_counts(QuestionKind.RANKING, 0, False, (), (0, 1, 2), (0, 1, 2)) == ()


def test_an_answer_costs_little() -> None:
    """The most expensive label has seven votes on sixteen options. A batch has 0.4 ms for all work of an answer.
    The test allows ten times as much, for a busy machine.
    """
    counts = tuple(range(256))
    votes = [(counts, (vote,)) for vote in range(7)]
    times = []
    for _ in range(20):
        began = time.thread_time()
        estimate_label(QuestionKind.LABEL, 16, False, votes)
        times.append(time.thread_time() - began)
    assert min(times) < 0.004


# The whole estimate ---------------------------------------------------------------------------------------------------


def crowd(classes: int, tasks: int, right: list[float], votes: int, seed: int = 0) -> tuple[Ints, Ints]:
    """Return votes and truth of a simulated crowd."""
    draw = np.random.default_rng(seed)
    truth = draw.integers(0, classes, tasks)
    rows = []
    for task in range(tasks):
        for annotator in draw.choice(len(right), votes, replace=False):
            wrong = (truth[task] + draw.integers(1, classes)) % classes
            rows.append((task, annotator, truth[task] if draw.random() < right[annotator] else wrong))
    return np.array(rows, dtype=np.int64), truth


@pytest.mark.parametrize("classes", [2, 3, 16])
def test_the_whole_estimate_finds_who_is_right(classes: int) -> None:
    votes, truth = crowd(classes, 400, [0.9] * 8 + [1 / classes] * 8, 5)
    found = run_dawid_skene(classes, 400, 16, votes)
    majority = np.zeros((400, classes), dtype=np.int64)
    np.add.at(majority, (votes[:, 0], votes[:, 2]), 1)
    by_votes = (likeliest_of(majority) == truth).mean()
    assert (likeliest_of(found.posterior()) == truth).mean() >= max(0.8, by_votes)


@settings(max_examples=30)
@given(st.integers(2, 4), st.randoms(use_true_random=False))
def test_the_same_bits_whatever_the_order(classes: int, draw: object) -> None:
    votes, _ = crowd(classes, 30, [0.8, 0.5, 0.9, 0.6, 0.7], 3, seed=draw.randrange(1 << 30))  # type: ignore[attr-defined]
    order = draw.sample(range(len(votes)), len(votes))  # type: ignore[attr-defined]
    seats = np.array(draw.sample(range(5), 5))  # type: ignore[attr-defined]
    other = votes[order]
    renamed = np.column_stack([other[:, 0], seats[other[:, 1]], other[:, 2]])
    first = run_dawid_skene(classes, 30, 5, votes).posterior()
    assert (run_dawid_skene(classes, 30, 5, other).posterior() == first).all()
    assert (run_dawid_skene(classes, 30, 5, renamed).posterior() == first).all()


def test_the_integers_are_near_what_floats_find() -> None:
    """The reference is the same algorithm in double precision, written separately from the paper."""
    classes, tasks, people = 3, 120, 9
    votes, _ = crowd(classes, tasks, [0.9, 0.8, 0.8, 0.7, 0.7, 0.6, 0.6, 0.4, 0.3], 5)
    whole = DawidSkene(classes, tasks, people, votes)
    label = np.zeros((tasks, classes))
    np.add.at(label, (votes[:, 0], votes[:, 2]), 1 / 5)
    counts = np.zeros((people, classes, classes))
    prior = np.where(np.eye(classes, dtype=bool), PRIOR_RIGHT, PRIOR_WRONG / (classes - 1))
    for turn in range(8):
        counts[:] = 0
        for task, annotator, vote in votes:
            counts[annotator, :, vote] += label[task]
        table = np.log2(counts + prior) - np.log2((counts + prior).sum(axis=2, keepdims=True))
        scores = np.tile(np.log2(label.sum(axis=0) + 1) / 2, (tasks, 1))
        for task, annotator, vote in votes:
            scores[task] += table[annotator, :, vote]
        label = np.exp2(scores - scores.max(axis=1, keepdims=True))
        label /= label.sum(axis=1, keepdims=True)
        assert abs(whole.posterior() / ONE - label).max() < 1e-4, turn
        whole.run_iteration()


def test_without_ones_vote_it_is_as_if_it_had_not_been_cast() -> None:
    """The two tasks mirror each other, so both classes are equally frequent and each table has equal rows."""
    votes = np.array([(0, 0, 1), (0, 1, 0), (0, 2, 0), (1, 0, 0), (1, 1, 1), (1, 2, 1)], dtype=np.int64)
    agree, contradict = 26 / 33, 25 / 33  # (8 + 2/3) / (8 + 2 + 1), (8 + 1/3) / (8 + 2 + 1)
    two = agree**2 / (agree**2 + (1 - agree) ** 2)
    one = (1 - contradict) * agree / ((1 - contradict) * agree + contradict * (1 - agree))
    expected = np.array([[two, 1 - two], [one, 1 - one], [one, 1 - one]])
    found = DawidSkene(2, 2, 3, votes).leave_one_out_posterior() / ONE
    assert abs(found - np.concatenate([expected, expected[:, ::-1]])).max() < 1e-5


def liars(count: int, gold: int, knows: bool, classes: int = 2) -> tuple[Ints, Ints, Ints]:
    """Return votes, truth and gold rows. `count` of 40 annotators give the next class; on gold the right one, if `knows`."""
    votes, truth = crowd(classes, 500, [0.875] * 40, 5, seed=1)
    lie = votes[:, 1] < count
    if knows:
        votes[lie & (votes[:, 0] < gold), 2] = truth[votes[lie & (votes[:, 0] < gold), 0]]
        lie &= votes[:, 0] >= gold
    votes[lie, 2] = (truth[votes[lie, 0]] + 1) % classes
    return votes, truth, np.column_stack([np.arange(gold), truth[:gold]])


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("gold", [0, 25, 50, 100])
@pytest.mark.parametrize("count", [12, 16, 18])
def test_whoever_is_right_on_gold_alone_gains_nothing(count: int, gold: int, classes: int) -> None:
    """Consistent liars outvote 22 honest annotators of 40, but more people agree with the right labels than with others."""
    votes, truth, known = liars(count, gold, True, classes)
    assert (likeliest_of(run_dawid_skene(classes, 500, 40, votes, known).posterior()) == truth)[gold:].mean() > 0.93


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("gold", [25, 50, 100])
def test_a_majority_that_is_wrong_on_gold_makes_no_labels(gold: int, classes: int) -> None:
    votes, truth, known = liars(24, gold, False, classes)
    assert (likeliest_of(run_dawid_skene(classes, 500, 40, votes, known).posterior()) == truth)[gold:].mean() > 0.93


def test_an_annotator_or_a_task_may_be_without_votes() -> None:
    whole = run_dawid_skene(2, 3, 4, np.array([(1, 2, 1)], dtype=np.int64))
    assert whole.posterior()[1][1] > ONE // 2 and whole.posterior().shape == (3, 2)
    assert run_dawid_skene(2, 1, 1, np.zeros((0, 3), dtype=np.int64)).posterior().tolist() == [[ONE // 2, ONE // 2]]


WITHIN = 2**-20
BITS = ([26591258, 334396230, 1023410176], [1073741780, 852229465, 33554325])


@given(st.lists(st.integers(1, 2**62 - 1), min_size=1, max_size=20))
def test_logarithms(numbers: list[int]) -> None:
    found = log2(np.array(numbers, dtype=np.int64))
    assert all(abs(value / LOG_ONE - math.log2(number)) < WITHIN for value, number in zip(found, numbers, strict=True))


def test_powers_of_two_have_whole_logarithms() -> None:
    assert (log2(1 << np.arange(62, dtype=np.int64)) == LOG_ONE * np.arange(62)).all()


@given(st.lists(st.integers(0, 80 * LOG_ONE), min_size=1, max_size=20))
def test_powers(falls: list[int]) -> None:
    found = negative_power_of_two(np.array(falls, dtype=np.int64))
    assert all(abs(value / 2**30 - 2 ** (-fall / LOG_ONE)) < WITHIN for value, fall in zip(found, falls, strict=True))


def test_logarithms_ascend_and_powers_descend() -> None:
    assert (np.diff(log2(np.arange(1, 200_000, dtype=np.int64))) >= 0).all()
    assert (np.diff(negative_power_of_two(np.arange(0, 40 * LOG_ONE, 997, dtype=np.int64))) <= 0).all()


def test_chances_are_those_of_the_weights() -> None:
    found = normalize_scores(log2(np.array([[1, 3, 12], [5, 5, 5]], dtype=np.int64)))
    assert abs(found[0] - np.array([ONE // 16, 3 * ONE // 16, 12 * ONE // 16])).max() <= 4
    assert found[1].tolist() == [ONE // 3] * 3


def test_the_bits_are_these() -> None:
    """The result is the same on every machine and numpy version, since another number would be another state root."""
    assert log2(np.array([3, 10**6, 2**61 + 12345], dtype=np.int64)).tolist() == BITS[0]
    assert negative_power_of_two(np.array([1, LOG_ONE // 3, 5 * LOG_ONE + 77], dtype=np.int64)).tolist() == BITS[1]
