"""What people watch while a policy moves: medians of its rounds, and a warning where it is rewarded for saying the same.

distinct-2 is the share of different pairs among all pairs of neighbouring tokens in a trainer's responses of a round (Li et al.
2016, arXiv:1510.03055). It falls with the number of responses: it says something beside other rounds of the same job alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final

from protocol.codec import Count, Length
from protocol.units import display_round_number
from rlhf.objectives.ppo import MILLIONTHS, PPO, Figure, RolloutDeclaration, Share, lower_median
from rlhf.rpc import PolicyMetricsView
from training.job_spec import JobSpec

ROUNDS_KEPT: Final = 8  # of a job: its first one, whose policy is the reference, and the last ones
SCORE_RISE_MIN: Final = MILLIONTHS // 20  # of a response: rules score in 0..1, reward models with a deviation of 1
DISTINCT_FIFTHS_MAX: Final = 4  # of the earlier round's distinct-2: what falls less comes and goes with the prompts


# Of rounds ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RoundMedians:
    """Of the accepted proposals of a round, each by itself; of an even number the lower one."""

    round: Count
    accepted: Count
    tokens: Count
    unfinished: Count
    k1: Figure
    score: Figure
    distinct: Share
    correlation: Figure
    blocked: Count = 0


def round_medians(number: int, said: Sequence[RolloutDeclaration]) -> RoundMedians:
    figures = (field.name for field in dataclasses.fields(RoundMedians)[2:])
    return RoundMedians(number, len(said), *(lower_median([getattr(rollouts, name) for rollouts in said]) for name in figures))


@dataclass(frozen=True, slots=True)
class PolicyHistory:
    """Of one job, as far as rounds of it have accepted something."""

    rounds: Annotated[tuple[RoundMedians, ...], Length(1, ROUNDS_KEPT)]
    warned: Count | None = None  # the first round that was worth the warning

    def with_round(self, found: RoundMedians, responses: int) -> PolicyHistory:
        rounds = (*self.rounds, found)
        rounds = rounds if len(rounds) <= ROUNDS_KEPT else (rounds[0], *rounds[2:])
        warns = self.warned is None and any(has_lost_diversity(before, found, responses) for before in rounds[:-1])
        return PolicyHistory(rounds, found.round if warns else self.warned)


def has_lost_diversity(before: RoundMedians, now: RoundMedians, responses: int) -> bool:
    """Whether the score has risen while distinct-2 has fallen."""
    rise = now.score - before.score
    return rise >= SCORE_RISE_MIN * responses and 5 * now.distinct <= DISTINCT_FIFTHS_MAX * before.distinct


@dataclass(frozen=True, kw_only=True)
class PolicyMetrics:
    """Measured once a policy is tuned. A value is J = E r − β·KL.

    Those of the toy are exact; others are estimates, with normalised scores of the reward model.
    """

    reference_value: float
    value: float
    kl: float  # nats
    score: float
    optimum: float | None = None  # of the toy
    gap_closed: float | None = None  # of the toy: (value − reference_value) / (optimum − reference_value)
    pair_accuracy: float | None = None  # of the held-out pairs, in which the better response scores higher
    linear_accuracy: float | None = None  # the same of the word-count model, which learned from the same pairs


# For people --------------------------------------------------------------------------------------------------------------------


def metrics_view(job: bytes, spec: bytes, found: RoundMedians) -> PolicyMetricsView:
    decoded = JobSpec.decode(spec)
    responses = PPO.responses_per_round(decoded, decoded.decoded_settings)
    return PolicyMetricsView(
        job=job.hex(),
        round=found.round,
        accepted=found.accepted,
        score=found.score / (MILLIONTHS * responses),
        kl_nats=found.k1 / (MILLIONTHS * responses),
        response_tokens=found.tokens / responses,
        unfinished=found.unfinished / responses,
        distinct_2=found.distinct / MILLIONTHS,
        length_correlation=found.correlation / MILLIONTHS,
        blocked=found.blocked / responses,
    )


def diversity_warning(course: PolicyHistory, spec: bytes) -> str:
    """Of a job that has been warned of; empty of others."""
    if course.warned is None:
        return ""
    return (
        f"job {JobSpec.decode(spec).name}: by round {display_round_number(course.warned)} the score rose while responses "
        "became alike (distinct-2 fell by a fifth or more): `rlhf compare` shows what is said; "
        "a larger beta, kl_target or kl_stop hold a policy nearer to its reference"
    )
