"""The heart of the daemon: one task through which everything that changes the peer's mind goes, in order.

Messages, timers and results of slow work come into one inbox. Each batch of them is one turn: step, make durable with one fsync,
send. Slow work (applying a block, judging a payload, training) runs beside it and reports back through the inbox, so that it
never delays a vote.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

import trio

from consensus import events
from consensus.block import decode_block
from consensus.replica import Replica
from consensus.turn import Decided, Send, StoredBlock, Turn, merge, persist
from consensus.voters import CachingVerifier, VoterSet
from ledger.blobs import Blobs
from ledger.genesis import Genesis
from ledger.jobs import ClosedRound, Job, Phase
from ledger.ledger import Ledger
from ledger.state import Rules, State, Transition
from ledger.store import Store, StoredRound
from ledger.transactions import Refused
from peer.datadir import storage_errors
from peer.eventlog import EventLog
from peer.roles.base import Judged, OpenRound, Role
from peer.rounds import Outcome as Said
from peer.rounds import RoundKey, RoundMessage, Rounds
from protocol import codec
from protocol.errors import FolkmootError, RemoteProtocolError, StorageError
from protocol.identity import Ed25519Verifier, Signed, Signer, open_signed, short_id
from protocol.messages import AGREEMENT, ROUNDS, Ballot, CutOff, GetRound, Proposal, Relay, Transaction
from protocol.reasons import Verdict
from training.host import ModelHost
from training.spec import JobSpec
from transport.network import Connected, Disconnected, Network, Priority, Received

log = logging.getLogger("peer")

INBOX_MAX = 512  # items that wait for the driver; then the network is not read, which slows the senders down
BATCH_MAX = 64  # items in one turn: bounds how long a vote waits for the fsync
SEEK_ANSWER_SECONDS = 1.0  # GetRound of one peer is answered this often
DECISION_TIMES_KEPT = 10_000  # for percentiles

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
        self.network, self.role, self.events = network, role, event_log
        self.chain_id = genesis.chain_id
        self.verifier = CachingVerifier(Ed25519Verifier())
        self.rules = Rules(genesis, self.verifier, host)
        self._started_wall, self._started = time.time(), trio.current_time()
        self.ledger = self._restore_ledger()
        self.rounds = Rounds(signer, self.chain_id, self.ledger.books)
        applied = _applied_event(self.state)
        self.replica = Replica(signer, self.chain_id, Ed25519Verifier(), self.ledger, applied, store.load())
        self._inbox_send, self._inbox = trio.open_memory_channel[Item](INBOX_MAX)
        self._decided = trio.Event()  # set and replaced when there is more to apply
        self._open_rounds: dict[RoundKey, OpenRound] = {}
        self._working: dict[RoundKey, trio.Nursery] = {}  # what the role does in each open round
        self._judging: set[tuple[RoundKey, bytes]] = set()
        self._deadline: float | None = None
        self._refusal: str | None = None
        self._answered: dict[bytes, float] = {}
        self._first_seen: dict[int, float] = {}
        self._decided_in: dict[int, float] = {}
        self.decisions = 0
        self.started_at = self._started_wall
        self.decision_seconds: list[float] = []
        self.first_decision_at: float | None = None
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
        self._note_refusal()
        self._judge_new_proposals()

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
        except Refused:
            pass  # it may follow something that is not applied here yet
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
        self.events.add("warning", f"dropped {short_id(peer)}: {error}", peer=peer, reason=error.reason)
        self.network.drop(peer, error)

    async def _perform(self, said: Said, turns: list[Turn]) -> None:
        """The one way out: everything durable, then everything sent, then decided blocks are applied."""
        turn = merge(turns)
        for fault in turn.faults:
            self._misbehaved(fault.peer, fault.error)
        self._note_first_sight(turn)
        if said.records or turn.records or turn.sends:
            self._send(await trio.to_thread.run_sync(self._persist, said, turn))
        for signed in said.sends:
            self.network.broadcast(codec.encode(Relay(signed)), Priority.VOTE)
        for peer, signed in said.answers:
            self.network.send(peer, codec.encode(Relay(signed)), Priority.VOTE)
        for signer, message in said.heard:
            self._note_message(signer, message)
        for evidence in turn.evidence:
            self.events.add(
                "evidence", f"{short_id(evidence.culprit)} signed two things that exclude each other", peer=evidence.culprit
            )
        for decided in turn.decided:
            self._note_decision(decided)
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

    def _note_first_sight(self, turn: Turn) -> None:
        for record in turn.records:
            if isinstance(record, StoredBlock):
                self._first_seen.setdefault(record.height, self.now())

    def _note_decision(self, decided: Decided) -> None:
        self.first_decision_at = self.first_decision_at or self.now()
        self.decisions += 1
        signers = sorted(decided.certificate.signatures)
        text = f"height {decided.height} decided by {len(signers)} signatures"
        self.events.add("decided", text, height=decided.height, signers=" ".join(map(short_id, signers)))
        seen = self._first_seen.pop(decided.height, None)
        if seen is not None:
            self._decided_in[decided.height] = self.now() - seen
            self.decision_seconds = [*self.decision_seconds[-DECISION_TIMES_KEPT:], self.now() - seen]
        self._first_seen = {height: at for height, at in self._first_seen.items() if height > decided.height}
        decided_event, self._decided = self._decided, trio.Event()
        decided_event.set()

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
            self._note_closed(closed, item)
            job = item.state.jobs.jobs[closed.job]
            if job.phase is Phase.FINISHED:  # no round opens any more in which its last model would be measured
                self.host.prune(closed.job, job.round)
                opened = self.open_round((closed.job, job.round), job)
                self._nursery.start_soon(self._guarded, "measuring", self.role.observe, opened)
        self._follow_rounds(said)  # before the replica asks for a block: a closed round must not be closed again
        turns.append(self.replica.step(_applied_event(item.state), self.now()))
        text = f"height {item.state.height} applied, state root {item.state.root.hex()[:16]}"
        self.events.add("applied", text, height=item.state.height, root=item.state.root)
        applied, self.applied = self.applied, trio.Event()
        applied.set()

    # Rounds

    def _follow_rounds(self, said: Said) -> None:
        opened, closed = self.rounds.follow(self.state)
        for key in closed:
            self._open_rounds.pop(key)
            if key in self._working:
                self._working.pop(key).cancel_scope.cancel()
            self.blobs.release(key)
            self._judging = {entry for entry in self._judging if entry[0] != key}
        for key in opened:
            job = self.state.jobs.jobs[key[0]]
            spoken = self.store.round_votes(*key)
            said.add(self.rounds.open(key[0], job, self.now(), spoken))
            self._open_rounds[key] = self.open_round(key, job)
            self._nursery.start_soon(self._work_on, key, self._open_rounds[key], Proposal.TAG in spoken)

    def open_round(self, key: RoundKey, job: Job) -> OpenRound:
        """What a role sees of the job's open round, or of a finished job."""

        async def publish(proposal: Proposal) -> None:
            await self.call(lambda: self.rounds.publish(proposal, self.now()))

        async def delivered(trainer: bytes) -> None:
            await self.call(lambda: self.rounds.deliver(key, trainer, self.now()))

        async def measured(name: str, value: float) -> None:
            await trio.to_thread.run_sync(self.store.measure, *key, {name: value})
            self.events.add("measured", f"round {key[1]}: {name} {value:.4f}", job=key[0], round=key[1], name=name, value=value)

        return OpenRound(
            me=self.signer.public,
            terms=job.terms(key[0]),
            spec=JobSpec.decode(job.spec),
            model=self.host.model(*key),
            model_directory=self.host.directory(*key),
            blobs=self.blobs,
            fetch=self.network.fetch,
            publish=publish,
            delivered=delivered,
            measured=measured,
        )

    async def _work_on(self, key: RoundKey, opened: OpenRound, spoken: bool) -> None:
        """Everything this peer's role does in one round, cancelled when the round closes, which may be before this starts."""
        await trio.to_thread.run_sync(self._tidy, key)
        if key not in self._open_rounds:
            return  # closed meanwhile
        self._nursery.start_soon(self._guarded, "measuring", self.role.observe, opened)
        async with trio.open_nursery() as self._working[key]:
            self._judge_new_proposals()
            if opened.me in opened.terms.trainers and not spoken:
                self._working[key].start_soon(self._guarded, "training", self.role.propose, opened)
            await trio.sleep_forever()

    async def _guarded(self, what: str, work: Callable[[OpenRound], Awaitable[None]], opened: OpenRound) -> None:
        """A role may fail in a round; the peer goes on, unless its disk fails."""
        try:
            with storage_errors(self.store.path.parent):
                await work(opened)
        except StorageError:
            raise
        except FolkmootError as error:
            self.events.add("warning", f"{what} in round {opened.number} failed: {error}", job=opened.job, round=opened.number)

    def _tidy(self, key: RoundKey) -> None:
        """Deletes what nobody needs any more: old models, and error-feedback buffers behind the last accepted ones."""
        self.host.prune(*key)
        self.store.forget_round_votes(*key)
        keep = {record.buffer for opened in list(self._open_rounds.values()) for record in opened.model.records.values()}
        for book in list(self.rounds.books.values()):
            for signed in list(book.proposals.values()):
                keep.add(codec.decode_message(signed.body, (Proposal,)).buffer)
        self.blobs.delete_passed(keep)

    def _judge_new_proposals(self) -> None:
        for job, book in self.rounds.books.items():
            key = (job, book.terms.round)
            if book.me is None or key not in self._working:
                continue
            for trainer, signed in book.proposals.items():
                if trainer not in book.verdicts and (key, trainer) not in self._judging:
                    self._judging.add((key, trainer))
                    self._working[key].start_soon(self._judge, key, self._open_rounds[key], signed)

    async def _judge(self, key: RoundKey, opened: OpenRound, signed: Signed) -> None:
        proposal = codec.decode_message(signed.body, (Proposal,))
        judged = Judged(Verdict.UNJUDGED)

        async def judge(opened: OpenRound) -> None:
            nonlocal judged
            judged = await self.role.judge(opened, signed, proposal)

        await self._guarded("judging", judge, opened)
        await self.call(lambda: self.rounds.judge(key, signed.signer, judged.verdict, judged.seconds, self.now()))

    # For people

    def _note_refusal(self) -> None:
        refusal = self.replica.refusal
        if refusal is not None and refusal != self._refusal:
            self.events.add("warning", f"not preparing the block proposed for height {self.replica.height}: {refusal}")
        self._refusal = refusal

    def _note_message(self, signer: bytes, message: RoundMessage) -> None:
        text = {Proposal: "proposes", CutOff: "wants to close"}.get(type(message), "votes")
        if isinstance(message, Ballot):
            text += " " + ", ".join(f"{short_id(j.trainer)}: {j.verdict.label}" for j in message.judgements)
        fields = {"peer": signer, "job": message.job, "round": message.round}
        self.events.add(message.TAG, f"round {message.round}: {short_id(signer)} {text}", **fields)

    def _note_closed(self, closed: ClosedRound, item: AppliedBlock) -> None:
        outcome, state = closed.outcome, item.state
        book = self.rounds.books.get(closed.job)
        figures = {"decision_ms": 1_000 * self._decided_in.pop(item.decided.height, 0.0)}
        if book is not None and book.terms.round == closed.round:
            figures["seconds"] = self.now() - book.opened
        self._nursery.start_soon(trio.to_thread.run_sync, self.store.measure, closed.job, closed.round, figures)
        parts = [f"accepted {short_id(trainer)}" for trainer in outcome.accepted]
        parts += [f"rejected {short_id(trainer)} ({verdict.label})" for trainer, verdict in outcome.rejected.items()]
        parts += [f"absent {short_id(trainer)}" for trainer in sorted(outcome.absent)]
        root = state.jobs.jobs[closed.job].model_root
        fields = {"job": closed.job, "round": closed.round, "root": root, "height": state.height}
        self.events.add("round", f"round {closed.round}: {', '.join(parts)}", **fields)


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
