"""A whole network of real replicas in virtual time, with everything that can go wrong, from one seed."""

from __future__ import annotations

import hashlib
import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from consensus.events import Connected, Disconnected, Event, Message, Received, Tick, WorkChanged
from consensus.quorum import faults_tolerated
from consensus.replica import Replica
from consensus.turn import Decided, Send, Turn, merge, persist
from consensus.voters import VoterSet
from tests.sim.counter import Counter
from tests.sim.invariants import Invariants, Violation
from tests.sim.journal import MemoryJournal
from tests.sim.keys import FastSigner, FastVerifier
from tests.sim.strategies import LIARS, Strategy, honest

START = 1_000.0  # virtual seconds since the epoch
TROUBLE_SECONDS = 40.0  # then the network heals
RECOVERY_SECONDS = 400.0  # a few capped view timers: within this everything must be decided
CHAIN_ID = hashlib.sha256(b"simulated chain").digest()


@dataclass(frozen=True)
class Trouble:
    """How bad the network is until it heals. Seconds and probabilities."""

    delay: tuple[float, float] = (0.005, 0.2)
    loss: float = 0.05
    duplicate: float = 0.05
    crash: float = 0.3  # per second, somewhere
    partition: float = 0.1  # per second
    sync: tuple[float, float] = (0.0, 0.05)  # how long it takes until a turn is durable
    apply: tuple[float, float] = (0.0, 0.3)


CALM = Trouble(delay=(0.01, 0.02), loss=0.0, duplicate=0.0, crash=0.0, partition=0.0, sync=(0.0, 0.002), apply=(0.0, 0.01))


@dataclass
class Node:
    signer: FastSigner
    strategy: Strategy
    counter: Counter
    journal: MemoryJournal = field(default_factory=MemoryJournal)
    replica: Replica | None = None  # None: crashed
    inbox: list[Event] = field(default_factory=list)
    life: int = 0  # counts restarts: what was scheduled for an earlier life is void
    syncing: bool = False
    deadline: float | None = None

    @property
    def key(self) -> bytes:
        return self.signer.public


class Simulation:
    """`liars` lists the strategies of the first nodes; observers stand behind the `n` founding voters."""

    def __init__(
        self,
        seed: int,
        n: int = 4,
        liars: tuple[Strategy, ...] | None = None,
        trouble: Trouble | None = None,
        observers: int = 0,
        items: int = 12,
        replica: type[Replica] = Replica,
        sends_before_sync: bool = False,
    ) -> None:
        self.random = random.Random(seed)
        self.trouble = trouble or Trouble()
        self.now = START
        self._replica = replica
        self._sends_before_sync = sends_before_sync
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        if liars is None:
            liars = tuple(self.random.choice(LIARS) for _ in range(self.random.randint(0, faults_tolerated(n))))
        signers = [FastSigner(f"node {i}") for i in range(n + observers)]
        founders = VoterSet.of(signer.public for signer in signers[:n])
        candidates = tuple(signer.public for signer in signers)
        self.nodes = {
            signer.public: Node(signer, liars[i] if i < len(liars) else honest, Counter(founders, candidates))
            for i, signer in enumerate(signers)
        }
        self.honest = [node for node in self.nodes.values() if node.strategy is honest]
        self.invariants = Invariants({node.key for node in self.honest})
        self.items: set[int] = set()
        self.sent = 0
        self._group: dict[bytes, int] = dict.fromkeys(self.nodes, 0)  # partitions: nodes of one number reach each other
        for node in self.nodes.values():
            self._start(node)
        for item in range(items):
            self.after(self.random.uniform(0, TROUBLE_SECONDS), lambda item=item: self.inject(item))
        for candidate in range(n, n + observers):
            if self.random.random() < 0.5:
                self.after(self.random.uniform(0, TROUBLE_SECONDS), lambda item=Counter.CHANGE + candidate: self.inject(item))

    # Running ---------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Trouble, then healing, then everything must be decided. Raises `Violation`."""
        self._trouble_loop()
        self.run_until(START + TROUBLE_SECONDS, lambda: False)
        self.heal()
        if not self.run_until(self.now + RECOVERY_SECONDS, self.is_finished):
            heights = sorted(node.counter.height for node in self.honest)
            raise Violation(f"no progress after healing: heights {heights}, open {self.items - self.honest[0].counter.done}")

    def run_until(self, time: float, finished: Callable[[], bool]) -> bool:
        while self._queue and self._queue[0][0] <= time and not finished():
            self.now, _, action = heapq.heappop(self._queue)
            action()
        if not finished():
            self.now = max(self.now, time)
        return finished()

    def is_finished(self) -> bool:
        return all(node.replica is not None and self.items <= node.counter.done for node in self.honest)

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._order), action))

    def inject(self, item: int) -> None:
        """An item reaches everybody, each at its own time."""
        self.items.add(item)
        for node in self.nodes.values():
            self.after(self._draw(self.trouble.delay), lambda node=node: self._learn(node, item))

    def _learn(self, node: Node, item: int) -> None:
        node.counter.add(item)
        self._give(node, WorkChanged())

    # Trouble ---------------------------------------------------------------------------------------------------------

    def _trouble_loop(self) -> None:
        if self.now >= START + TROUBLE_SECONDS:
            return
        if self.random.random() < self.trouble.crash:
            node = self.random.choice(list(self.nodes.values()))
            self.crash(node)
            self.after(self.random.uniform(0.01, 8.0), lambda: self.restart(node))
        if self.random.random() < self.trouble.partition:
            self.partition({key: self.random.randint(0, 1) for key in self.nodes})
            self.after(self.random.uniform(1.0, 10.0), lambda: self.partition(dict.fromkeys(self.nodes, 0)))
        self.after(1.0, self._trouble_loop)

    def heal(self) -> None:
        self.trouble = CALM
        self.partition(dict.fromkeys(self.nodes, 0))
        for node in self.nodes.values():
            self.restart(node)
            for item in self.items:
                self._learn(node, item)

    def crash(self, node: Node) -> None:
        """Whatever is not durable is lost, in the middle of a turn too."""
        if node.replica is None:
            return
        node.replica, node.inbox, node.syncing, node.deadline = None, [], False, None
        node.life += 1
        for other in self.nodes.values():
            self._give(other, Disconnected(node.key))

    def restart(self, node: Node) -> None:
        if node.replica is None:
            self._start(node)
            for item in self.items:
                self._learn(node, item)

    def partition(self, group: dict[bytes, int]) -> None:
        before, self._group = self._group, group
        for one, other in itertools.permutations(self.nodes, 2):
            was, is_now = before[one] == before[other], group[one] == group[other]
            if was != is_now:
                self._give(self.nodes[one], Connected(other) if is_now else Disconnected(other))

    def _start(self, node: Node) -> None:
        """From the journal; the application may be behind it and gets the rest as it did before."""
        decided = node.journal.decided
        node.counter = Counter(node.counter.founders, node.counter.candidates)
        for height in range(1, self.random.randint(0, len(decided)) + 1):
            node.counter.apply(decided[height])
        restart = node.journal.load()
        node.replica = self._replica(node.signer, CHAIN_ID, FastVerifier(), node.counter, node.counter.applied(), restart)
        if node in self.honest:
            self.invariants.on_restart(node.key, len(decided))
        for height in range(node.counter.height + 1, len(decided) + 1):
            self._apply_later(node, decided[height])
        for other in self.nodes.values():
            if other is not node and other.replica is not None and self._group[other.key] == self._group[node.key]:
                self._give(other, Connected(node.key))
                self._give(node, Connected(other.key))
        self._give(node, Tick())

    # One node --------------------------------------------------------------------------------------------------------

    def _give(self, node: Node, event: Event) -> None:
        if node.replica is not None:
            node.inbox.append(event)
            self._work(node)

    def _work(self, node: Node) -> None:
        """As the daemon does: all that has come in is stepped through, made durable once, and then sent."""
        if node.replica is None or node.syncing or not node.inbox:
            return
        events, node.inbox = node.inbox, []
        turns = [node.replica.step(event, self.now) for event in events]
        turn = merge(turns)
        if node in self.honest:
            self._watch(node, turn)
        self._set_timer(node, turn.deadline)
        node.syncing = True
        if self._sends_before_sync:
            self._deliver(node, [send for send in turn.sends if isinstance(send, Send)])
        life = node.life
        self.after(self._draw(self.trouble.sync), lambda: self._synced(node, life, turn))

    def _watch(self, node: Node, turn: Turn) -> None:
        for fault in turn.faults:
            if fault.peer in self.invariants.honest:
                raise Violation(f"an honest node was blamed: {fault.error}")
        for evidence in turn.evidence:
            self.invariants.on_accused(evidence.culprit)
        if node.replica is not None and node.replica.divergence is not None:
            raise Violation(node.replica.divergence)

    def _synced(self, node: Node, life: int, turn: Turn) -> None:
        if node.life != life:
            return
        sends = persist(turn, node.journal)
        if node in self.honest:
            for decided in turn.decided:
                self.invariants.on_decided(node.key, decided)
        if not self._sends_before_sync:
            self._deliver(node, list(sends))
        for decided in turn.decided:
            self._apply_later(node, decided)
        node.syncing = False
        self._work(node)

    def _apply_later(self, node: Node, decided: Decided) -> None:
        life = node.life

        def apply() -> None:
            if node.life != life:
                return
            if node.counter.height + 1 < decided.height:
                self.after(0.01, apply)  # in order
            else:
                self._give(node, node.counter.apply(decided))

        self.after(self._draw(self.trouble.apply), apply)

    def _set_timer(self, node: Node, deadline: float | None) -> None:
        node.deadline = deadline
        if deadline is not None:
            life = node.life
            self.after(max(0.0, deadline - self.now), lambda: self._tick(node, life, deadline))

    def _tick(self, node: Node, life: int, deadline: float) -> None:
        if node.life == life and node.deadline == deadline:
            self._give(node, Tick())

    # Network ---------------------------------------------------------------------------------------------------------

    def _deliver(self, node: Node, sends: list[Send]) -> None:
        for send in sends:
            if node in self.honest:
                self.invariants.on_sent(node.key, send.message)
            for changed in node.strategy(node.signer, CHAIN_ID, send):
                for peer in changed.to:
                    self._transmit(node.key, peer, changed.message)

    def _transmit(self, sender: bytes, peer: bytes, message: Message) -> None:
        self.sent += 1
        if peer not in self.nodes or self.random.random() < self.trouble.loss:
            return
        copies = 2 if self.random.random() < self.trouble.duplicate else 1
        for _ in range(copies):
            self.after(self._draw(self.trouble.delay), lambda: self._arrive(sender, peer, message))

    def _arrive(self, sender: bytes, peer: bytes, message: Message) -> None:
        if self._group[sender] == self._group[peer]:
            self._give(self.nodes[peer], Received(sender, message))

    def _draw(self, span: tuple[float, float]) -> float:
        return self.random.uniform(*span)
