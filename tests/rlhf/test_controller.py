"""β follows from decided figures alone, by the same bits everywhere; the planted rules are those that a glance would pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from peer import features
from protocol import codec
from protocol.verdicts import Verdict
from rlhf.objectives.kl_controller import (
    BETA_MAX,
    BETA_MIN,
    BILLIONTHS,
    KlControllerState,
    current_beta,
    exceeds_kl_stop,
    first_beta,
    nats_per_response,
    next_beta,
)
from rlhf.objectives.ppo import RolloutDeclaration
from rlhf.pytorch import ppo
from tests.rlhf.test_ppo import JOB, OWN, SPEC, World
from tests.training.replicated.support import buffer, round_of
from training.job_spec import AuditMode
from training.replicated.model_state import PARAMETERS
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
        ({"kl_target": 0.0}, "kl_target must lie in 0.001..1000, is 0.0"),
        ({"kl_stop": float("nan")}, "kl_stop must lie in"),
        ({"kl_target": 6.0, "beta": 0.0}, "beta 0 cannot be steered"),
    ],
)
def test_what_cannot_be_steered_is_no_job(terms: dict[str, float], problem: str) -> None:
    assert problem in (replace(OWN, **terms).settings_problem() or "")


# In models and replays ----------------------------------------------------------------------------------------------------

STEERED = replace(SPEC, audit=AuditMode.FULL, objective_settings=codec.encode(replace(OWN, kl_target=2.0, beta=0.5)))


@pytest.fixture(scope="module", autouse=True)
def known() -> None:
    features.register_features()


def after_round(model: ReplicatedModel, *sums: int) -> ReplicatedModel:
    """The next round's model, where the accepted proposals declare these k1."""
    made = []
    for item, k1 in zip(round_of(model, len(sums)), sums, strict=True):
        declared = codec.encode(RolloutDeclaration(bytes(32), 50, 0, k1, 0, 0, 0))
        made.append(replace(item, proposal=replace(item.proposal, declaration=declared)))
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
    """A policy that has left its reference: then β changes the rewards."""
    world = World(tmp_path, STEERED.validated())
    moved = world.model.parameters + buffer(world.model.layout, "moved")
    state = replace(world.model.state, steering=codec.encode(KlControllerState(TENTH)))
    world.model = ReplicatedModel.from_vectors(state, {**world.model.vectors, PARAMETERS: moved})
    world.model.save(tmp_path / "model")
    honest = world.propose()
    assert world.audited(honest).verdict is Verdict.ACCEPT
    with monkeypatch.context() as lying:
        lying.setattr(ppo, "current_beta", lambda steering, said: said)
        other = world.propose()
    assert other.declaration == honest.declaration and other.payload_digest != honest.payload_digest
    assert world.audited(other).verdict is Verdict.REPLAY
