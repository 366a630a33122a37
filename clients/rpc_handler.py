"""Handler of the RPC calls of client runs: reports what the ledger knows about each run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from clients.ledger.clients_module import ClientRun, ClientsState
from clients.objective import MODULE
from clients.rpc import ClientRunView, ClientsRpc, OpenStepView, StepOutcomeView
from features.services import PeerContext
from ledger.core.module import StateReader
from ledger.jobs import Job, JobsState
from ledger.network_governance import NetworkState
from protocol.errors import UserError
from protocol.identity import peer_id
from protocol.verdicts import verdict_label_by_name
from storage.batch_store import KeptRound
from training.job_spec import JobSpec


@dataclass(frozen=True)
class ClientsRpcHandler(ClientsRpc):
    peer: PeerContext

    async def client_runs(self) -> tuple[ClientRunView, ...]:
        return list_client_runs(self.peer.state, self.peer.batches.kept_rounds())


def list_client_runs(state: StateReader, kept: Sequence[KeptRound]) -> tuple[ClientRunView, ...]:
    """Return the unfinished runs, the oldest first, with counts of the rounds whose data this peer keeps.

    Raises `UserError` if the network does not run their module.
    """
    if not state.module_state(NetworkState).module_version(MODULE):
        raise UserError(f"this network does not run the module {MODULE}: a quorum of voters must run `upgrade {MODULE} 1`")
    jobs, runs = state.module_state(JobsState).jobs, state.module_state(ClientsState).runs
    unfinished = [key for key, run in runs.items() if not run.is_over]
    oldest_first = sorted(unfinished, key=lambda key: (jobs[key].started_height, key))
    rounds = defaultdict[bytes, list[int]](list)
    for one in kept:
        rounds[one.job].append(one.round)
    return tuple(_view(key, runs[key], jobs, sorted(rounds[key])) for key in oldest_first)


def _view(key: bytes, run: ClientRun, jobs: dict[bytes, Job], kept: Sequence[int]) -> ClientRunView:
    job = jobs[key]
    spec = JobSpec.decode(job.spec)
    reference = spec.resolved_objective.required_model(spec)
    assert reference is not None, "a run tunes the model of another job"
    base, step, last = jobs.get(reference.job), run.open_step, run.last
    labels = spec.resolved_objective.reason_labels
    return ClientRunView(
        job=key.hex(),
        base=base.name if base is not None else reference.job.hex()[:8],
        owner=peer_id(run.owner),
        phase=job.phase.value,
        steps=run.next_step,
        open_step=OpenStepView(step.brief.step, step.attempts, step.since) if step is not None else None,
        last_outcome=StepOutcomeView(
            last.step,
            last.is_accepted,
            {verdict_label_by_name(reason, labels): count for reason, count in sorted(last.rejected.items())},
        )
        if last is not None
        else None,
        accepted_rounds=sum(job.accepted.values()),
        kept_rounds=len(kept),
        first_kept_round=min(kept, default=None),
    )
