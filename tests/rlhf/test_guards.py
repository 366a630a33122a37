"""What is watched while a policy moves: exact figures, and one warning."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ledger.jobs import JobsState
from ledger.network_governance import NetworkState
from peer import features
from rlhf.ledger.event_lines import policy_event_lines
from rlhf.ledger.rlhf_module import RlhfState
from rlhf.objectives.policy_monitors import (
    ROUNDS_KEPT,
    PolicyHistory,
    RoundMedians,
    metrics_view,
    round_medians,
)
from rlhf.objectives.ppo import RolloutDeclaration
from rlhf.objectives.response_statistics import distinct_2, length_score_correlation
from rlhf.rpc import PolicyMetricsView
from tests.rlhf.test_ppo import SPEC

RESPONSES = 10


def test_distinct_2_counts_pairs_within_responses() -> None:
    responses = [np.array(response) for response in ([1, 2, 1, 2], [2, 1], [5])]
    assert distinct_2(responses, 256) == 500_000, "12 21 12, 21"
    assert distinct_2([np.array([7])], 256) == 1_000_000
    assert distinct_2([np.array([1, 12]), np.array([11, 2])], 100) == 1_000_000, "two pairs, though their digits are the same"


@pytest.mark.parametrize(
    "lengths, scores, found",
    [
        ([1, 2, 3], [10, 20, 30], 0.9999992),  # the variance that is added to the scores'
        ([1, 2, 3], [30, 20, 10], -0.9999992),
        ([1, 2, 3], [1, 0, 1], 0.0),
        ([2, 2, 2], [1, 0, 1], 0.0),
        ([1, 2, 3], [0.001, 0.002, 0.003], 0.081),
        ([1, 2, 3], [1, float("nan"), 1], 1.0),
    ],
)
def test_correlation_is_pearson_s_where_scores_differ(lengths: list[float], scores: list[float], found: float) -> None:
    assert length_score_correlation(np.array(lengths), np.array(scores)) == pytest.approx(1e6 * found, abs=600)


def test_scores_that_processors_round_differently_give_nearly_the_same_correlation() -> None:
    """The worst case: hardly any scores, and differences that go with the length."""
    lengths = np.arange(64.0)
    unit = (lengths - lengths.mean()) / lengths.std()
    moved = abs(length_score_correlation(lengths, 1e-4 * unit) - length_score_correlation(lengths, 0 * unit))
    assert 9_900 < moved <= 10_000


def of_round(number: int, score: float, distinct: float) -> RoundMedians:
    return RoundMedians(number, 3, 50, 0, 0, round(1e6 * score * RESPONSES), round(1e6 * distinct), 0)


def course(*rounds: tuple[float, float], follow: Callable[..., PolicyHistory] = PolicyHistory.with_round) -> PolicyHistory:
    """Of rounds with these scores of a response, and these distinct-2."""
    made = PolicyHistory((of_round(0, *rounds[0]),))
    for number, found in enumerate(rounds[1:], 1):
        made = follow(made, of_round(number, *found), RESPONSES)
    return made


STEADY = (0.5, 0.5)
TABLE: list[tuple[tuple[tuple[float, float], ...], int | None]] = [  # rounds; the one that is warned of
    (((0.5, 0.5), (0.55, 0.4)), 1),
    (((0.5, 0.5), (0.5499, 0.4)), None),
    (((0.5, 0.5), (0.55, 0.4001)), None),
    (((0.5, 0.5), (0.4, 0.1)), None),
    (((0.5, 0.5), (0.9, 0.1), (0.95, 0.05)), 1),
    (((0.5, 0.5), *[STEADY] * 20, (0.7, 0.45), (0.8, 0.4)), 22),  # slowly, and beside the first round alone
    (((0.9, 0.5), *[(0.5, 0.5)] * 3, (0.6, 0.3)), 4),  # beside a later round alone
]


def lies(follow: Callable[..., PolicyHistory]) -> list[int]:
    return [number for number, (rounds, warned) in enumerate(TABLE) if course(*rounds, follow=follow).warned != warned]


def test_a_warning_comes_once_where_the_score_rises_while_responses_become_alike() -> None:
    assert lies(PolicyHistory.with_round) == []


def of_the_last_round(before: PolicyHistory, found: RoundMedians, responses: int) -> PolicyHistory:
    return PolicyHistory.with_round(PolicyHistory(before.rounds[-1:], before.warned), found, responses)


def of_the_first_round(before: PolicyHistory, found: RoundMedians, responses: int) -> PolicyHistory:
    return PolicyHistory.with_round(PolicyHistory(before.rounds[:1], before.warned), found, responses)


def again_and_again(before: PolicyHistory, found: RoundMedians, responses: int) -> PolicyHistory:
    return PolicyHistory.with_round(PolicyHistory(before.rounds), found, responses)


@pytest.mark.parametrize("planted", [of_the_last_round, of_the_first_round, again_and_again])
def test_the_table_finds_out_other_rules(planted: Callable[..., PolicyHistory]) -> None:
    assert lies(planted)


def test_a_job_keeps_its_first_round_and_the_last_ones() -> None:
    assert [found.round for found in course(*[STEADY] * 30).rounds] == [0, *range(30 - ROUNDS_KEPT + 1, 30)]


def test_a_round_is_told_in_one_line() -> None:
    assert PolicyMetricsView("ab", 3, 3, 0.5, 1.25, 20.5, 0.1, 0.4, -0.3).summary_line == (
        "score 0.500, 1.25 nats from the reference, 20.5 tokens (-0.30 with the score), 10% unfinished, distinct-2 0.400"
    )


def test_blocked_responses_are_told_where_there_are_any() -> None:
    features.register_features()
    found = round_medians(0, [RolloutDeclaration(bytes(32), 50, 0, 0, 0, 0, 0, blocked) for blocked in (4, 0, 8)])
    assert found.blocked == 4
    assert metrics_view(b"job", SPEC.encode(), found).summary_line.endswith("distinct-2 0.000, 25% blocked")


def test_each_round_is_news_and_a_warning_is_so_once() -> None:
    features.register_features()
    job = SimpleNamespace(spec=SPEC.encode(), name="ppo")

    def state(known: PolicyHistory | None, version: int = 1) -> Any:
        parts = {
            JobsState: SimpleNamespace(jobs={b"job": job}),
            RlhfState: RlhfState({b"job": known} if known else {}),
            NetworkState: SimpleNamespace(module_version=lambda module: version),
        }
        return SimpleNamespace(module_state=parts.__getitem__)

    narrow = [(0.5, 0.5), (0.9, 0.1), (0.95, 0.05)]
    known = [None, *(course(*narrow[: number + 1]) for number in range(len(narrow)))]
    kinds = [[item.kind for item in policy_event_lines(state(before), state(after))] for before, after in pairwise(known)]
    assert kinds == [["figures"], ["figures", "warning"], ["figures"]]
    assert not list(policy_event_lines(state(known[2]), state(known[2]))) and not list(
        policy_event_lines(state(None, 0), state(known[2]))
    )
