"""Calls about jobs and their rounds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import trio

from consensus.voter_set import VoterSet
from features.lazy_import import import_object
from features.name_resolution import resolve_job
from ledger.audits.audit_state import JobAudits
from ledger.jobs import (
    Job,
    JobPhase,
    QueuedJob,
    RequestRollback,
    StartJob,
    StopJob,
    job_id,
)
from ledger.ledger_state import LedgerState, decode_body
from ledger.model_anchors import format_undone_rounds
from peer.api.handlers.local_peer_handler import limited_reexecutors, suspended_trainers
from peer.api.running_peer import RunningPeer
from protocol import codec
from protocol.api import JobRpc, JobView, RoundView, RoundVotesView, TrainRequest
from protocol.errors import UserError
from protocol.identity import Signed, peer_id
from protocol.limits import TRAINERS_MAX
from protocol.messages import Ballot, Vouch
from protocol.verdicts import Verdict, verdict_label, verdict_label_by_name
from rounds.round_state import OpenRoundState, is_round_settled
from rounds.vouch_set import vouches_needed
from storage.ledger_store import StoredRound
from training.api.job_builder import LOCAL_DATA, build_example_job, build_job_spec
from training.api.job_notes import preparation_notes
from training.data.text_files import TextFileReport
from training.data.text_files import printable_path as shown_path
from training.job_disk_space import job_disk_space
from training.job_spec import AuditMode, JobSpec
from training.replicated.aggregate import is_plain_mean
from training.replicated.tensor_layout import layout_of

ROUNDS_SHOWN_MAX = 10_000
JOBS_WITH_FINDINGS_MAX = 16  # jobs, the last started ones, whose notes on text files stay in memory
VOTES_SHOWN_MAX = 100  # rounds in one answer about votes: each needs a read of the block that closed the round

BENCHMARK_REFERENCE = "see 'Equal machine time' in docs/benchmarks.md"


@dataclass(frozen=True)
class JobRpcHandler(JobRpc):
    peer: RunningPeer
    findings: dict[str, tuple[str, ...]] = field(default_factory=dict)  # job id -> notes on the job's text files

    async def jobs(self) -> tuple[JobView, ...]:
        """Return started jobs, then queued jobs in the order of the queue."""
        state = self.peer.driver.state
        jobs = sorted(state.jobs.jobs.items(), key=lambda item: item[1].started_height)
        started = [_job(key, job, state, state.audits.jobs.get(key, JobAudits()), self.peer) for key, job in jobs]
        line = enumerate(state.jobs.queue, start=1)
        views = (*started, *(_in_line(waiting, state, place, self.peer) for place, waiting in line))
        return tuple(replace(view, notes=(*view.notes, *self.findings.get(view.job, ()))) for view in views)

    async def rounds(self, last: int) -> tuple[RoundView, ...]:
        store = self.peer.driver.store
        stored = await trio.to_thread.run_sync(store.closed_rounds, max(1, min(last, ROUNDS_SHOWN_MAX)))
        measured = {job: await trio.to_thread.run_sync(store.measurements, job) for job in {item.job for item in stored}}
        views = []
        for item in stored:
            during, after = (measured[item.job].get(number, {}) for number in (item.round, item.round + 1))
            job = self.peer.state.jobs.jobs.get(item.job)
            undone = job.undone_rounds if job is not None else ()
            spec = JobSpec.decode(job.spec) if job is not None else None
            accepted = sum(verdict == Verdict.ACCEPT.label for verdict in item.verdicts.values())
            views.append(
                RoundView(
                    job=item.job.hex(),
                    round=item.round,
                    height=item.height,
                    verdicts={peer_id(trainer): verdict for trainer, verdict in item.verdicts.items()},
                    ballots=tuple(peer_id(voter) for voter in item.ballots),
                    stepped=item.stepped,
                    plain_mean=item.stepped and spec is not None and is_plain_mean(accepted, spec.rule, spec.byzantine_max),
                    model_root=item.model_root.hex(),
                    held_out_bits_per_byte=after.get("held_out_bits_per_byte"),
                    training_nats=during.get("training_nats"),
                    seconds=during.get("seconds"),
                    decision_ms=during.get("decision_ms"),
                    training_loss=during.get("training_loss"),
                    vouchers={peer_id(trainer): tuple(map(peer_id, voters)) for trainer, voters in item.vouchers.items()},
                    undone=any(of.first <= item.round <= of.last and item.height <= of.height for of in undone),
                )
            )
        return tuple(views)

    async def votes(self, last: int) -> tuple[RoundVotesView, ...]:
        stored = await trio.to_thread.run_sync(self.peer.driver.store.closed_rounds, max(0, min(last, VOTES_SHOWN_MAX)))
        closed = [await trio.to_thread.run_sync(self._closed_votes, item) for item in stored]
        return (*filter(None, closed), *map(self._open_votes, self.peer.driver.node.rounds.books.values()))

    def _closed_votes(self, item: StoredRound) -> RoundVotesView | None:
        """Return the votes in the block that closed the round, or None if this peer lacks that block."""
        decided = self.peer.driver.store.get_decision(item.height)
        if decided is None:
            return None
        closing = next(closing for closing in decode_body(decided.decode().body).round_certificates if closing.job == item.job)
        ballots = [(signed.signer, codec.decode_message(signed.body, (Ballot,))) for signed in closing.ballots]
        return RoundVotesView(
            job=item.job.hex(),
            round=item.round,
            phase="closed",
            height=item.height,
            quorum=0,
            voters=(),
            trainers=(),
            proposed=tuple({peer_id(judgement.trainer): None for _, ballot in ballots for judgement in ballot.judgements}),
            votes=self._said(item.job, ballots),
            vouches=self._said(item.job, _opened_vouches(closing.vouches)),
        )

    def _open_votes(self, book: OpenRoundState) -> RoundVotesView:
        terms, driver = book.terms, self.peer.driver
        waits = not book.ballots and not book.proposals.keys() >= book.awaited_trainers
        phase = (
            "training"
            if waits
            else "closing"
            if len(book.ballots) >= terms.quorum and is_round_settled(terms, book.ballots, book.vouching.vouches)
            else "voting"
        )
        return RoundVotesView(
            job=terms.job.hex(),
            round=terms.round,
            phase=phase,
            height=None,
            quorum=terms.quorum,
            voters=tuple(map(peer_id, sorted(terms.voters))),
            trainers=tuple(map(peer_id, sorted(terms.trainers & book.awaited_trainers | book.proposals.keys()))),
            proposed=tuple(map(peer_id, sorted(book.proposals))),
            votes=self._said(terms.job, book.ballots.items()),
            seconds=max(0.0, driver.now() - book.opened_at),
            vouches=self._said(terms.job, _opened_vouches(book.vouching.signed.values())),
        )

    def _said(self, job: bytes, messages: Iterable[tuple[bytes, Ballot | Vouch]]) -> dict[str, dict[str, str]]:
        """Return the labels of verdicts as voter id -> trainer id -> label.

        The first of a voter's verdicts on one trainer counts.
        """
        known = self.peer.driver.state.jobs.jobs.get(job)
        own = JobSpec.decode(known.spec).resolved_objective.reason_labels if known else ()
        said: dict[str, dict[str, str]] = {}
        for voter, message in sorted(messages, key=lambda item: item[0]):
            for judged in message.judgements:
                said.setdefault(peer_id(voter), {}).setdefault(peer_id(judged.trainer), verdict_label(judged.verdict, own))
        return said

    async def start_job(self, request: TrainRequest) -> str:
        self.peer.require_member()
        findings = TextFileReport()
        try:
            if request.examples:
                spec = await trio.to_thread.run_sync(build_example_job, self.peer, request)
            else:
                spec = await trio.to_thread.run_sync(build_job_spec, self.peer, request, findings)
        except OSError as error:  # an unreadable text file
            raise UserError(
                f"{shown_path(request.examples or request.data)} cannot be read: {error.strerror}; choose another file or folder"
            ) from None
        transaction = await self.peer.submitter.submit("job/start", StartJob(spec.encode()))
        job = job_id(self.peer.me, transaction).hex()
        if findings.report_lines():
            self.findings[job] = findings.report_lines()
        if len(self.findings) > JOBS_WITH_FINDINGS_MAX:
            del self.findings[next(iter(self.findings))]
        return job

    async def run_test_round(self) -> str:
        self.peer.require_member()
        spec = JobSpec(name="test", objective="scratch", rounds=1, byzantine_max=0)
        transaction = await self.peer.submitter.submit("job/start", StartJob(spec.encode()))
        return job_id(self.peer.me, transaction).hex()

    async def cancel_job(self, job: str) -> str:
        before = self.peer.driver.state.jobs
        live: dict[bytes, Job | QueuedJob] = {**before.unfinished(), **{waiting.job: waiting for waiting in before.queue}}
        key = resolve_job(job, live, "running or queued jobs")
        await self.peer.submitter.submit("job/stop", StopJob(key))
        jobs = self.peer.driver.state.jobs
        after = {waiting.job: waiting for waiting in jobs.queue}.get(key) or jobs.jobs.get(key)
        if after is None:
            return f"job {live[key].name!r} is removed from the queue"
        if isinstance(after, Job) and after.phase is JobPhase.FINISHED:
            return f"job {after.name!r} has ended"
        voters = VoterSet(self.peer.driver.state.members.voters)
        votes = f"{len(after.stop_requests)} of {voters.quorum} needed votes to cancel job {after.name!r}"
        return f"{votes}; run this command at other voters, too, or at the job's author"

    async def request_rollback(self, job: str, round: int) -> str:
        key = resolve_job(job, self.peer.driver.state.jobs.unfinished(), "unfinished jobs")
        before = self.peer.driver.state.jobs.jobs[key]
        await self.peer.submitter.submit("job/rollback", RequestRollback(key, round, before.last_rollback))
        after, voters = self.peer.driver.state.jobs.jobs[key], VoterSet(self.peer.driver.state.members.voters)
        if after.undone_rounds != before.undone_rounds:
            return f"job {after.name!r}: {format_undone_rounds(after.undone_rounds[-1])}"
        if self.peer.me not in after.rollback_requests:
            return f"this peer has withdrawn its vote to roll back job {after.name!r}"
        same = sum(number == round for number in after.rollback_requests.values())
        votes = f"{same} of {voters.quorum} needed votes to roll back job {after.name!r} to @{round}"
        return f"{votes}; run this command at other voters, too"


def _opened_vouches(vouches: Iterable[Signed]) -> list[tuple[bytes, Vouch]]:
    """Return each vouch with its signer. The caller has verified the signatures."""
    return [(signed.signer, codec.decode_message(signed.body, (Vouch,))) for signed in vouches]


def _job(key: bytes, job: Job, state: LedgerState, audits: JobAudits, peer: RunningPeer) -> JobView:
    spec = JobSpec.decode(job.spec)
    own = spec.resolved_objective.reason_labels
    is_over, reports = job.phase is JobPhase.FINISHED, [drawn for of in audits.rounds.values() for drawn in of.proposals.values()]
    return JobView(
        job=key.hex(),
        name=job.name,
        objective=spec.objective,
        state=job.phase.value,
        round=job.round,
        rounds=job.rounds,
        model_root=job.model_root.hex(),
        audit=spec.audit.value,
        data=_data(spec),
        accepted={peer_id(trainer): count for trainer, count in job.accepted.items()},
        rejected={
            peer_id(trainer): {verdict_label_by_name(reason, own): count for reason, count in reasons.items()}
            for trainer, reasons in job.rejected.items()
        },
        started_height=job.started_height,
        suspended_until={peer_id(trainer): until for trainer, until in suspended_trainers(job, audits).items()},
        audits_open=sum(len(drawn.pending_auditors) for drawn in reports) + len(audits.disputes),
        data_origin=_origin(spec, state),
        precision=spec.precision.value,
        parameters=layout_of(spec).size,
        disk_bytes=0 if is_over else _disk_bytes(spec, job.trainers, peer),
        notes=preparation_notes(spec),
        reexecution_limits={} if is_over else limited_reexecutors(job),
        machine_time="" if is_over else describe_machine_time(key, job, spec),
        rounds_in_model=job.rounds_in_model,
        anchors=tuple(anchor.round for anchor in job.anchors),
        final_round=state.final_round(key),
        undone_rounds=tuple(format_undone_rounds(undone) for undone in job.undone_rounds),
    )


def _in_line(waiting: QueuedJob, state: LedgerState, place: int, peer: RunningPeer) -> JobView:
    spec = JobSpec.decode(waiting.spec)
    trainers = [key for key, member in state.members.members.items() if spec.resolved_objective.role in member.roles]
    return JobView(
        job=waiting.job.hex(),
        name=waiting.name,
        objective=spec.objective,
        state="waiting",
        round=0,
        rounds=spec.rounds,
        model_root="",
        audit=spec.audit.value,
        data=_data(spec),
        accepted={},
        rejected={},
        started_height=waiting.since,
        queue_position=place,
        data_origin=_origin(spec, state),
        precision=spec.precision.value,
        parameters=layout_of(spec).size,
        disk_bytes=_disk_bytes(spec, trainers, peer),
        initial_model_holders=_held(waiting, spec, VoterSet(state.members.voters)),
        notes=preparation_notes(spec),
    )


def _disk_bytes(spec: JobSpec, trainers: Sequence[bytes], peer: RunningPeer) -> int:
    room = job_disk_space(spec, min(len(trainers), TRAINERS_MAX), peer.me in trainers)
    return room.total_bytes(spec.rounds, peer.driver.payload_bytes)


def _held(waiting: QueuedJob, spec: JobSpec, voters: VoterSet) -> str:
    return (
        f"{len(voters.members & set(waiting.start_model_holders))} of {voters.quorum}" if spec.initial_model is not None else ""
    )


def _data(spec: JobSpec) -> str:
    return spec.data.hex() if spec.data else LOCAL_DATA if spec.resolved_objective.reads_text else ""


def _origin(spec: JobSpec, state: LedgerState) -> str:
    told: str = (
        import_object(spec.resolved_objective.data_origin)(state, spec.data) if spec.resolved_objective.data_origin else ""
    )
    return told


def describe_machine_time(key: bytes, job: Job, spec: JobSpec) -> str:
    """Return a text with two estimates: the share of compute that a machine spends on its own steps, and the network's speedup.

    The speedup is relative to one machine. The text is empty for a single trainer and for an objective that needs no worker.
    """
    trainers = len(job.trainers)
    if trainers < 2 or not spec.resolved_objective.needs_worker:
        return ""
    replays = replays_per_round(key, job, spec)
    gain = trainers / (1 + replays)
    spent = f"a machine spends {1 / (1 + replays):.0%} of its compute on its own steps"
    spent += f" and {replays / (1 + replays):.0%} on re-execution ({replays:.2g} updates a round)" if replays else ""
    if gain <= 1:
        return f"{spent}: in the same time, {trainers} machines process no more samples than one machine alone"
    more = f"{gain:.1f} times the samples of one, without waiting times"
    return f"{spent}: in the same time, {trainers} machines process {more}; {BENCHMARK_REFERENCE}"


def replays_per_round(key: bytes, job: Job, spec: JobSpec) -> float:
    """Return the mean number of updates that one worker re-executes in a round of this job, if no peer is faulty."""
    terms = replace(job.round_terms(key), reexecutors=frozenset(job.reexecutors), trainers_to_vouch_for=frozenset(job.trainers))
    vouched = sum(vouches_needed(terms, trainer) for trainer in job.trainers) / max(1, len(job.reexecutors))
    if spec.audit is not AuditMode.SAMPLED:
        return vouched if spec.audit is AuditMode.FULL else 0.0
    drawn = spec.audit_rate * spec.auditors * len(job.trainers) / max(1, len(job.reexecutors))
    closing = spec.final_full_audit_rounds / spec.rounds
    return drawn * (1 - closing) + vouched * closing
