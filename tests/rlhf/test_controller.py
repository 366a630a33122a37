"""Figures of rounds: their records in the state, β derived from them with equal bits everywhere, and warnings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ledger.core.module import BlockContext
from ledger.jobs import ClosedRound, JobsState
from ledger.network_governance import NetworkState
from protocol import codec
from protocol.identity import Ed25519Verifier, Signed
from protocol.messages import Proposal
from protocol.verdicts import Verdict
from rlhf.ledger.rlhf_module import RlhfModule, RlhfState, policy_event_lines
from rlhf.objectives.policy_monitors import (
    ROUNDS_KEPT,
    PolicyHistory,
    RoundMedians,
    metrics_view,
    round_medians,
)
from rlhf.objectives.ppo import (
    BETA_MAX,
    BETA_MIN,
    BILLIONTHS,
    KlControllerState,
    RolloutDeclaration,
    current_beta,
    exceeds_kl_stop,
    first_beta,
    nats_per_response,
    next_beta,
)
from rlhf.objectives.rollouts import distinct_2, length_score_correlation
from rlhf.pytorch import ppo
from rlhf.rpc import PolicyMetricsView
from tests.rlhf.test_ppo import JOB, OWN, SPEC, World
from tests.training.replicated.support import buffer, round_of
from training.job_spec import AuditMode, JobSpec
from training.replicated.model_directory import PARAMETERS
from training.replicated.replicated_model import ReplicatedModel

Rule = Callable[[int, Fraction, float], int]
TENTH = BILLIONTHS // 10
TABLE = [  # β before, nats of the round, target, β after; in billionths
    (TENTH, Fraction(6), 6.0, TENTH),
    (TENTH, Fraction(33, 5), 6.0, 102_500_000),
    (TENTH, Fraction(27, 5), 6.0, 97_500_000),
    (TENTH, Fraction(600), 6.0, TENTH * 12 // 10),
    (TENTH, Fraction(0), 6.0, TENTH * 8 // 10),
    (TENTH, Fraction(-5), 6.0, TENTH * 8 // 10),
    (333_333_334, Fraction(19, 3), 6.0, 337_962_963),  # 337,962,963.6
    (BETA_MIN, Fraction(0), 6.0, BETA_MIN),
    (BETA_MIN, Fraction(61, 10), 6.0, BETA_MIN + 4),
    (BETA_MAX, Fraction(600), 6.0, BETA_MAX),
]


def lies(rule: Rule) -> list[int]:
    return [number for number, (beta, found, target, after) in enumerate(TABLE) if rule(beta, found, target) != after]


def test_beta_follows_the_table() -> None:
    assert lies(next_beta) == []


def unbounded(beta: int, found: Fraction, target: float) -> int:
    return max(BETA_MIN, min(BETA_MAX, int(beta * (3 + found / Fraction(target)) / 4)))


def upside_down(beta: int, found: Fraction, target: float) -> int:
    return next_beta(beta, 2 * Fraction(target) - found, target)


def rounded_to_the_nearest(beta: int, found: Fraction, target: float) -> int:
    error = max(-Fraction(1, 5), min(Fraction(1, 5), (found / Fraction(target) - 1) / 4))
    return max(BETA_MIN, min(BETA_MAX, round(beta * (1 + error))))


def without_a_least(beta: int, found: Fraction, target: float) -> int:
    return beta * 4 // 5 if found <= 0 else next_beta(beta, found, target)


@pytest.mark.parametrize("planted", [unbounded, upside_down, rounded_to_the_nearest, without_a_least])
def test_the_table_finds_out_other_rules(planted: Rule) -> None:
    assert lies(planted)


def test_a_job_stops_at_its_bound_and_not_below() -> None:
    assert nats_per_response(12_000_000, 4) == 3
    assert (
        exceeds_kl_stop(nats_per_response(12_000_000, 4), 3.0)
        and not exceeds_kl_stop(nats_per_response(11_999_999, 4), 3.0)
        and not exceeds_kl_stop(Fraction(10**9), None)
    )


def test_the_first_beta_is_that_of_the_job() -> None:
    assert first_beta(0.1) == TENTH and first_beta(1e-12) == BETA_MIN and first_beta(1e3) == BETA_MAX
    assert current_beta(b"", 0.1) == 0.1 and current_beta(codec.encode(KlControllerState(TENTH)), 0.7) == 0.1


@pytest.mark.parametrize(
    "terms, problem",
    [
        ({"kl_target": 0.0}, "kl_target must be in 0.001..1000, not 0.0"),
        ({"kl_stop": float("nan")}, "kl_stop must be in"),
        ({"kl_target": 6.0, "beta": 0.0}, "beta 0 cannot be adapted"),
    ],
)
def test_what_cannot_be_steered_is_no_job(terms: dict[str, float], problem: str) -> None:
    assert problem in (replace(OWN, **terms).settings_problem() or "")


# In models and replays ----------------------------------------------------------------------------------------------------

STEERED = replace(SPEC, audit=AuditMode.FULL, objective_settings=codec.encode(replace(OWN, kl_target=2.0, beta=0.5)))


def after_round(model: ReplicatedModel, *sums: int) -> ReplicatedModel:
    """Return the next round's model after accepted proposals that declare these k1."""
    made = []
    for item, k1 in zip(round_of(model, len(sums)), sums, strict=True):
        made.append(
            replace(
                item, proposal=replace(item.proposal, declaration=codec.encode(RolloutDeclaration(bytes(32), 50, 0, k1, 0, 0, 0)))
            )
        )
    return model.apply_round(made, {})


def test_the_model_of_a_round_has_the_beta_of_that_round() -> None:
    """16 responses: a median of 35.2 nats in all is 1.1 times the target."""
    first = after_round(ReplicatedModel.initial(JOB, STEERED), 35_200_000, 900_000_000, -5)
    assert current_beta(first.state.steering, 0.5) == 0.5125
    assert after_round(first).state.steering == first.state.steering, "a round that accepts nothing says nothing"
    assert current_beta(after_round(first, 33_600_000).state.steering, 0.5) == 0.51890625
    assert first.root != replace_steering(first, b"").root, "whoever computes another beta has another root"
    assert (
        after_round(
            ReplicatedModel.initial(JOB, replace(STEERED, objective_settings=SPEC.objective_settings)), 64_000_000
        ).state.steering
        == b""
    )


def replace_steering(model: ReplicatedModel, steering: bytes) -> ReplicatedModel:
    return ReplicatedModel.from_vectors(replace(model.state, steering=steering), model.vectors)


def test_an_update_and_its_replay_go_by_the_beta_of_the_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """β changes the rewards only after the policy has moved away from its reference."""
    world = World(tmp_path, STEERED.validated())
    moved = world.model.parameters + buffer(world.model.layout, "moved")
    world.model = ReplicatedModel.from_vectors(
        replace(world.model.state, steering=codec.encode(KlControllerState(TENTH))), {**world.model.vectors, PARAMETERS: moved}
    )
    world.model.save(tmp_path / "model")
    honest = world.propose()
    assert world.audited(honest).verdict is Verdict.ACCEPT
    with monkeypatch.context() as lying:
        lying.setattr(ppo, "current_beta", lambda steering, said: said)
        other = world.propose()
    assert other.declaration == honest.declaration and other.payload_digest != honest.payload_digest
    assert world.audited(other).verdict is Verdict.REPLAY


RESPONSES = 10


def test_distinct_2_counts_pairs_within_responses() -> None:
    assert distinct_2([np.array(response) for response in ([1, 2, 1, 2], [2, 1], [5])], 256) == 500_000, "12 21 12, 21"
    assert distinct_2([np.array([7])], 256) == 1_000_000
    assert distinct_2([np.array([1, 12]), np.array([11, 2])], 100) == 1_000_000, "two pairs, though their digits are the same"


@pytest.mark.parametrize(
    "lengths, scores, found",
    [
        ([1, 2, 3], [10, 20, 30], 0.9999992),  # because of the constant added to the scores' variance
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
    """The worst case: few scores, and differences that correlate with the length."""
    lengths = np.arange(64.0)
    unit = (lengths - lengths.mean()) / lengths.std()
    moved = abs(length_score_correlation(lengths, 1e-4 * unit) - length_score_correlation(lengths, 0 * unit))
    assert 9_900 < moved <= 10_000


def of_round(number: int, score: float, distinct: float) -> RoundMedians:
    return RoundMedians(number, 3, 50, 0, 0, round(1e6 * score * RESPONSES), round(1e6 * distinct), 0)


def course(*rounds: tuple[float, float], follow: Callable[..., PolicyHistory] = PolicyHistory.with_round) -> PolicyHistory:
    """Return the history of rounds, each given as (score of a response, distinct-2)."""
    made = PolicyHistory((of_round(0, *rounds[0]),))
    for number, found in enumerate(rounds[1:], 1):
        made = follow(made, of_round(number, *found), RESPONSES)
    return made


STEADY = (0.5, 0.5)
COURSES: list[tuple[tuple[tuple[float, float], ...], int | None]] = [  # rounds; the round of the warning
    (((0.5, 0.5), (0.55, 0.4)), 1),
    (((0.5, 0.5), (0.5499, 0.4)), None),
    (((0.5, 0.5), (0.55, 0.4001)), None),
    (((0.5, 0.5), (0.4, 0.1)), None),
    (((0.5, 0.5), (0.9, 0.1), (0.95, 0.05)), 1),
    (((0.5, 0.5), *[STEADY] * 20, (0.7, 0.45), (0.8, 0.4)), 22),  # slowly, and beside the first round alone
    (((0.9, 0.5), *[(0.5, 0.5)] * 3, (0.6, 0.3)), 4),  # beside a later round alone
]


def wrong_courses(follow: Callable[..., PolicyHistory]) -> list[int]:
    return [number for number, (rounds, warned) in enumerate(COURSES) if course(*rounds, follow=follow).warned != warned]


def test_a_warning_comes_once_where_the_score_rises_while_responses_become_alike() -> None:
    assert wrong_courses(PolicyHistory.with_round) == []


def of_the_last_round(before: PolicyHistory, found: RoundMedians, responses: int) -> PolicyHistory:
    return PolicyHistory.with_round(PolicyHistory(before.rounds[-1:], before.warned), found, responses)


def of_the_first_round(before: PolicyHistory, found: RoundMedians, responses: int) -> PolicyHistory:
    return PolicyHistory.with_round(PolicyHistory(before.rounds[:1], before.warned), found, responses)


def again_and_again(before: PolicyHistory, found: RoundMedians, responses: int) -> PolicyHistory:
    return PolicyHistory.with_round(PolicyHistory(before.rounds), found, responses)


@pytest.mark.parametrize("planted", [of_the_last_round, of_the_first_round, again_and_again])
def test_the_courses_find_out_other_rules(planted: Callable[..., PolicyHistory]) -> None:
    assert wrong_courses(planted)


def test_a_job_keeps_its_first_round_and_the_last_ones() -> None:
    assert [found.round for found in course(*[STEADY] * 30).rounds] == [0, *range(30 - ROUNDS_KEPT + 1, 30)]


def test_a_round_is_told_in_one_line() -> None:
    assert PolicyMetricsView("ab", 3, 3, 0.5, 1.25, 20.5, 0.1, 0.4, -0.3).summary_line == (
        "score 0.500, 1.25 nats from the reference, 20.5 tokens (-0.30 with the score), 10% unfinished, distinct-2 0.400"
    )


def test_blocked_responses_are_told_where_there_are_any() -> None:
    found = round_medians(0, [RolloutDeclaration(bytes(32), 50, 0, 0, 0, 0, 0, blocked) for blocked in (4, 0, 8)])
    assert found.blocked == 4
    assert metrics_view(b"job", SPEC.encode(), found).summary_line.endswith("distinct-2 0.000, 25% blocked")


def test_each_round_is_news_and_a_warning_is_so_once() -> None:
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


FIRST_JOB, OTHER = bytes([1]) * 32, bytes([2]) * 32


class Objectives:
    def terms_of_spec(self, spec: bytes) -> Any:
        return SimpleNamespace(objective=JobSpec.decode(spec).objective)

    def why_base_refused(self, base: bytes, spec: bytes) -> str | None:
        raise AssertionError("no job is started")


def closed(job: bytes, number: int, *figures: tuple[int, int, int, int]) -> Any:
    declared = [codec.encode(RolloutDeclaration(bytes(32), *each, distinct=each[0], correlation=-each[1])) for each in figures]
    bodies = [
        codec.encode(Proposal(job, number, bytes(32), bytes(32), 1, bytes(32), None, declaration=each)) for each in declared
    ]
    return ClosedRound(job, number, None, tuple(Signed(body, bytes(32), bytes(64)) for body in bodies), ())  # type: ignore[arg-type]


def after(state: RlhfState, jobs: dict[bytes, bytes], *facts: Any) -> RlhfState:
    known = SimpleNamespace(jobs={key: SimpleNamespace(spec=spec) for key, spec in jobs.items()})
    view: Any = SimpleNamespace(module_state=lambda kind: known)
    context = BlockContext(bytes(32), 1, 0, Ed25519Verifier(), {}, facts)
    changed: RlhfState = RlhfModule(Objectives()).end_block(state, view, context).state
    return changed


def test_the_medians_of_the_accepted_stay_until_the_next_round_or_until_the_job_is_forgotten() -> None:
    jobs = {FIRST_JOB: SPEC.encode(), OTHER: replace(SPEC, objective="language", objective_settings=b"").encode()}
    first = after(
        RlhfState(), jobs, closed(FIRST_JOB, 0, (10, 1, -5, 7), (30, 2, 9, 1), (20, 9, 0, 2)), closed(OTHER, 0, (1, 1, 1, 1))
    )
    assert first == RlhfState({FIRST_JOB: PolicyHistory((RoundMedians(0, 3, 20, 2, 0, 2, 20, -2),))})
    assert after(first, jobs, closed(FIRST_JOB, 1)) == first, "a round that accepts nothing says nothing"
    second = after(first, jobs, closed(FIRST_JOB, 1, (10, 0, 4, 8), (30, 2, 6, 6)))
    assert second == RlhfState(
        {FIRST_JOB: PolicyHistory((*first.jobs[FIRST_JOB].rounds, RoundMedians(1, 2, 10, 0, 4, 6, 10, -2)))}
    ), "of two the lower one"
    assert after(second, {OTHER: jobs[OTHER]}) == RlhfState()
    assert codec.decode(RlhfState, codec.encode(second)) == second
