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

ROUNDS_KEPT: Final = 8  # rounds in the history of a job: the first round, whose policy is the reference, and the last rounds
# smallest rise of the score per response, in millionths: rules score in 0..1, reward models with a deviation of 1
SCORE_RISE_MIN: Final = MILLIONTHS // 20
# largest distinct-2 after a loss of diversity, in fifths of an earlier one: smaller drops are variance of the prompts
DISTINCT_FIFTHS_MAX: Final = 4


# Figures of rounds -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RoundMedians:
    """Median of each declared figure over the accepted proposals of a round; of two middle values, the lower one."""

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
    warned: Count | None = None  # number of the first round with a loss of diversity; None: no loss

    def with_round(self, found: RoundMedians, responses: int) -> PolicyHistory:
        rounds = (*self.rounds, found)
        rounds = rounds if len(rounds) <= ROUNDS_KEPT else (rounds[0], *rounds[2:])
        warns = self.warned is None and any(has_lost_diversity(before, found, responses) for before in rounds[:-1])
        return PolicyHistory(rounds, found.round if warns else self.warned)


def has_lost_diversity(before: RoundMedians, now: RoundMedians, responses: int) -> bool:
    """Return True if the score has risen while distinct-2 has fallen.

    SCORE_RISE_MIN and DISTINCT_FIFTHS_MAX are the thresholds.
    """
    rise = now.score - before.score
    return rise >= SCORE_RISE_MIN * responses and 5 * now.distinct <= DISTINCT_FIFTHS_MAX * before.distinct


@dataclass(frozen=True, kw_only=True)
class PolicyMetrics:
    """Measurements of a tuned policy. A value is J = E r − β·KL: mean reward less the KL penalty.

    The values of the toy policy are exact. Values of other policies are estimates, with normalized scores of the reward model.
    """

    reference_value: float
    value: float
    kl: float  # KL(policy ‖ reference) in nats
    score: float
    optimum: float | None = None  # toy policy: the largest value of any policy
    gap_closed: float | None = None  # toy policy: (value − reference_value) / (optimum − reference_value)
    # accuracy of the reward model: share of held-out pairs whose better response scores higher
    pair_accuracy: float | None = None
    linear_accuracy: float | None = None  # accuracy of a word-count model that was trained on the same pairs


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
    """Return the warning that a job's policy has lost diversity, or "" if it has not."""
    if course.warned is None:
        return ""
    return (
        f"job {JobSpec.decode(spec).name}: by round {display_round_number(course.warned)} the score rose while responses "
        "became alike (distinct-2 fell by a fifth or more): `rlhf compare` shows the responses; "
        "a larger beta, kl_target or kl_stop hold a policy nearer to its reference"
    )
