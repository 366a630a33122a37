"""The work of this peer's role in open rounds: training, judging and evaluation. The end of a round cancels its tasks."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import trio

from ledger.audits.loss_commitments import LossOpening
from ledger.jobs import RUNNING_MAX, Job, JobPhase
from ledger.ledger_state import CurrentState
from peer.node.future_messages import RoundKey
from peer.node.open_rounds import OpenRounds, RoundEffects
from peer.runtime.audit_backpressure import AuditBackpressure
from peer.runtime.telemetry.event_log import EventLog
from peer.settings.data_directory import storage_errors
from protocol import codec
from protocol.errors import FolkmootError, MissingBlobError, RemoteProtocolError, StorageError
from protocol.identity import Signed
from protocol.messages import Proposal
from protocol.units import display_round_number, format_bytes
from protocol.verdicts import Verdict
from storage.batch_store import BatchStore
from storage.disk_blob_store import DiskBlobStore
from storage.durable_files import skip_without_descriptors
from storage.ledger_store import LedgerStore
from training.job_disk_space import job_disk_space
from training.job_spec import JobSpec
from training.model_store import ROUNDS_KEPT, JobModelStore
from training.round_context import EVALUATION_SECONDS, REPLAYS, TRAINING_NATS, OpenRoundContext, RoundParticipant
from transport.connections.connection_manager import ConnectionManager

LOSS_ROUNDS_KEPT = 64  # last rounds of a job whose losses stay: more than a rollback undoes, and earlier rounds for comparison

RunAction = Callable[[Callable[[], RoundEffects | None]], Awaitable[None]]  # type of `Driver.run_action`
_Judges = Callable[[OpenRoundContext], Awaitable[Verdict]]
_RecordsVerdict = Callable[[OpenRounds, RoundKey, bytes, Verdict, float], None]

# Next rounds of a job whose payloads must fit on the disk before a trainer computes. The check is repeated in each round, so a
# long job can begin before the disk has room for all rounds.
ROUNDS_AHEAD = 100
RESERVED_BYTES = 512 << 20  # bytes of the disk that jobs must leave for the ledger and other data: a full disk stops the peer
CHECK_SECONDS = 10.0  # seconds between checks while the disk lacks room


class RoundExecutor:
    """The tasks of this peer's role (trainer or voter) in open rounds.

    `run` is called once. `open_round` and `close_round` follow the applied state. Verdicts and proposals of the role go to the
    driver.
    """

    def __init__(
        self,
        me: bytes,
        role: RoundParticipant,
        rounds: OpenRounds,
        store: LedgerStore,
        blobs: DiskBlobStore,
        host: JobModelStore,
        network: ConnectionManager,
        event_log: EventLog,
        now: Callable[[], float],
        run_action: RunAction,
        applied: CurrentState,
        payload_bytes: int = 0,
    ) -> None:
        self.participant = role
        self._me, self._rounds, self._store, self._blobs, self._host = me, rounds, store, blobs, host
        self._network, self._events, self._now, self._run_action = network, event_log, now, run_action
        self._applied, self._audit_backpressure = applied, AuditBackpressure(me, network, applied)
        self.disk_space = DiskSpaceMonitor(me, store.path.parent, host, event_log, applied, payload_bytes)
        self._open: dict[RoundKey, OpenRoundContext] = {}
        self._working: dict[RoundKey, trio.Nursery] = {}
        # Checks and re-executions that have begun: (round, trainer, kind of work).
        self._begun: set[tuple[RoundKey, bytes, str]] = set()
        self._replays = Counter[RoundKey]()  # round -> number of re-executions that have begun
        self.loss_history, self.loss_recorded = LossHistory(), trio.Event()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(self._audit_backpressure.run)
            task_status.started()
            await trio.sleep_forever()

    def replace_rounds(self, rounds: OpenRounds) -> None:
        """Close all open rounds. The peer continues from a restored state, whose open rounds are `rounds`."""
        for key in list(self._open):
            self.close_round(key)
        self._rounds = rounds

    def open_round(self, key: RoundKey, job: Job, spoken: bool) -> None:
        self._open[key] = self.make_context(key, job)
        for over in [of for of in self._replays if of not in self._open]:
            del self._replays[over]
        self._nursery.start_soon(self._work_on, key, job, self._open[key], spoken)

    def close_round(self, key: RoundKey) -> None:
        self._open.pop(key)
        if key in self._working:
            self._working.pop(key).cancel_scope.cancel()
        self._blobs.release_owner(key)
        self._begun = {entry for entry in self._begun if entry[0] != key}

    def finish_job(self, key: RoundKey, job: Job) -> None:
        """Evaluate the last model of a finished job, since no further round evaluates it, and delete the job's old files."""
        self._nursery.start_soon(self._guarded, "measuring", self.participant.observe_round, self.make_context(key, job))
        self._nursery.start_soon(trio.to_thread.run_sync, self._delete_old_files, key, job)

    def make_context(self, key: RoundKey, job: Job) -> OpenRoundContext:
        """Return the context with which the role works on the job's open round, or on the model of a finished job."""

        async def publish(proposal: Proposal, opening: LossOpening | None) -> None:
            await self._run_action(lambda: self._rounds.publish_proposal(proposal, self._now(), opening))

        async def begin(trainer: bytes) -> None:
            self._replays[key] += 1
            self._store.queue_measurements(*key, {REPLAYS: self._replays[key]})
            await self._run_action(lambda: self._rounds.record_replay_start(key, trainer))

        async def measured(figures: Mapping[str, float]) -> None:
            if TRAINING_NATS in figures:
                self.loss_history.record_loss(*key, figures[TRAINING_NATS])
                self.loss_recorded.set()
                self.loss_recorded = trio.Event()
            figures = {name: value for name, value in figures.items() if math.isfinite(value)}
            if job.phase is JobPhase.RUNNING:
                self._store.queue_measurements(*key, figures)
            else:
                await trio.to_thread.run_sync(self._store.save_measurements, *key, figures)
            for name, value in figures.items():
                text = _figure(name, value, key[1], JobSpec.decode(job.spec).resolved_objective.loss_unit)
                self._events.add_detail("measured", text, job=key[0], round=key[1], name=name, value=value)

        async def ready() -> None:
            audits = self._host.terms_of_spec(job.spec).audits
            if audits is not None:
                await self._audit_backpressure.wait_to_propose(
                    JobSpec.decode(job.spec), audits.served_ms(len(job.reexecutors)) / 1_000
                )

        return OpenRoundContext(
            me=self._me,
            terms=job.round_terms(key[0]),
            spec=JobSpec.decode(job.spec),
            model=self._host.open_model(*key),
            model_directory=self._host.round_directory(*key),
            blobs=self._blobs,
            fetch=self._network.fetch_blob,
            wait_to_propose=ready,
            make_loss_opening=partial(self._rounds.secrets.make_opening, *key),
            publish_proposal=publish,
            record_replay_start=begin,
            record_metrics=measured,
            brief=job.brief,
        )

    async def _work_on(self, key: RoundKey, job: Job, opened: OpenRoundContext, spoken: bool) -> None:
        """Run the role's work in one round, unless the round was closed or renewed before this task started."""
        if self._open.get(key) is not opened:
            return
        self._nursery.start_soon(self._guarded, "measuring", self.participant.observe_round, opened)
        async with trio.open_nursery() as self._working[key]:
            self.judge_proposals()
            if opened.me in opened.terms.trainers and not spoken:
                self._working[key].start_soon(self._train, job, opened)
            await self.disk_space.check_job(opened.job, job)
            # Checks and training run in other tasks and do not wait for the deletion.
            await trio.to_thread.run_sync(self._delete_old_files, key, job)
            await trio.sleep_forever()

    async def _train(self, job: Job, opened: OpenRoundContext) -> None:
        """Wait until the latest check finds room on the disk, then compute and publish the update."""
        while self.disk_space.is_short_for(opened.job):
            await trio.sleep(CHECK_SECONDS)
            await self.disk_space.check_job(opened.job, job)
        await self._guarded("training", self.participant.propose, opened)

    async def _guarded(self, what: str, work: Callable[[OpenRoundContext], Awaitable[None]], opened: OpenRoundContext) -> None:
        """Run `work` on the round. If it fails, add a warning to the events and continue.

        Raises `StorageError` if the disk failed.
        """
        try:
            with storage_errors(self._store.path.parent):
                await work(opened)
        except FolkmootError as error:
            if isinstance(error, StorageError) and not isinstance(error, MissingBlobError):
                raise
            self._events.add(
                "warning",
                f"{what} in round {display_round_number(opened.number)} failed: {error}",
                job=opened.job,
                round=opened.number,
            )

    def _delete_old_files(self, key: RoundKey, job: Job) -> None:
        """Delete unneeded files: old models, buffers, and optimizer state from before the last accepted proposals."""
        self.delete_old_models(key, job)
        self.delete_expired_files()

    def delete_old_models(self, key: RoundKey, job: Job) -> None:
        """Delete models of a job that nothing needs at this round. This method may run in a thread."""
        earlier, is_over = [model.round for model in (*job.anchors, *job.saved_models)], job.phase is JobPhase.FINISHED
        with skip_without_descriptors("the deletion of old models"):
            audits = self._applied.current.audits.jobs.get(key[0])
            # Closed rounds whose proposals may still be audited.
            audited = frozenset(audits.rounds) if audits else frozenset[int]()
            self._host.prune_models(*key, JobSpec.decode(job.spec), audited, earlier, is_over)

    def delete_expired_files(self) -> None:
        """Delete temporary buffers and optimizer state that no open round needs. This method may run in a thread."""
        keep: set[bytes | None] = set()
        for opened in list(self._open.values()):
            for record in opened.model.records.values():
                keep |= {record.buffer, record.inner}
        for book in list(self._rounds.books.values()):
            for signed in list(book.proposals.values()):
                proposal = codec.decode_message(signed.body, (Proposal,))
                keep |= {proposal.buffer, proposal.inner, *self._declared(proposal)}
        with skip_without_descriptors("the deletion of unneeded files"):
            self._blobs.delete_unowned({digest for digest in keep if digest is not None})

    def _declared(self, proposal: Proposal) -> Iterable[bytes]:
        """Return the digests of blobs that a proposal's declaration names, or no digest if the declaration is invalid."""
        opened = self._open.get((proposal.job, proposal.round))
        try:
            return opened.spec.declared_blobs(proposal.declaration) if opened else ()
        except RemoteProtocolError:
            return ()

    def judge_proposals(self) -> None:
        """Start the checks of new proposals, and the re-executions that are assigned to this peer."""
        for job, book in self._rounds.books.items():
            key = (job, book.terms.round)
            if book.me is None or key not in self._working:
                continue
            opened = self._open[key]
            for trainer, signed in book.proposals.items():
                check_entry, replay_entry = (key, trainer, "checking"), (key, trainer, "re-executing")
                is_called = trainer in book.vouching.assigned_at and trainer not in book.vouching.own_judgements
                if trainer not in book.verdicts and check_entry not in self._begun:
                    self._begun.add(check_entry)
                    check = partial(self.participant.check_proposal, signed=signed, proposal=_opened(signed))
                    self._working[key].start_soon(self._judge, "checking", opened, trainer, check, OpenRounds.record_verdict)
                elif trainer in book.verdicts and is_called and replay_entry not in self._begun:
                    self._begun.add(replay_entry)
                    replay = partial(self.participant.reexecute, trainer=trainer, proposal=_opened(signed))
                    record = OpenRounds.record_replay_verdict
                    self._working[key].start_soon(self._judge, "re-executing", opened, trainer, replay, record)

    async def _judge(self, what: str, opened: OpenRoundContext, trainer: bytes, work: _Judges, record: _RecordsVerdict) -> None:
        """Run `work`, and give its verdict to the driver, or UNJUDGED if it fails."""
        verdict = Verdict.UNJUDGED

        async def judge(opened: OpenRoundContext) -> None:
            nonlocal verdict
            verdict = await work(opened)

        await self._guarded(what, judge, opened)
        key = opened.job, opened.number
        await self._run_action(lambda: record(self._rounds, key, trainer, verdict, self._now()))


def _opened(signed: Signed) -> Proposal:
    return codec.decode_message(signed.body, (Proposal,))


class LossHistory:
    """The training losses of this trainer's last rounds in each job.

    A jump of the loss shows a false update that does much damage.
    """

    def __init__(self) -> None:
        self._jobs: OrderedDict[bytes, dict[int, float]] = OrderedDict()

    def record_loss(self, job: bytes, number: int, loss: float) -> None:
        """Record this trainer's loss of a round. Infinity stands for an undefined loss."""
        losses = self._jobs.pop(job, {}) | {number: loss}
        self._jobs[job] = dict(sorted(losses.items())[-LOSS_ROUNDS_KEPT:])
        while len(self._jobs) > RUNNING_MAX:
            self._jobs.popitem(last=False)

    def losses(self, job: bytes, undone: Iterable[tuple[int, int]]) -> dict[int, float]:
        """Return the job's losses by round, without undone rounds. `undone` has the (first, last) round of each undone range."""
        known, lines = self._jobs.get(job, {}), list(undone)
        return {of: loss for of, loss in known.items() if not any(first <= of <= last for first, last in lines)}


def _figure(name: str, value: float, number: int, unit: str) -> str:
    """Return a line for people about one measurement of a round. `unit` is the unit of the training loss.

    Held-out figures describe the model before the round.
    """
    shown = display_round_number(number)
    if name.startswith("training_"):
        return f"in round {shown}: training loss {value:.4f} {unit}"
    known = {
        "worker_seconds": f"in round {shown}: the worker took {value:.1f} s",
        EVALUATION_SECONDS: f"before round {shown}: measuring took {value:.1f} s",
        "held_out_bits_per_byte": f"before round {shown}: held-out loss {value:.3f} bits/byte",
    }
    return known.get(name, f"before round {shown}: {name.replace('_', ' ')} {value:.4g}")


@dataclass(frozen=True, slots=True)
class DiskShortage:
    text: str
    blocks_training: bool  # True if the disk lacks room even for the next `ROUNDS_AHEAD` rounds


@dataclass
class DiskSpaceMonitor:
    """The checks of the disk space that jobs need. `check_job` is called before a job begins and in each of its rounds."""

    me: bytes
    folder: Path  # folder with all data of the peer
    host: JobModelStore
    events: EventLog
    applied: CurrentState
    payload_bytes: int = 0  # bound of a job's stored payloads; 0 means no bound
    free: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free
    batches: BatchStore | None = None  # kept data of client runs, which may grow to their bound beside the job
    _lacks: dict[bytes, DiskShortage] = field(default_factory=dict)  # job -> shortage that the latest check found

    @property
    def shortage_text(self) -> str:
        """A line for people about unfinished jobs that do not fit on the disk, or an empty string."""
        going_on = self.applied.current.jobs.unfinished()
        return "; ".join(lack.text for key, lack in self._lacks.items() if key in going_on)

    def is_short_for(self, key: bytes) -> bool:
        """Return whether the disk lacks room for training this job, according to the latest check."""
        return key in self._lacks and self._lacks[key].blocks_training

    async def check_job(self, key: bytes, job: Job) -> None:
        """Check the disk space for a job, and add an event if the result has changed."""
        found = await trio.to_thread.run_sync(self._lack, key, job)
        going_on, before = self.applied.current.jobs.unfinished(), self._lacks.get(key)
        self._lacks = {of: lack for of, lack in self._lacks.items() if of != key and of in going_on}
        if found is None and before is not None:
            self.events.add("job", f"job {job.name} has enough disk space at this peer now", job=key)
        if found is not None:
            self._lacks[key] = found
            if before is None or before.blocks_training is not found.blocks_training:
                self.events.add("warning", found.text, job=key)

    def _lack(self, key: bytes, job: Job) -> DiskShortage | None:
        spec = JobSpec.decode(job.spec)
        if not spec.resolved_objective.needs_worker:
            return None
        trains, left = self.me in job.trainers, job.rounds - job.rounds_in_model
        room = job_disk_space(spec, len(job.trainers), trains)
        here = _size(self.host.round_directory(key, 0).parent) + _size(self.folder / "buffers")
        # The files of earlier saved models are among those that are here, and stay beside the models of the last rounds.
        saved = spec.model_bytes * sum(model.round <= job.round - ROUNDS_KEPT for model in job.saved_models)
        beside, free = max(0, room.models + saved + room.own - here) + RESERVED_BYTES, self.free(self.folder)
        stays = partial(room.payload_bytes, bytes_max=self.payload_bytes)
        kept = stays(job.round)
        whole = beside + stays(job.round + left) - kept + (self.batches.bytes_left if self.batches else 0)
        if free >= whole:
            return None
        for_now = free < beside + stays(job.round + min(left, ROUNDS_AHEAD)) - kept
        lacks = f"job {job.name} may need {format_bytes(whole)} more on the disk of this peer, and {format_bytes(free)} are free"
        refuses = "free some space, until then this peer does not train it"
        return DiskShortage(f"{lacks}: {refuses if trains and for_now else 'free some space before the disk is full'}", for_now)


def _size(folder: Path) -> int:
    """Return the size of all files in a folder in bytes. Files that vanish meanwhile are skipped, and hard links count once."""
    sizes = {}
    for inside, _, names in os.walk(folder):  # `os.walk` skips folders that are deleted meanwhile
        for name in names:
            with contextlib.suppress(OSError):
                found = os.lstat(os.path.join(inside, name))
                sizes[found.st_ino] = found.st_size
    return sum(sizes.values())
