"""`peer rlhf trace PAIR FOLDER`, in a process of its own: `python -m peer.export.exported_pair_trace PAIR FOLDER` prints JSON.

Everything in the export is checked on the way.
"""

from __future__ import annotations

import sys
from pathlib import Path

from features.json_output import print_json_result
from ledger.ledger_state import StateTransition
from ledger.network_governance import NetworkState
from peer.export.export_replay import audit_export
from peer.export.run_export import set_path
from protocol.errors import MissingBlobError, UserError
from rlhf.ledger.preference_set_attestation import AttestedPreferenceSet
from rlhf.ledger.rlhf_module import RlhfState
from rlhf.objectives.ppo import MODULE
from rlhf.objectives.registry import PAIR_OBJECTIVES
from rlhf.pair_trace import RoundTrainers, TracedJob, trace_pair
from rlhf.rpc import PairTraceView
from training.job_spec import JobSpec


def trace_pair_in_export(folder: Path, pair: str) -> PairTraceView:
    """Raises `UserError` as `audit_export` does, and for a pair that no set of the export has."""
    jobs = dict[bytes, TracedJob]()
    sets = dict[bytes, AttestedPreferenceSet]()

    def seen(transition: StateTransition) -> None:
        state = transition.state
        for job in transition.started_jobs:
            spec = JobSpec.decode(state.jobs.jobs[job].spec)
            if spec.objective in PAIR_OBJECTIVES:
                jobs[job] = TracedJob(job, spec)
        for closed in transition.closed_rounds:
            if closed.job in jobs:
                judged = dict.fromkeys(closed.outcome.accepted, True) | dict.fromkeys(closed.outcome.rejected, False)
                jobs[closed.job].rounds.append(RoundTrainers(closed.round, judged))
        if state.module_state(NetworkState).module_version(MODULE):
            sets.update(state.module_state(RlhfState).sets)

    def read(digest: bytes, size_max: int) -> bytes:
        if not (folder / set_path(digest)).is_file():
            raise MissingBlobError(digest.hex())
        return (folder / set_path(digest)).read_bytes()

    audit_export(folder, seen=seen)
    there = [learned for learned in jobs.values() if learned.spec.data and (folder / set_path(learned.spec.data)).is_file()]
    if jobs and not there:
        raise UserError(f"{folder} has no set: whoever exported it had none, or a pair of it is redacted")
    return trace_pair(there, sets, read, pair)


def main() -> int:
    pair, folder = sys.argv[1:]
    return print_json_result(lambda: trace_pair_in_export(Path(folder), pair))


if __name__ == "__main__":
    sys.exit(main())
