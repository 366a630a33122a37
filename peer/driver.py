"""The heart of the daemon: one task through which everything that changes the peer's mind goes, in order.

Messages, timers and results of slow work come into one inbox. Each batch of them is one turn: step, make durable with one fsync,
send. Slow work (applying a block, judging a payload, training) runs beside it and reports back through the inbox, so that it
never delays a vote.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import trio

from consensus import events
from consensus.block import decode_block
from consensus.evidence import Evidence
from consensus.replica import Replica
from consensus.turn import Decided, Send, Turn, merge, persist
from consensus.voters import CachingVerifier, VoterSet
from ledger.blobs import Blobs
from ledger.genesis import Genesis
from ledger.jobs import ClosedRound, Phase
from ledger.ledger import Ledger
from ledger.state import Rules, State, Transition
from ledger.store import Store, StoredRound
from ledger.transactions import Refused
from peer.eventlog import EventLog
from peer.roles.base import Role
from peer.rounds import Outcome as Said
from peer.rounds import RoundKey, Rounds
from peer.witness import Witness
from peer.workshop import Workshop
from protocol import codec
from protocol.errors import RemoteProtocolError
from protocol.identity import Ed25519Verifier, Signed, Signer, open_signed, short_id
from protocol.messages import AGREEMENT, ROUNDS, Ballot, CutOff, GetRound, Proposal, Relay, Transaction
from training.host import ModelHost
from training.spec import JobSpec
from transport.network import Connected, Disconnected, Network, Priority, Received

log = logging.getLogger("peer")

INBOX_MAX = 512  # items that wait for the driver; then the network is not read, which slows the senders down
BATCH_MAX = 64  # items in one turn: bounds how long a vote waits for the fsync
SEEK_ANSWER_SECONDS = 1.0  # GetRound of one peer is answered this often

RELAYED: tuple[type[Any], ...] = (Proposal, Ballot, CutOff, Transaction)


@dataclass(frozen=True, slots=True)
class AppliedBlock:
    decided: Decided
    transition: Transition
    state: State


@dataclass(frozen=True, slots=True)
class Call:
    """Something another task wants done inside the driver; `done` is set when its effects are durable and sent."""

    do: Callable[[], Said | None]
    done: trio.Event


Item = Connected | Disconnected | Received | AppliedBlock | Call


class Driver:
    """`run` it once. Between turns, other tasks may read everything here; they change things only through `call`."""

    def __init__(
        self,
        signer: Signer,
        genesis: Genesis,
        store: Store,
        blobs: Blobs,
        host: ModelHost,
        network: Network,
        role: Role,
        event_log: EventLog,
    ) -> None:
        self.signer, self.store, self.blobs, self.host = signer, store, blobs, host
        self.network, self.events = network, event_log
        self.chain_id = genesis.chain_id
        self.verifier = CachingVerifier(Ed25519Verifier())
        self.rules = Rules(genesis, self.verifier, host)
        self._started_wall, self._started = time.time(), trio.current_time()
        self.ledger = self._restore_ledger()
        self.rounds = Rounds(signer, self.chain_id, self.ledger.books)
        applied = _applied_event(self.state)
        self.replica = Replica(signer, self.chain_id, Ed25519Verifier(), self.ledger, applied, store.load())
        self.witness = Witness(event_log, self.now)
        self.workshop = Workshop(
            signer.public, role, self.rounds, store, blobs, host, network, event_log, call=self.call, now=self.now
        )
        self._inbox_send, self._inbox = trio.open_memory_channel[Item](INBOX_MAX)
        self._decided = trio.Event()  # set and replaced when there is more to apply
        self._deadline: float | None = None
        self._answered: dict[bytes, float] = {}
        self.refused: dict[str, int] = {}
        self.applied = trio.Event()  # set and replaced when a block was applied

    def _restore_ledger(self) -> Ledger:
        encoded = self.store.state()
        state = self.rules.decode_state(encoded) if encoded else self.rules.first_state()
        last = self.store.decision(state.height)
        return Ledger(self.rules, state, decode_block(last.block).state_root if last else state.root)

    def now(self) -> float:
        """Seconds since the epoch by this process's steady clock."""
        return self._started_wall + (trio.current_time() - self._started)

    @property
    def state(self) -> State:
        return self.ledger.state

    # Tasks

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(self._listen)
            self._nursery.start_soon(self._apply_decided)
            await self._nursery.start(self.workshop.run)
            said = Said()
            self._follow_rounds(said)
            await self._perform(said, [])
            task_status.started()
            while True:
                await self._turn(await self._next_items())

    async def call(self, do: Callable[[], Said | None]) -> None:
        """Runs `do` inside the driver's next turn; returns when what it said is durable and sent."""
        done = trio.Event()
        await self._inbox_send.send(Call(do, done))
        await done.wait()

    async def _listen(self) -> None:
        async for event in self.network.events:
            await self._inbox_send.send(event)

    async def _next_items(self) -> list[Item]:
        """What is there, at least one item unless the deadline expires first."""
        await trio.lowlevel.checkpoint()
        items = self._items_here()
        if not items:
            wait = float("inf") if self._deadline is None else max(0.0, self._deadline - self.now())
            with trio.move_on_after(wait):
                items.append(await self._inbox.receive())
                items += self._items_here()
        return items

    def _items_here(self) -> list[Item]:
        items: list[Item] = []
        while len(items) < BATCH_MAX:
            try:
                items.append(self._inbox.receive_nowait())
            except trio.WouldBlock:
                break
        return items

    # One turn

    async def _turn(self, items: list[Item]) -> None:
        said = Said()
        turns: list[Turn] = []
        for item in items:
            self._handle(item, said, turns)
        for key in self.rounds.seeking(self.now()):
            self.network.broadcast(codec.encode(GetRound(*key)), Priority.CONTROL)
        said.add(self.rounds.due(self.now()))
        if self._deadline is not None and self.now() >= self._deadline:
            turns.append(self.replica.step(events.Tick(), self.now()))
        turns.append(self.replica.step(events.WorkChanged(), self.now()))
        await self._perform(said, turns)
        for item in items:
            if isinstance(item, Call):
                item.done.set()
        self.witness.refusal(self.replica.height, self.replica.refusal)
        self.workshop.judge_new_proposals()

    def _handle(self, item: Item, said: Said, turns: list[Turn]) -> None:
        match item:
            case Received(peer=peer, data=data):
                try:
                    self._handle_message(peer, data, said, turns)
                except RemoteProtocolError as error:
                    self._misbehaved(peer, error)
            case Connected(peer=peer):
                self.events.add("peer", f"connected to {short_id(peer)}", peer=peer)
                turns.append(self.replica.step(events.Connected(peer), self.now()))
                said.answers += [(peer, signed) for signed in (*self.rounds.own(), *self.ledger.pool)]
            case Disconnected(peer=peer):
                self.events.add("peer", f"lost the link to {short_id(peer)}", peer=peer)
                self._answered.pop(peer, None)
                turns.append(self.replica.step(events.Disconnected(peer), self.now()))
            case Call(do=do):
                said.add(do() or Said())
            case AppliedBlock():
                self._handle_applied(item, said, turns)

    def _handle_message(self, peer: bytes, data: bytes, said: Said, turns: list[Turn]) -> None:
        message: Any = codec.decode_message(data, (*AGREEMENT, *ROUNDS))
        match message:
            case Relay(signed=signed):
                self._handle_relayed(signed, said)
            case GetRound(job=job, round=number):
                self._answer_seeker(peer, (job, number), said)
            case _:
                turns.append(self.replica.step(events.Received(peer, message), self.now()))

    def _handle_relayed(self, signed: Signed, said: Said) -> None:
        message: Any = open_signed(signed, self.chain_id, self.verifier, RELAYED)
        if isinstance(message, Transaction):
            self._handle_transaction(signed, message, said)
            return
        try:
            if signed.signer not in self.state.members.members:
                raise RemoteProtocolError("not-a-member", f"{message.TAG} of {short_id(signed.signer)}")
            outcome = self.rounds.receive(signed, message, self.now())
        except RemoteProtocolError as error:
            self._count_refused(error)
            return
        if outcome is not None:
            said.add(outcome)

    def _handle_transaction(self, signed: Signed, transaction: Transaction, said: Said) -> None:
        """Kept and passed on once (its author may know few peers), unless it was decided or never can be."""
        member = self.state.members.members.get(signed.signer)
        if member is not None and transaction.nonce <= member.nonce:
            return
        try:
            self.rules.apply_transaction(self.state, signed, self.state.height + 1)
        except Refused as refusal:
            # A member's may follow something that is not applied here yet; a stranger has one thing to say, and says it again.
            if member is None:
                self._count_refused(RemoteProtocolError("not-a-member", str(refusal)))
                return
        except RemoteProtocolError as error:
            self._count_refused(error)
            return
        if self.ledger.pool.add(signed, member is not None):
            said.sends.append(signed)

    def _count_refused(self, error: RemoteProtocolError) -> None:
        """Whether a message belongs depends on how far we have applied, so the peer that passed it on is not punished."""
        self.refused[error.reason] = self.refused.get(error.reason, 0) + 1

    def _answer_seeker(self, peer: bytes, key: RoundKey, said: Said) -> None:
        if self.now() - self._answered.get(peer, 0.0) >= SEEK_ANSWER_SECONDS:
            self._answered[peer] = self.now()
            said.answers += [(peer, signed) for signed in self.rounds.held(key)]

    def _misbehaved(self, peer: bytes, error: RemoteProtocolError) -> None:
        self.witness.misbehaved(peer, error)
        self.network.drop(peer, error)

    async def _perform(self, said: Said, turns: list[Turn]) -> None:
        """The one way out: everything durable, then everything sent, then decided blocks are applied."""
        turn = merge(turns)
        for fault in turn.faults:
            self._misbehaved(fault.peer, fault.error)
        if said.records or turn.records or turn.sends:
            self._send(await trio.to_thread.run_sync(self._persist, said, turn))
        for signed in said.sends:
            self.network.broadcast(codec.encode(Relay(signed)), Priority.VOTE)
        for peer, signed in said.answers:
            self.network.send(peer, codec.encode(Relay(signed)), Priority.VOTE)
        for signer, message in said.heard:
            self.witness.message(signer, message)
        for record in (*said.records, *turn.evidence):
            if isinstance(record, Evidence):
                self.witness.evidence(record)
        self.witness.turn(turn)
        if turn.decided:
            decided, self._decided = self._decided, trio.Event()
            decided.set()
        times = (turn.deadline if turns else self._deadline, self.rounds.deadline(self.now()))
        self._deadline = min((time for time in times if time is not None), default=None)

    def _persist(self, said: Said, turn: Turn) -> Iterable[Send]:
        """One fsync for what we said in rounds and what the replica wants kept."""
        records = (*said.records, *turn.records)
        if records:
            self.store.append(records)
        return persist(Turn(sends=turn.sends), self.store)

    def _send(self, sends: Iterable[Send]) -> None:
        for send in sends:
            data = codec.encode(send.message)
            for peer in send.to:
                self.network.send(peer, data, Priority.VOTE)

    # Decisions

    async def _apply_decided(self) -> None:
        """Applies blocks in order, also those that were decided but not applied when the process ended."""
        state = self.state
        while True:
            more = self._decided
            while (decided := await trio.to_thread.run_sync(self.store.decision, state.height + 1)) is not None:
                transition = self.rules.apply(state, decided.decode())
                state = transition.finish(await self._step_models(transition))
                rounds = [_stored_round(closed, state) for closed in transition.closed]
                encoded = self.rules.encode_state(state)
                await trio.to_thread.run_sync(self.store.save_state, state.height, state.root, encoded, rounds)
                await self._inbox_send.send(AppliedBlock(decided, transition, state))
            await more.wait()

    async def _step_models(self, transition: Transition) -> dict[bytes, bytes]:
        """The model roots after a block. Waits as long as it takes for payloads: q voters have said that they hold them."""
        roots: dict[bytes, bytes] = {}
        for job in transition.started:
            spec = transition.state.jobs.jobs[job].spec
            roots[job] = await trio.to_thread.run_sync(self.host.create, job, spec)
        for closed in transition.closed:
            for signed in closed.proposals:
                proposal = codec.decode_message(signed.body, (Proposal,))
                await self.network.fetch(proposal.payload, proposal.payload_bytes, (signed.signer, *closed.ballots))
                self.blobs.keep(proposal.payload)
            roots[closed.job] = await trio.to_thread.run_sync(self.host.step, closed, self.blobs.read)
        return roots

    def _handle_applied(self, item: AppliedBlock, said: Said, turns: list[Turn]) -> None:
        block = item.decided.decode()
        self.ledger.advance(item.state, block.state_root)
        for signed, reason in self.ledger.pool.prune(self.rules, item.state):
            if signed.signer == self.signer.public:
                log.debug("our transaction left the pool: %s", reason)
        for closed in item.transition.closed:
            self._note_closed(closed, item.state)
        self._follow_rounds(said)  # before the replica asks for a block: a closed round must not be closed again
        turns.append(self.replica.step(_applied_event(item.state), self.now()))
        self.witness.applied(item.state)
        applied, self.applied = self.applied, trio.Event()
        applied.set()

    # Rounds

    def _follow_rounds(self, said: Said) -> None:
        opened, closed = self.rounds.follow(self.state)
        for key in closed:
            self.workshop.close(key)
        for key in opened:
            job = self.state.jobs.jobs[key[0]]
            spoken = self.store.round_votes(*key)
            said.add(self.rounds.open(key[0], job, self.now(), spoken))
            self.workshop.open(key, job, Proposal.TAG in spoken)

    def _note_closed(self, closed: ClosedRound, state: State) -> None:
        book, job = self.rounds.books.get(closed.job), state.jobs.jobs[closed.job]
        opened = book.opened if book is not None and book.terms.round == closed.round else None
        figures = self.witness.closed(closed, state, opened)
        self._nursery.start_soon(trio.to_thread.run_sync, self.store.measure, closed.job, closed.round, figures)
        if job.phase is Phase.FINISHED:
            self.workshop.finish((closed.job, job.round), job)


def _applied_event(state: State) -> events.Applied:
    members = state.members
    return events.Applied(
        state.height, state.root, (VoterSet(members.previous), VoterSet(members.voters), VoterSet(members.upcoming))
    )


def _stored_round(closed: ClosedRound, state: State) -> StoredRound:
    outcome = closed.outcome
    verdicts = dict.fromkeys(outcome.accepted, "accept") | dict.fromkeys(outcome.absent, "absent")
    verdicts |= {trainer: verdict.label for trainer, verdict in outcome.rejected.items()}
    job = state.jobs.jobs[closed.job]
    stepped = len(outcome.accepted) >= JobSpec.decode(job.spec).accepted_min
    return StoredRound(closed.job, closed.round, state.height, verdicts, closed.ballots, stepped, job.model_root)
