"""What this peer's role does in the open rounds: training, judging, measuring, each cancelled when its round closes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Protocol

import trio

from ledger.audits.loss_commitments import LossOpening
from ledger.jobs import Job, JobPhase
from ledger.ledger_state import CurrentState
from peer.node.future_messages import RoundKey
from peer.node.open_rounds import OpenRounds, RoundEffects
from peer.runtime.disk_space import CHECK_SECONDS, DiskSpaceMonitor
from peer.runtime.rounds.audit_backpressure import AuditBackpressure
from peer.runtime.rounds.loss_spikes import LossHistory
from peer.runtime.telemetry.event_log import EventLog
from peer.settings.data_directory import storage_errors
from protocol import codec
from protocol.errors import FolkmootError, MissingBlobError, RemoteProtocolError, StorageError
from protocol.identity import Signed
from protocol.messages import Proposal
from protocol.units import display_round_number
from protocol.verdicts import Verdict
from storage.disk_blob_store import DiskBlobStore
from storage.durable_files import skip_without_descriptors
from storage.ledger_store import LedgerStore
from training.job_spec import JobSpec
from training.model_store import JobModelStore
from training.round_context import EVALUATION_SECONDS, REPLAYS, TRAINING_NATS, OpenRoundContext, RoundParticipant
from transport.connections.connection_manager import ConnectionManager

_OnProposal = Callable[[RoundKey, OpenRoundContext, Signed, Proposal], Awaitable[None]]


class ActionRunner(Protocol):
    """The driver, as slow work reports to it."""

    def now(self) -> float:
        """Seconds since the epoch."""

    async def run_action(self, do: Callable[[], RoundEffects | None]) -> None:
        """Runs `do` between two turns; returns when what it said is durable and sent."""


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
        driver: ActionRunner,
        applied: CurrentState,
        payload_bytes: int = 0,
    ) -> None:
        self.participant = role
        self._me, self._rounds, self._store, self._blobs, self._host = me, rounds, store, blobs, host
        self._network, self._events, self._driver = network, event_log, driver
        self._applied, self._audit_backpressure = applied, AuditBackpressure(me, network, applied)
        self.disk_space = DiskSpaceMonitor(me, store.path.parent, host, event_log, applied, payload_bytes)
        self._open: dict[RoundKey, OpenRoundContext] = {}
        self._working: dict[RoundKey, trio.Nursery] = {}
        self._checking: set[tuple[RoundKey, bytes]] = set()
        self._reexecuting: set[tuple[RoundKey, bytes]] = set()
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
        self._checking = {entry for entry in self._checking if entry[0] != key}
        self._reexecuting = {entry for entry in self._reexecuting if entry[0] != key}

    def finish_job(self, key: RoundKey, job: Job) -> None:
        """No round opens any more in which the job's last model would be measured."""
        self._nursery.start_soon(self._guarded, "measuring", self.participant.observe_round, self.make_context(key, job))
        self._nursery.start_soon(trio.to_thread.run_sync, self._delete_old_files, key, job)

    def make_context(self, key: RoundKey, job: Job) -> OpenRoundContext:
        """What a role sees of the job's open round, or of a finished job."""

        async def publish(proposal: Proposal, opening: LossOpening | None) -> None:
            await self._driver.run_action(lambda: self._rounds.publish_proposal(proposal, self._driver.now(), opening))

        async def begin(trainer: bytes) -> None:
            self._replays[key] += 1
            self._store.queue_measurements(*key, {REPLAYS: self._replays[key]})
            await self._driver.run_action(lambda: self._rounds.record_replay_start(key, trainer))

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
            make_loss_opening=partial(self._rounds.make_loss_opening, *key),
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
            text = f"{what} in round {display_round_number(opened.number)} failed: {error}"
            self._events.add("warning", text, job=opened.job, round=opened.number)

    def _delete_old_files(self, key: RoundKey, job: Job) -> None:
        """Deletes what nobody needs any more: old models, buffers, and what trainers go on from behind the last accepted."""
        anchors, is_over = [anchor.round for anchor in job.anchors], job.phase is JobPhase.FINISHED
        with skip_without_descriptors("the deletion of old models"):
            self._host.prune_models(*key, JobSpec.decode(job.spec), self._audited(key[0]), anchors, is_over)
        self.delete_expired_files()

    def _audited(self, job: bytes) -> frozenset[int]:
        """The rounds of which proposals may still be replayed."""
        audits = self._applied.current.audits.jobs.get(job)
        return frozenset(audits.rounds) if audits else frozenset()

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
            for trainer, signed in book.proposals.items():
                if trainer not in book.verdicts:
                    self._begin(self._checking, self._check, key, signed)
                elif trainer in book.vouching.assigned_at and trainer not in book.vouching.own_judgements:
                    self._begin(self._reexecuting, self._reexecute, key, signed)

    def _begin(self, begun: set[tuple[RoundKey, bytes]], work: _OnProposal, key: RoundKey, signed: Signed) -> None:
        if (key, signed.signer) not in begun:
            begun.add((key, signed.signer))
            proposal = codec.decode_message(signed.body, (Proposal,))
            self._working[key].start_soon(work, key, self._open[key], signed, proposal)

    async def _check(self, key: RoundKey, opened: OpenRoundContext, signed: Signed, proposal: Proposal) -> None:
        verdict = await self._verdict(
            "checking", partial(self.participant.check_proposal, signed=signed, proposal=proposal), opened
        )
        await self._driver.run_action(lambda: self._rounds.record_verdict(key, signed.signer, verdict, self._driver.now()))

    async def _reexecute(self, key: RoundKey, opened: OpenRoundContext, signed: Signed, proposal: Proposal) -> None:
        work = partial(self.participant.reexecute, trainer=signed.signer, proposal=proposal)
        verdict = await self._verdict("re-executing", work, opened)
        await self._driver.run_action(lambda: self._rounds.record_replay_verdict(key, signed.signer, verdict, self._driver.now()))

    async def _verdict(
        self, what: str, work: Callable[[OpenRoundContext], Awaitable[Verdict]], opened: OpenRoundContext
    ) -> Verdict:
        """The result of this work; UNJUDGED if it fails."""
        verdict = Verdict.UNJUDGED

        async def judge(opened: OpenRoundContext) -> None:
            nonlocal verdict
            verdict = await work(opened)

        await self._guarded(what, judge, opened)
        return verdict


def _figure(name: str, value: float, number: int, unit: str) -> str:
    """Held-out figures are of the model with which a round begins. `unit` is that of the training loss."""
    if name.startswith("training_"):
        return f"in round {display_round_number(number)}: training loss {value:.4f} {unit}"
    if name == "worker_seconds":
        return f"in round {display_round_number(number)}: the worker took {value:.1f} s"
    if name == EVALUATION_SECONDS:
        return f"before round {display_round_number(number)}: measuring took {value:.1f} s"
    if name == "held_out_bits_per_byte":
        return f"before round {display_round_number(number)}: held-out loss {value:.3f} bits/byte"
    return f"before round {display_round_number(number)}: {name.replace('_', ' ')} {value:.4g}"
