"""The driver of the daemon: one task that feeds all inputs to the node in order and carries out the node's effects.

Messages and results of slow work come into one inbox. The driver gives the waiting items to one step of the `Node`, stores the
step's records with one fsync, then sends its messages. Slow work (applying a block, judging a payload, training) runs in other
tasks and reports through the inbox, so that it never delays a vote.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import trio

from consensus.effects import OutgoingMessage, SendMessage, StepEffects, execute_effects_in_thread, load_restart_state
from consensus.light_client import TrustedBlock, make_light_block
from consensus.pbft.replica import Replica
from consensus.voter_set import VoterSet
from ledger.blocks.application import LedgerApplication
from ledger.jobs import ClosedRound
from ledger.ledger_state import FAILURES_KEPT, CurrentState, LedgerRules, LedgerState, StateTransition, decode_body
from ledger.snapshots.snapshot_assembly import RestoredSnapshot
from peer.node.node import AppliedBlock, Node, NodeInput, RoundChange, RoundEnded, StepAction
from peer.node.open_rounds import RoundEffects, RoundTimings
from peer.runtime.round_executor import RoundExecutor
from peer.runtime.state_sync import StateSync, first_divergent_height, is_snapshot_message
from peer.runtime.telemetry.event_log import EventLog
from peer.runtime.telemetry.node_observer import NodeObserver, key_rotations
from peer.runtime.work_queues import LARGE_BYTES, BlockServer, SignaturePreverifier
from protocol import codec
from protocol.errors import RemoteProtocolError, StorageError
from protocol.identity import Signer, short_id
from protocol.limits import MESSAGE_BYTES_MAX
from protocol.messages import Decision, GetRound, LightBlock, Proposal
from protocol.units import display_round_number
from protocol.verdicts import Verdict, find_verdict_by_label
from storage.disk_blob_store import DiskBlobStore
from storage.ledger_store import LedgerStore, StoredRound
from training.job_spec import JobSpec
from training.model_store import ClosedRoundOutcome, JobModelStore
from training.round_context import RoundParticipant
from transport.connections.connection_manager import ConnectionManager
from transport.network import DataReceived, DuplicateIdentity, NetworkEvent, PeerConnected, PeerDisconnected, Priority

log = logging.getLogger("peer")

# Limits of the driver's inbox: waiting items, and bytes of their messages. While the inbox is full, links are not read
# (backpressure).
INBOX_MAX, INBOX_BYTES_MAX = 512, 4 * MESSAGE_BYTES_MAX
# Decided heights that are not applied; a peer with more was away, and its missed rounds do not measure its speed.
LAG_HEIGHTS_MAX = 2
BATCH_MAX = 64  # items in one step: this bounds the time for which a vote waits for the step's fsync


@dataclass(frozen=True, slots=True)
class AwaitedAction(StepAction):
    """An action of another task that runs inside the driver. `done` is set when the action's effects are durable and sent."""

    done: trio.Event


@dataclass(slots=True)
class _PendingRestore:
    restored: RestoredSnapshot
    links: tuple[LightBlock, ...]
    repairs: bool  # True if the snapshot replaces a wrong state, whose height does not matter
    done: trio.Event
    is_taken: bool = False


class Driver:
    """The driver of one node.

    `run` is called once. Other tasks read the node between steps, and change it only by `run_action`.
    """

    def __init__(
        self,
        signer: Signer,
        rules: LedgerRules,
        applied: CurrentState,
        store: LedgerStore,
        blobs: DiskBlobStore,
        host: JobModelStore,
        network: ConnectionManager,
        role: RoundParticipant,
        event_log: EventLog,
        anchor: TrustedBlock | None = None,
        payload_bytes: int = 0,
    ) -> None:
        """Create a driver.

        `anchor` is a block that is known to be decided; the history of other peers must contain it. `payload_bytes` bounds the
        stored payloads of each job, and 0 means no bound.
        """
        self.signer, self.store, self.blobs, self.host = signer, store, blobs, host
        self.network, self.events = network, event_log
        # Number of exports that copy payloads now. No payload is deleted meanwhile.
        self.payload_bytes, self.running_exports = payload_bytes, 0
        self.rules, self.applied, self.chain_id = rules, applied, rules.chain_id
        self._anchor_height = anchor.height if anchor else 0
        self._started_wall, self._started = time.time(), trio.current_time()
        self._slept_before, self._slept = _seconds_slept(), 0.0
        self.node = self._restored_node()
        self.observer = NodeObserver(event_log, self.now, self.state)
        self.round_executor = RoundExecutor(
            signer.public,
            role,
            self.node.rounds,
            store,
            blobs,
            host,
            network,
            event_log,
            self.now,
            self.run_action,
            applied,
            payload_bytes,
        )
        self.state_sync = StateSync(
            rules,
            store,
            host,
            network,
            event_log,
            anchor,
            applied,
            self.now,
            self.restore_state,
            self.drop_peer,
        )
        self._answering = BlockServer(store, network)
        self._inbox_send, self._inbox = trio.open_memory_channel[NodeInput](INBOX_MAX)
        self._inbox_bytes, self._inbox_room = 0, trio.Event()
        self._verification = SignaturePreverifier(rules, network, applied, self._deliver)
        self._decided = trio.Event()  # set, and replaced by a new event, when blocks were decided
        self._deadline: float | None = None
        self.block_applied = trio.Event()  # set, and replaced by a new event, when a block was applied
        self._applying, self._applying_ended = trio.CancelScope(), trio.Event()
        self._restores: _PendingRestore | None = None
        self._copied: DuplicateIdentity | None = None  # the notice of a copied key, which a restored node gets again

    def _restored_node(self, measured: RoundTimings | None = None) -> Node:
        """Return a node with the state and the own statements that are in the store."""
        state = self.applied.current
        last = self.store.get_decision(state.height)
        ledger = LedgerApplication(self.rules, self.applied, last.decode().state_root if last else state.state_root)
        spoken = partial(self.store.round_votes, self.signer.public)
        restart = load_restart_state(self.store, state.height)
        accepted = self.store.accepted_proposals
        known = self._anchor_height, measured, time.thread_time
        return Node(self.signer, self.rules, ledger, restart, self.rules.verifier, spoken, accepted, *known)

    def now(self) -> float:
        """Return seconds since the epoch.

        The clock is monotonic: it ignores later changes of the system time, and counts the machine's sleep.
        """
        self._slept = max(self._slept, _seconds_slept() - self._slept_before)
        return self._started_wall + (trio.current_time() - self._started) + self._slept

    @property
    def replica(self) -> Replica:
        return self.node.replica

    @property
    def state(self) -> LedgerState:
        return self.node.state

    # Tasks

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        await trio.to_thread.run_sync(self._recover_models)
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(self._listen)
            self._nursery.start_soon(self._verification.run)
            await self._nursery.start(self.round_executor.run)
            await self._nursery.start(self.state_sync.run)
            await self._step([])
            self._nursery.start_soon(self._apply_decided)
            self._nursery.start_soon(self._answering.run)
            task_status.started()
            while True:
                items = await self._next_items()
                self._note_links(items)
                await self._step(items)
                if self._restores is not None:
                    await self._install_pending_restore(self._restores)

    async def run_action(self, do: Callable[[], RoundEffects | None]) -> None:
        """Run `do` in the driver's next step, and wait until the effects of `do` are durable and sent."""
        done = trio.Event()
        await self._inbox_send.send(AwaitedAction(do, done))
        await done.wait()

    async def _listen(self) -> None:
        async for event in self.network.events:
            if isinstance(event, DataReceived) and is_snapshot_message(event.data):
                self.state_sync.receive_message(event.peer, event.data)
                # Frees the link for its next message; `state_sync` charges the processor time later.
                self.network.worked(event.peer, 0.0)
            elif isinstance(event, DataReceived) and self._verification.should_preverify(event):
                self._verification.enqueue_message(event)
            else:
                await self._deliver(event)

    async def _deliver(self, event: NetworkEvent) -> None:
        while self._inbox_bytes > INBOX_BYTES_MAX:
            await self._inbox_room.wait()
        self._inbox_bytes += len(event.data) if isinstance(event, DataReceived) else 0
        await self._inbox_send.send(event)

    def _release_inbox_bytes(self, item: NodeInput) -> NodeInput:
        if isinstance(item, DataReceived):
            self._inbox_bytes -= len(item.data)
            room, self._inbox_room = self._inbox_room, trio.Event()
            room.set()
        return item

    async def _next_items(self) -> list[NodeInput]:
        """Return the items in the inbox. Wait for the first item, but not beyond the node's deadline."""
        await trio.lowlevel.checkpoint()
        items = self._items_here()
        if not items:
            wait = float("inf") if self._deadline is None else max(0.0, self._deadline - self.now())
            with trio.move_on_after(wait):
                items.append(self._release_inbox_bytes(await self._inbox.receive()))
                items += self._items_here()
        return items

    def _items_here(self, count_max: int = BATCH_MAX) -> list[NodeInput]:
        items: list[NodeInput] = []
        while len(items) < count_max:
            try:
                items.append(self._release_inbox_bytes(self._inbox.receive_nowait()))
            except trio.WouldBlock:
                break
        return items

    # One step

    async def _step(self, items: list[NodeInput]) -> None:
        started = time.thread_time()
        turn = self.node.step(items, self.now())
        self._deadline = turn.deadline
        spent = [(peer, seconds) for peer, times in self.node.processor_seconds.items() for seconds in times]
        # The other processor time of a step is charged in equal parts to its items, unless the step contains work of this peer
        # itself.
        rest = (time.thread_time() - started - sum(seconds for _, seconds in spent)) / max(1, len(items))
        rest *= all(isinstance(item, DataReceived | PeerConnected | PeerDisconnected) for item in items)
        for peer, seconds in spent:
            self.network.worked(peer, seconds + rest)
        for item in items:
            if isinstance(item, PeerConnected):
                self.network.charge_cpu(item.peer, rest)
        for fault in turn.faults:
            self.drop_peer(fault.peer, fault.error)
        self.state_sync.check_trusted_block(turn.decided_blocks)
        said = replace(turn, sends=tuple(send for send in turn.sends if isinstance(send, SendMessage)))
        await execute_effects_in_thread(said, self.store, self, trio.to_thread.run_sync)
        for send in turn.sends:
            if not isinstance(send, SendMessage):
                self._answering.enqueue_request(send)
        # The thread of the effects always finishes, but a cancelled driver must stop here: the round executor may be closed.
        await trio.lowlevel.checkpoint_if_cancelled()
        changes = self.node.take_round_changes()
        self._observe_step(turn, changes)
        self._follow_rounds(changes, items)
        for item in items:
            if isinstance(item, AwaitedAction):
                item.done.set()
        self.round_executor.judge_proposals()
        self.state_sync.start_if_needed(self.replica)

    def send(self, to: tuple[bytes, ...] | None, message: OutgoingMessage) -> None:
        data = codec.encode(message)
        priority = Priority.CONTROL if isinstance(message, (GetRound, Decision)) else Priority.VOTE
        if to is None:
            self.network.broadcast(data, priority)
        else:
            for peer in to:
                self.network.send(peer, data, priority)

    def _note_links(self, items: Sequence[NodeInput]) -> None:
        for item in items:
            if isinstance(item, DuplicateIdentity):
                self._copied = item
            elif isinstance(item, PeerConnected | PeerDisconnected):
                what = "connected to" if isinstance(item, PeerConnected) else "lost the link to"
                self._log_about_peer("peer", f"{what} {short_id(item.peer)}", item.peer)

    def drop_peer(self, peer: bytes, error: RemoteProtocolError) -> None:
        self._log_about_peer("warning", f"closed the link to {short_id(peer)}: {error}", peer, reason=error.reason)
        self.network.ban_peer(peer, error)

    def _log_about_peer(self, kind: str, text: str, peer: bytes, **fields: str) -> None:
        """Add an event about a peer. Events about strangers go to the debug log, because they could displace all other events."""
        if self.node.is_stranger(peer):
            log.debug("%s (a stranger)", text)
        else:
            self.events.add(kind, text, peer=peer, **fields)

    def _observe_step(self, turn: StepEffects, changes: Sequence[RoundChange]) -> None:
        opened = {change.key for change in changes if not isinstance(change, RoundEnded)}
        for signer, message in self.node.counted_messages:
            # Own messages of a round that has just opened were read from the disk, and reported before the restart.
            if signer != self.signer.public or (message.job, message.round) not in opened:
                self.observer.report_round_message(signer, message)
        for evidence in turn.evidence:
            self.observer.report_evidence(evidence)
        self.observer.record_step(turn)
        self.observer.record_pending_work(self.replica.awaits_decision)
        self.observer.report_conditions(self.replica, self.rules.why_version_unsupported(self.state))
        self.observer.report_vote_lockout(self.replica.height, self.replica.no_votes_below)
        self.observer.report_muted_rounds(self.node.rounds.muted)
        failures, self.rules.transaction_failures = self.rules.transaction_failures, deque(maxlen=FAILURES_KEPT)
        self.observer.report_failures(f"height {self.replica.height}", failures)
        for _, reason in self.node.dropped_transactions:
            log.debug("a transaction of this peer left the mempool undecided: %s", reason)
        if turn.decided_blocks:
            decided, self._decided = self._decided, trio.Event()
            decided.set()

    # Decisions

    async def _apply_decided(self) -> None:
        """Apply decided blocks in order, also those that an earlier process of this peer has stored."""
        try:
            with self._applying:
                await self._apply_after(self.state)
        finally:
            self._applying_ended.set()

    async def _apply_after(self, state: LedgerState) -> None:
        while True:
            more = self._decided
            while (decided := await trio.to_thread.run_sync(self.store.get_decision, state.height + 1)) is not None:
                await self.state_sync.wait_to_apply()
                block = decided.decode()
                if block.state_root != state.state_root:
                    return  # this peer's state is wrong; the task starts again when a certified state is restored
                last = self.rules.last_supported_height(state)
                if last is not None and block.height > last:
                    return  # only a newer program can apply the block
                # Peers that are behind or do not vote have not verified the signatures in the block.
                if len(block.body) > LARGE_BYTES:
                    await trio.to_thread.run_sync(self._verify_ahead, block.body)
                transition = self.rules.apply_block(state, block)
                before, state = state, transition.finish_state(await self._step_models(transition))
                rounds = [_stored_round(closed, state) for closed in transition.closed_rounds]
                # A thread encodes the state: a block may have changed many rows, which are hashed at this time.
                encoded = await trio.to_thread.run_sync(self.rules.encode_state, state)
                link = make_light_block(decided, VoterSet(state.members.voters))
                save = partial(self.store.save_state, tables=state.tables)
                await trio.to_thread.run_sync(save, state.height, state.state_root, encoded, rounds, link)
                self._discard_forgotten_jobs(before, state)
                await self._inbox_send.send(AppliedBlock(decided, transition, state))
            await more.wait()

    def _discard_forgotten_jobs(self, before: LedgerState, after: LedgerState) -> None:
        """Delete the models of jobs that have left the state, except trained models."""
        for key in before.jobs.jobs.keys() - after.jobs.jobs.keys():
            if not self.rules.jobs_module.has_trained(before.jobs.jobs[key]):
                self.host.discard_job(key)

    def _verify_ahead(self, body: bytes) -> None:
        with contextlib.suppress(RemoteProtocolError):  # `apply_block` reports the same error
            self.rules.preverify_signatures(decode_body(body))

    async def _step_models(self, transition: StateTransition) -> dict[bytes, bytes]:
        """Return the model roots after a block by job.

        Fetches have no timeout, because a quorum has stated that it has the blobs.
        """
        roots: dict[bytes, bytes] = {}
        for job in transition.started_jobs:
            begun = transition.state.jobs.jobs[job]
            spec = JobSpec.decode(begun.spec)
            if spec.initial_model is not None:  # a quorum has attested that it has these parameters
                from training import parameter_blob

                size, voters = parameter_blob.blob_bytes(spec), transition.state.members.voters
                await self.network.fetch_blob(spec.initial_model, size, voters)
                self.blobs.pin_blob(spec.initial_model)
            await self.round_executor.disk_space.check_job(job, begun)
            roots[job] = await trio.to_thread.run_sync(self.host.create_model, job, begun.spec, self.blobs.read_range)
        for job, back in transition.rolled_back.items():
            roots[job] = await trio.to_thread.run_sync(self.host.roll_back, job, back.anchor.round, back.round)
        for closed in transition.model_steps:
            for signed in closed.proposals:
                proposal = codec.decode_message(signed.body, (Proposal,))
                # The payload is pinned before the fetch, so that a stored copy is not deleted meanwhile.
                self.blobs.pin_blob(proposal.payload)
                await self.network.fetch_blob(proposal.payload, proposal.payload_bytes, (signed.signer, *closed.ballots))
                self.blobs.pin_blob(proposal.payload)
            roots[closed.job] = await trio.to_thread.run_sync(self.host.apply_round, closed, self.blobs.read_range)
        return roots

    def _recover_models(self) -> None:
        """Compute models again that were lost when the machine stopped, and discard those of forgotten jobs."""
        for name, job in self.state.jobs.jobs.items():
            judged = partial(_judged_round, self.store, name, job.spec)
            computed = self.host.recover_model(name, job.round, job.model_root, judged, self.blobs.read_range)
            if computed:
                self.events.add(
                    "warning", f"recomputed {computed} rounds of job {job.name} that were missing on the disk", job=name
                )
        self.host.discard_forgotten_jobs(self.state.jobs.jobs.keys())

    # Snapshots

    async def restore_state(self, restored: RestoredSnapshot, links: tuple[LightBlock, ...], repairs: bool) -> bool:
        """Replace the node's state by a snapshot, and wait for the end.

        Return False if applied blocks were faster than the snapshot.
        """
        self._restores = restores = _PendingRestore(restored, links, repairs, trio.Event())
        await self.run_action(lambda: None)  # wakes the driver, which installs the snapshot after the step
        await restores.done.wait()
        return restores.is_taken

    async def _install_pending_restore(self, restores: _PendingRestore) -> None:
        """Install a snapshot and restart the node from the disk. The new node keeps the measured timings of rounds."""
        self._restores = None
        self._applying.cancel()
        await self._applying_ended.wait()
        restores.is_taken = await trio.to_thread.run_sync(self._install, restores)
        self.applied.current = load_state(self.rules, self.store)
        self.node = self._restored_node(self.node.rounds.measured)
        self.round_executor.replace_rounds(self.node.rounds)
        self.observer.record_restored_state(self.state, self.signer.public)
        self._applying, self._applying_ended = trio.CancelScope(), trio.Event()
        self._nursery.start_soon(self._apply_decided)
        here = self._items_here(INBOX_MAX)
        self._note_links(here)
        waiting = [item for item in here if isinstance(item, DataReceived | StepAction)]
        copied = [self._copied] if self._copied else []
        await self._step([*copied, *map(PeerConnected, sorted(self.network.connected_peers())), *waiting])
        applied, self.block_applied = self.block_applied, trio.Event()
        applied.set()
        restores.done.set()

    def _install(self, restores: _PendingRestore) -> bool:
        """Install a snapshot's models, then its state. Models are not used before the state in the store names them."""
        restored = restores.restored
        if restored.is_overtaken(max(self.store.state_roots(), default=0), restores.repairs):
            return False
        restored.install_models()
        state, disproved = restored.state, first_divergent_height(self.store, restored)
        encoded = self.rules.encode_state(state)
        proof = restored.decisions, state.height, state.state_root, encoded, restored.headers, restores.links, disproved
        self.store.restore_snapshot(*proof, tables=state.tables)
        self._discard_forgotten_jobs(self.applied.current, state)
        return True

    # Rounds

    def _follow_rounds(self, changes: Sequence[RoundChange], items: list[NodeInput]) -> None:
        rounds = {change.key: change for change in changes if isinstance(change, RoundEnded)}
        for change in changes:
            if isinstance(change, RoundEnded):
                self.round_executor.close_round(change.key)
            else:
                if change.renewed:
                    self.observer.report_renewed_round(change.key, change.job)
                self.round_executor.open_round(change.key, change.job, change.has_proposed)
        for item in items:
            if isinstance(item, AppliedBlock):
                self.state_sync.add_applied_state(item.state)
                self.observer.report_failures(f"height {item.state.height}", item.transition.failures)
                for key in item.transition.started_jobs:
                    self.observer.report_started_job(key, item.state)
                for closed in item.transition.closed_rounds:
                    ended = rounds.get((closed.job, closed.round))
                    figures = self.observer.record_closed_round(closed, item.state, ended.opened_at if ended else None)
                    if ended is not None and self.replica.height <= item.state.height + LAG_HEIGHTS_MAX:
                        self.observer.check_straggling(closed, item.state, self.signer.public, ended)
                    self.store.queue_measurements(closed.job, closed.round, figures)
                for key in item.transition.ended_jobs:
                    if key in item.state.jobs.jobs:
                        self.round_executor.finish_job((key, item.state.jobs.jobs[key].round), item.state.jobs.jobs[key])
                body = decode_body(item.decided.decode().body)
                for evidence in body.evidence:
                    self.observer.report_expulsion(evidence)
                for old, new in key_rotations(body.transactions):
                    self.observer.report_rotation(old, new)
                self.observer.record_applied_block(item.state)
        if any(isinstance(item, AppliedBlock) for item in items):
            applied, self.block_applied = self.block_applied, trio.Event()
            applied.set()


def load_state(rules: LedgerRules, store: LedgerStore) -> LedgerState:
    """Return the state after the last applied block, or the state of the genesis."""
    state = rules.restore_state(store.encoded_state())
    store.rows.attach_tables(state.tables)
    return state


def _seconds_slept() -> float:
    """Return the seconds that this machine has slept since its start, which Trio's clock does not count.

    Return 0 on systems without CLOCK_BOOTTIME. The result is slightly too small if the process is interrupted between the two
    readings.
    """
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)) - time.monotonic()


def _judged_round(store: LedgerStore, job: bytes, spec: bytes, number: int) -> ClosedRoundOutcome:
    """Return the inputs of a round's model step, from the stored round and the block that closed the round.

    Raises `StorageError` if the round or the block is missing.
    """
    stored = store.closed_round(job, number)
    decided = store.get_decision(stored.height) if stored else None
    if stored is None or decided is None:
        raise StorageError(
            f"cannot recompute round {display_round_number(number)} of job {job.hex()[:8]}: its block is missing on this disk"
        )
    closings = decode_body(decided.decode().body).round_certificates
    (proposals,) = (closing.proposals for closing in closings if (closing.job, closing.round) == (job, number))
    own = JobSpec.decode(spec).resolved_objective.reason_labels
    verdicts = {trainer: find_verdict_by_label(text, own) for trainer, text in stored.verdicts.items()}
    rejected = {trainer: verdict for trainer, verdict in verdicts.items() if verdict not in (None, Verdict.ACCEPT)}
    absent = frozenset(trainer for trainer, verdict in verdicts.items() if verdict is None)
    return ClosedRoundOutcome(job, number, proposals, rejected, absent, stored.brief)


def _stored_round(closed: ClosedRound, state: LedgerState) -> StoredRound:
    outcome = closed.outcome
    verdicts = dict.fromkeys(outcome.accepted, "accept") | dict.fromkeys(outcome.absent, "absent")
    job = state.jobs.jobs[closed.job]
    spec = JobSpec.decode(job.spec)
    verdicts |= {
        trainer: outcome.rejection_reason(trainer, spec.resolved_objective.reason_labels) for trainer in outcome.rejected
    }
    stepped = len(outcome.accepted) >= spec.accepted_min
    return StoredRound(
        closed.job,
        closed.round,
        state.height,
        verdicts,
        closed.ballots,
        stepped,
        job.model_root,
        outcome.vouchers,
        closed.brief,
    )
