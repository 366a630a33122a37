"""Monitoring of a policy: medians of its rounds, and a warning when the score rises while the responses lose diversity.

distinct-2 is the number of distinct bigrams of tokens divided by the number of all bigrams, in a trainer's responses of a round
(Li et al. 2016, arXiv:1510.03055). It falls with the number of responses, so only rounds of the same job can be compared.
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

ROUNDS_KEPT: Final = 8  # per job: the first round, whose policy is the reference, and the last ones
SCORE_RISE_MIN: Final = MILLIONTHS // 20  # per response: rules score in 0..1, reward models with a deviation of 1
DISTINCT_FIFTHS_MAX: Final = 4  # fifths of the earlier distinct-2: smaller drops are variance of the prompts


# Figures of rounds -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RoundMedians:
    """Median of each declared figure over the accepted proposals of a round, or the lower of two middle ones."""

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
    """History of a policy: its first and its last rounds with an accepted proposal."""

    rounds: Annotated[tuple[RoundMedians, ...], Length(1, ROUNDS_KEPT)]
    warned: Count | None = None  # first round with a loss of diversity

    def with_round(self, found: RoundMedians, responses: int) -> PolicyHistory:
        rounds = (*self.rounds, found)
        rounds = rounds if len(rounds) <= ROUNDS_KEPT else (rounds[0], *rounds[2:])
        warns = self.warned is None and any(has_lost_diversity(before, found, responses) for before in rounds[:-1])
        return PolicyHistory(rounds, found.round if warns else self.warned)


def has_lost_diversity(before: RoundMedians, now: RoundMedians, responses: int) -> bool:
    """Return True if the score has risen while distinct-2 has fallen, both beyond their thresholds."""
    rise = now.score - before.score
    return rise >= SCORE_RISE_MIN * responses and 5 * now.distinct <= DISTINCT_FIFTHS_MAX * before.distinct


@dataclass(frozen=True, kw_only=True)
class PolicyMetrics:
    """Measurements of a tuned policy. A value is J = E r − β·KL.

    The toy's values are exact. Others are estimates, with normalized scores of the reward model.
    """

    reference_value: float
    value: float
    kl: float  # nats
    score: float
    optimum: float | None = None  # the toy's largest value
    gap_closed: float | None = None  # toy model: (value − reference_value) / (optimum − reference_value)
    pair_accuracy: float | None = None  # share of held-out pairs whose better response scores higher
    linear_accuracy: float | None = None  # accuracy of the word-count model, trained on the same pairs


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
    """Return the warning about a job, or "" if there is none."""
    if course.warned is None:
        return ""
    return (
        f"job {JobSpec.decode(spec).name}: by round {display_round_number(course.warned)} the score rose while responses "
        "became alike (distinct-2 fell by a fifth or more): `rlhf compare` shows the responses; "
        "a larger beta, kl_target or kl_stop hold a policy nearer to its reference"
    )
