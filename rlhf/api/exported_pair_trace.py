"""`peer rlhf trace PAIR FOLDER`: what was learned of a pair, from an export."""

from __future__ import annotations

from dataclasses import dataclass, field

from features.export_query import ExportedSets
from ledger.ledger_state import StateTransition
from ledger.network_governance import NetworkState
from protocol.errors import UserError
from rlhf.ledger.preference_set_attestation import AttestedPreferenceSet
from rlhf.ledger.rlhf_module import RlhfState
from rlhf.objectives.ppo import MODULE
from rlhf.objectives.registry import PAIR_OBJECTIVES
from rlhf.pair_trace import RoundTrainers, TracedJob, trace_pair
from rlhf.rpc import PairTraceView
from training.job_spec import JobSpec


@dataclass
class ExportedPairTrace:
    """A question to an export (`peer.export.export_replay`)."""

    pair: str
    jobs: dict[bytes, TracedJob] = field(default_factory=dict)
    sets: dict[bytes, AttestedPreferenceSet] = field(default_factory=dict)

    def observe_block(self, transition: StateTransition) -> None:
        state = transition.state
        for job in transition.started_jobs:
            spec = JobSpec.decode(state.jobs.jobs[job].spec)
            if spec.objective in PAIR_OBJECTIVES:
                self.jobs[job] = TracedJob(job, spec)
        for closed in transition.closed_rounds:
            if closed.job in self.jobs:
                judged = dict.fromkeys(closed.outcome.accepted, True) | dict.fromkeys(closed.outcome.rejected, False)
                self.jobs[closed.job].rounds.append(RoundTrainers(closed.round, judged))
        if state.module_state(NetworkState).module_version(MODULE):
            self.sets.update(state.module_state(RlhfState).sets)

    def answer(self, sets: ExportedSets) -> PairTraceView:
        """Raises `UserError` for a pair that no set of the export has."""
        there = [learned for learned in self.jobs.values() if learned.spec.data and sets.has_set(learned.spec.data)]
        if self.jobs and not there:
            raise UserError(f"{sets.folder} has no set: whoever exported it had none, or a pair of it is redacted")
        return trace_pair(there, self.sets, sets.read_set, self.pair)
