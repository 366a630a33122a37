"""Monitoring of a policy: medians of its figures in each round, and a warning if responses lose diversity while scores rise.

distinct-2 is the number of distinct bigrams of tokens divided by the number of all bigrams, in a trainer's responses of a round
(Li et al. 2016, arXiv:1510.03055). More responses have a lower distinct-2, so only rounds of the same job can be compared.
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

ROUNDS_KEPT: Final = 8  # rounds per job: the first one, whose policy is the reference, and the last ones
# Rise per response that counts, in millionths: rules score in 0..1, reward models have a deviation of 1.
SCORE_RISE_MIN: Final = MILLIONTHS // 20
# Fifths of the earlier distinct-2 that count as a fall: smaller falls may come from the drawn prompts.
DISTINCT_FIFTHS_MAX: Final = 4


# Figures of rounds -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RoundMedians:
    """The medians of a round: for each declared figure, the lower median over the accepted proposals."""

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
    """The history of a policy: medians of its first round and of its last rounds, without rounds that accepted no proposal."""

    rounds: Annotated[tuple[RoundMedians, ...], Length(1, ROUNDS_KEPT)]
    warned: Count | None = None  # first round with a loss of diversity

    def with_round(self, found: RoundMedians, responses: int) -> PolicyHistory:
        rounds = (*self.rounds, found)
        rounds = rounds if len(rounds) <= ROUNDS_KEPT else (rounds[0], *rounds[2:])
        warns = self.warned is None and any(has_lost_diversity(before, found, responses) for before in rounds[:-1])
        return PolicyHistory(rounds, found.round if warns else self.warned)


def has_lost_diversity(before: RoundMedians, now: RoundMedians, responses: int) -> bool:
    """Return True if the score has risen and distinct-2 has fallen, each by at least its threshold."""
    rise = now.score - before.score
    return rise >= SCORE_RISE_MIN * responses and 5 * now.distinct <= DISTINCT_FIFTHS_MAX * before.distinct


@dataclass(frozen=True, kw_only=True)
class PolicyMetrics:
    """Measurements of a tuned policy. The value of a policy is J = E r − β·KL.

    Values of the toy model are exact. Other values are estimates, with normalized scores of the reward model.
    """

    reference_value: float
    value: float
    kl: float  # distance from the reference in nats
    score: float
    optimum: float | None = None  # toy model: the largest value of any policy
    gap_closed: float | None = None  # toy model: (value − reference_value) / (optimum − reference_value)
    pair_accuracy: float | None = None  # share of held-out pairs whose better response the reward model scores higher
    linear_accuracy: float | None = None  # accuracy of the word-count model that was fitted to the same pairs


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
    """Return the warning about a job's loss of diversity, or "" if none is due."""
    if course.warned is None:
        return ""
    return (
        f"job {JobSpec.decode(spec).name}: by round {display_round_number(course.warned)} the score rose while responses "
        "became alike (distinct-2 fell by a fifth or more): `rlhf compare` shows the responses; "
        "a larger beta, kl_target or kl_stop hold a policy nearer to its reference"
    )
