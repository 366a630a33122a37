"""What the network keeps of RLHF: the figures of each job's last round, which everybody derives from the accepted proposals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from ledger.core.genesis import Genesis
from ledger.core.module import Change, Context, Module, Said, View
from ledger.jobs import FINISHED_KEPT_MAX, RUNNING_MAX, ClosedRound, JobRules, JobsState
from protocol import codec
from protocol.codec import Count, Digest, Length
from protocol.messages import Proposal
from rlhf.objective import PPO, Figure, Rollouts


@dataclass(frozen=True, slots=True)
class Medians:
    """Of the accepted proposals of a round, each by itself; of an even number the lower one."""

    round: Count
    accepted: Count
    tokens: Count
    unfinished: Count
    k1: Figure
    score: Figure


@dataclass(frozen=True, slots=True)
class RlhfState:
    jobs: Annotated[dict[Digest, Medians], Length(0, RUNNING_MAX + FINISHED_KEPT_MAX)] = field(default_factory=dict)


class RlhfModule(Module[RlhfState]):
    name = "rlhf"
    contents: ClassVar[Mapping[str, type]] = {}
    state_type = RlhfState

    def __init__(self, rules: JobRules) -> None:
        self._rules = rules

    def genesis(self, genesis: Genesis) -> RlhfState:
        return RlhfState()

    def apply(self, state: RlhfState, said: Said, view: View, context: Context) -> Change:
        raise AssertionError(said.content)

    def end_block(self, state: RlhfState, view: View, context: Context) -> Change:
        jobs, kept = dict(state.jobs), view.of(JobsState).jobs
        for closed in context.of(ClosedRound):
            if closed.proposals and self._rules.terms(kept[closed.job].spec).objective == PPO.name:
                jobs[closed.job] = medians(closed.round, [_said(signed.body) for signed in closed.proposals])
        return Change(RlhfState({job: found for job, found in jobs.items() if job in kept}))


def medians(number: int, said: Sequence[Rollouts]) -> Medians:
    def median(name: str) -> int:
        values = sorted(getattr(rollouts, name) for rollouts in said)
        return int(values[(len(values) - 1) // 2])

    return Medians(number, len(said), *(median(name) for name in ("tokens", "unfinished", "k1", "score")))


def _said(proposal: bytes) -> Rollouts:
    """A quorum has accepted it, and whoever accepts has decoded it."""
    return codec.decode(Rollouts, codec.decode_message(proposal, (Proposal,)).declaration)
