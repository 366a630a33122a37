"""What this peer's role does in the open rounds: training, judging, measuring, each cancelled when its round closes."""

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
from storage.disk_blob_store import DiskBlobStore
from storage.durable_files import skip_without_descriptors
from storage.ledger_store import LedgerStore
from training.job_disk_space import job_disk_space
from training.job_spec import JobSpec
from training.model_store import JobModelStore
from training.round_context import EVALUATION_SECONDS, REPLAYS, TRAINING_NATS, OpenRoundContext, RoundParticipant
from transport.connections.connection_manager import ConnectionManager

LOSS_ROUNDS_KEPT = 64  # more than a rollback undoes, and the rounds before

RunAction = Callable[[Callable[[], RoundEffects | None]], Awaitable[None]]  # of the driver: see `Driver.run_action`
_Judges = Callable[[OpenRoundContext], Awaitable[Verdict]]
_RecordsVerdict = Callable[[OpenRounds, RoundKey, bytes, Verdict, float], None]

# Payloads of so many rounds must fit before a round is trained. Every round looks anew: a long job is not refused for its end.
ROUNDS_AHEAD = 100
RESERVED_BYTES = 512 << 20  # that a job leaves for the ledger and all else: a full disk ends the peer
CHECK_SECONDS = 10.0  # until a peer that has no room looks again


class RoundExecutor:
    """`run` it once; `open_round` and `close_round` follow the applied state. What a role finds out goes to the driver."""

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
        self._begun: set[tuple[RoundKey, bytes, str]] = set()  # judgements: round, trainer, and what is done
        self._replays = Counter[RoundKey]()  # re-executions begun
        self.loss_history, self.loss_recorded = LossHistory(), trio.Event()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(self._audit_backpressure.run)
            task_status.started()
            await trio.sleep_forever()

    def replace_rounds(self, rounds: OpenRounds) -> None:
        """Everything that was open is over: the peer goes on from a restored state, with these rounds."""
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
        """No round opens any more in which the job's last model would be measured."""
        self._nursery.start_soon(self._guarded, "measuring", self.participant.observe_round, self.make_context(key, job))
        self._nursery.start_soon(trio.to_thread.run_sync, self._delete_old_files, key, job)

    def make_context(self, key: RoundKey, job: Job) -> OpenRoundContext:
        """What a role sees of the job's open round, or of a finished job."""

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
        )

    async def _work_on(self, key: RoundKey, job: Job, opened: OpenRoundContext, spoken: bool) -> None:
        """Everything this peer's role does in one round, which may be closed, or given to others, before this starts."""
        if self._open.get(key) is not opened:
            return
        self._nursery.start_soon(self._guarded, "measuring", self.participant.observe_round, opened)
        async with trio.open_nursery() as self._working[key]:
            self.judge_proposals()
            if opened.me in opened.terms.trainers and not spoken:
                self._working[key].start_soon(self._train, job, opened)
            await self.disk_space.check_job(opened.job, job)
            await trio.to_thread.run_sync(self._delete_old_files, key, job)  # beside the work: nobody waits for it
            await trio.sleep_forever()

    async def _train(self, job: Job, opened: OpenRoundContext) -> None:
        """Waits for room on the disk, as the look of the round before found it."""
        while self.disk_space.is_short_for(opened.job):
            await trio.sleep(CHECK_SECONDS)
            await self.disk_space.check_job(opened.job, job)
        await self._guarded("training", self.participant.propose, opened)

    async def _guarded(self, what: str, work: Callable[[OpenRoundContext], Awaitable[None]], opened: OpenRoundContext) -> None:
        """A role may fail in a round; the peer goes on, unless its disk fails."""
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
        """Deletes what nobody needs any more: old models, buffers, and what trainers go on from behind the last accepted."""
        anchors, is_over = [anchor.round for anchor in job.anchors], job.phase is JobPhase.FINISHED
        with skip_without_descriptors("the deletion of old models"):
            audits = self._applied.current.audits.jobs.get(key[0])
            audited = frozenset(audits.rounds) if audits else frozenset[int]()  # rounds of which proposals may still be replayed
            self._host.prune_models(*key, JobSpec.decode(job.spec), audited, anchors, is_over)
        self.delete_expired_files()

    def delete_expired_files(self) -> None:
        """It may run in a thread."""
        keep: set[bytes | None] = set()
        for opened in list(self._open.values()):
            for record in opened.model.records.values():
                keep |= {record.buffer, record.inner}
        for book in list(self._rounds.books.values()):
            for signed in list(book.proposals.values()):
                proposal = codec.decode_message(signed.body, (Proposal,))
                keep |= {proposal.buffer, proposal.inner, *self._declared(proposal)}
        with skip_without_descriptors("the deletion of files that have passed"):
            self._blobs.delete_unowned({digest for digest in keep if digest is not None})

    def _declared(self, proposal: Proposal) -> Iterable[bytes]:
        """The blobs that the declaration of a proposal names; none if it is unsound."""
        opened = self._open.get((proposal.job, proposal.round))
        try:
            return opened.spec.declared_blobs(proposal.declaration) if opened else ()
        except RemoteProtocolError:
            return ()

    def judge_proposals(self) -> None:
        """Begins the checks of proposals that are new here, and the re-executions that this peer is called for."""
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
        """Gives the driver the result of this work; UNJUDGED if it fails."""
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
    """This trainer's last losses in each job. Every trainer sees a lie that undoes much of what was learned, drawn or not."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[bytes, dict[int, float]] = OrderedDict()

    def record_loss(self, job: bytes, number: int, loss: float) -> None:
        """`loss` of this trainer in that round; infinite if it is no number."""
        losses = self._jobs.pop(job, {}) | {number: loss}
        self._jobs[job] = dict(sorted(losses.items())[-LOSS_ROUNDS_KEPT:])
        while len(self._jobs) > RUNNING_MAX:
            self._jobs.popitem(last=False)

    def losses(self, job: bytes, undone: Iterable[tuple[int, int]]) -> dict[int, float]:
        """By round, but for those that are undone. `undone`: first and last of each line of rounds."""
        known, lines = self._jobs.get(job, {}), list(undone)
        return {of: loss for of, loss in known.items() if not any(first <= of <= last for first, last in lines)}


def _figure(name: str, value: float, number: int, unit: str) -> str:
    """Held-out figures are of the model with which a round begins. `unit` is that of the training loss."""
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
    blocks_training: bool  # there is not even room for the next rounds


@dataclass
class DiskSpaceMonitor:
    """`check_job` before a job begins, and in each of its rounds."""

    me: bytes
    folder: Path  # of all data
    host: JobModelStore
    events: EventLog
    applied: CurrentState
    payload_bytes: int = 0  # of a job's old rounds that stay; 0: all
    free: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free
    _lacks: dict[bytes, DiskShortage] = field(default_factory=dict)  # by job

    @property
    def shortage_text(self) -> str:
        """For people: what does not fit; empty where everything does."""
        going_on = self.applied.current.jobs.unfinished()
        return "; ".join(lack.text for key, lack in self._lacks.items() if key in going_on)

    def is_short_for(self, key: bytes) -> bool:
        """Whether this peer must not train the job, as far as it has looked."""
        return key in self._lacks and self._lacks[key].blocks_training

    async def check_job(self, key: bytes, job: Job) -> None:
        """What has changed is told."""
        found = await trio.to_thread.run_sync(self._lack, key, job)
        going_on, before = self.applied.current.jobs.unfinished(), self._lacks.get(key)
        self._lacks = {of: lack for of, lack in self._lacks.items() if of != key and of in going_on}
        if found is None and before is not None:
            self.events.add("job", f"job {job.name} fits on this peer's disk now", job=key)
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
        beside, free = max(0, room.models + room.own - here) + RESERVED_BYTES, self.free(self.folder)
        stays = partial(room.payload_bytes, bytes_max=self.payload_bytes)
        kept = stays(job.round)
        whole = beside + stays(job.round + left) - kept
        if free >= whole:
            return None
        for_now = free < beside + stays(job.round + min(left, ROUNDS_AHEAD)) - kept
        lacks = f"job {job.name} may take {format_bytes(whole)} more of this peer's disk, and {format_bytes(free)} are free"
        refuses = "this peer does not train it until there is room"
        return DiskShortage(f"{lacks}: {refuses if trains and for_now else 'free some before the disk is full'}", for_now)


def _size(folder: Path) -> int:
    """Files and folders come and go meanwhile, and some files have two names."""
    sizes = {}
    for inside, _, names in os.walk(folder):  # it passes over folders that are gone
        for name in names:
            with contextlib.suppress(OSError):
                found = os.lstat(os.path.join(inside, name))
                sizes[found.st_ino] = found.st_size
    return sum(sizes.values())
