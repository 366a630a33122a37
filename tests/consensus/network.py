"""Consensus, a network: replicas in virtual time. All messages arrive after a few milliseconds."""

from __future__ import annotations

import hashlib
import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from consensus.effects import DecidedBlock, StepEffects, merge_effects, persist_effects
from consensus.inputs import (
    AgreementMessage,
    ConnectedInput,
    DisconnectedInput,
    MessageInput,
    ReplicaInput,
    TickInput,
    WorkChangedInput,
)
from consensus.pbft.replica import Replica
from consensus.voter_set import VoterSet
from tests.consensus.counter import Counter
from tests.consensus.journal import MemoryJournal
from tests.sim.keys import FastSigner, FastVerifier

START = 1_000.0  # virtual seconds since the epoch
DELAY_SECONDS = (0.01, 0.02)  # latency of a message
SYNC_SECONDS = (0.0, 0.002)  # time until a turn is durable
APPLY_SECONDS = (0.0, 0.01)
CHAIN_ID = hashlib.sha256(b"simulated chain").digest()


@dataclass
class Node:
    signer: FastSigner
    counter: Counter
    journal: MemoryJournal = field(default_factory=MemoryJournal)
    replica: Replica | None = None  # None: crashed
    inbox: list[ReplicaInput] = field(default_factory=list)
    life: int = 0  # counts restarts: events that were scheduled for an earlier life are void
    syncing: bool = False
    deadline: float | None = None
    offset: float = 0.0  # seconds that its clock is ahead

    @property
    def key(self) -> bytes:
        return self.signer.public


class Network:
    """A network of `n` founding voters, followed by `observers` further nodes."""

    def __init__(self, n: int = 4, observers: int = 0, seed: int = 3) -> None:
        self.random = random.Random(seed)
        self.now = START
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        signers = [FastSigner(f"node {i}") for i in range(n + observers)]
        founders = VoterSet.from_keys(signer.public for signer in signers[:n])
        candidates = tuple(signer.public for signer in signers)
        self.nodes = {signer.public: Node(signer, Counter(founders, candidates)) for signer in signers}
        self.items: set[int] = set()
        self.sent = 0
        for node in self.nodes.values():
            self._start(node)

    @property
    def all(self) -> list[Node]:
        return list(self.nodes.values())

    # Running ---------------------------------------------------------------------------------------------------------

    def run_until(self, time: float, finished: Callable[[], bool]) -> bool:
        while self._queue and self._queue[0][0] <= time and not finished():
            self.now, _, action = heapq.heappop(self._queue)
            action()
        if not finished():
            self.now = max(self.now, time)
        return finished()

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._order), action))

    def inject(self, item: int) -> None:
        """Send an item to all voters, which receive it at different times."""
        self.items.add(item)
        for node in self.all:
            self.after(self._draw(DELAY_SECONDS), lambda node=node: self._learn(node, item))  # type: ignore[misc]

    def _learn(self, node: Node, item: int) -> None:
        node.counter.add(item)
        self._give(node, WorkChangedInput())

    def _draw(self, span: tuple[float, float]) -> float:
        return self.random.uniform(*span)

    # Lives -----------------------------------------------------------------------------------------------------------

    def crash(self, node: Node) -> None:
        """Stop a replica. All data that are not durable are lost, in the middle of a turn too."""
        node.replica, node.inbox, node.syncing, node.deadline = None, [], False, None
        node.life += 1
        for other in self.all:
            self._give(other, DisconnectedInput(node.key))

    def restart(self, node: Node) -> None:
        self._start(node)
        for item in self.items:
            self._learn(node, item)

    def _start(self, node: Node) -> None:
        """Start a replica from the journal. Its application may lag behind and receives the missing blocks again."""
        decided = node.journal.decided
        node.counter = Counter(node.counter.founders, node.counter.candidates)
        for height in range(1, self.random.randint(0, len(decided)) + 1):
            node.counter.apply(decided[height])
        restart = node.journal.read_restart_state()
        node.replica = Replica(node.signer, CHAIN_ID, FastVerifier(), node.counter, node.counter.applied(), restart)
        for height in range(node.counter.height + 1, len(decided) + 1):
            self._apply_later(node, decided[height])
        for other in self.all:
            if other is not node and other.replica is not None:
                self._give(other, ConnectedInput(node.key))
                self._give(node, ConnectedInput(other.key))
        self._give(node, TickInput())

    # Turns -----------------------------------------------------------------------------------------------------------

    def _give(self, node: Node, event: ReplicaInput) -> None:
        if node.replica is not None:
            node.inbox.append(event)
            self._work(node)

    def _work(self, node: Node) -> None:
        """Process a turn as the daemon does: all inputs are applied, made durable together, and then sent."""
        if node.replica is None or node.syncing or not node.inbox:
            return
        events, node.inbox = node.inbox, []
        turns = [node.replica.step(event, self.now + node.offset) for event in events]
        turn = merge_effects(turns, turns[-1].deadline)
        assert not turn.faults and not turn.evidence and node.replica.divergence is None
        self._set_timer(node, turn.deadline)
        node.syncing = True
        life = node.life
        self.after(self._draw(SYNC_SECONDS), lambda: self._synced(node, life, turn))

    def _synced(self, node: Node, life: int, turn: StepEffects) -> None:
        if node.life != life:
            return
        for send in persist_effects(turn, node.journal):
            for peer in send.to or ():
                self._transmit(node.key, peer, send.message)  # type: ignore[arg-type]
        for decided in turn.decided_blocks:
            self._apply_later(node, decided)
        node.syncing = False
        self._work(node)

    def _apply_later(self, node: Node, decided: DecidedBlock) -> None:
        life = node.life

        def apply() -> None:
            if node.life != life:
                return
            if node.counter.height + 1 < decided.height:
                self.after(0.01, apply)  # in order
            else:
                self._give(node, node.counter.apply(decided))

        self.after(self._draw(APPLY_SECONDS), apply)

    def _set_timer(self, node: Node, deadline: float | None) -> None:
        node.deadline = deadline
        if deadline is not None:
            life = node.life
            self.after(max(0.0, deadline - self.now - node.offset), lambda: self._tick(node, life, deadline))

    def _tick(self, node: Node, life: int, deadline: float) -> None:
        if node.life == life and node.deadline == deadline:
            self._give(node, TickInput())

    def _transmit(self, sender: bytes, peer: bytes, message: AgreementMessage) -> None:
        self.sent += 1
        self.after(self._draw(DELAY_SECONDS), lambda: self._give(self.nodes[peer], MessageInput(sender, message)))
