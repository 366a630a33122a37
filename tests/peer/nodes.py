"""Nodes on virtual time, driven by a test: messages are bytes in one queue, disks are lists, time is a number."""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from consensus.effects import (
    JournalRecord,
    OutgoingMessage,
    OwnRoundStatement,
    RestartState,
    StepEffects,
    persist_effects,
    send_messages,
)
from ledger.blocks.application import LedgerApplication
from ledger.core.module import Module
from ledger.ledger_state import CurrentState, LedgerRules, core_modules
from peer.node.node import AppliedBlock, Node, NodeInput, StepAction
from peer.node.open_rounds import RoundEffects
from protocol import codec
from protocol.identity import Signed, Signer, Verifier, open_signed
from protocol.messages import AGREEMENT_MESSAGES, GOSSIP_MESSAGES, GossipEnvelope
from tests.consensus.journal import MemoryJournal
from tests.ledger.blocks import stepped
from tests.ledger.world import PEOPLE, PlainJobs, World
from tests.sim.keys import FastSigner, FastVerifier
from transport.network import DataReceived, PeerConnected, PeerDisconnected

M = TypeVar("M")
NOW = 1_700_000_000.0
MESSAGES_MAX = 20_000  # per settling; a test that needs more loops for ever


class Journal(MemoryJournal):
    """A journal in memory that also keeps the peer's statements of rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[JournalRecord] = []

    def append_records(self, records: Sequence[JournalRecord]) -> None:
        super().append_records(records)
        self.records += records

    def read_restart_state(self) -> RestartState:
        return replace(super().read_restart_state(), evidence=tuple(self.evidence))

    def spoken(self, job: bytes, number: int) -> dict[str, Signed]:
        return {record.tag: record.signed for record in self._of_round(job, number)}

    def accepted(self, job: bytes, number: int) -> list[Signed]:
        return [proposal for record in self._of_round(job, number) for proposal in record.accepted]

    def _of_round(self, job: bytes, number: int) -> list[OwnRoundStatement]:
        return [r for r in self.records if isinstance(r, OwnRoundStatement) and (r.job, r.round) == (job, number)]


class Shell:
    """The daemon's work around its node. The journal outlives `start`."""

    def __init__(self, pack: Pack, signer: Signer) -> None:
        self.pack, self.signer, self.journal = pack, signer, Journal()
        self.sent: list[tuple[tuple[bytes, ...] | None, OutgoingMessage]] = []
        self.applies_up_to = math.inf  # height
        self.start()

    def start(self) -> None:
        rules = LedgerRules(self.pack.genesis, self.pack.verifier, (*core_modules(PlainJobs()), *self.pack.modules()))
        state = rules.genesis_state()
        self._applying = state
        ledger = LedgerApplication(rules, CurrentState(state), state.state_root)
        journal = self.journal
        self.node = Node(
            self.signer, rules, ledger, journal.read_restart_state(), self.pack.verifier, journal.spoken, journal.accepted
        )
        self.links: set[bytes] = set()
        self.last = StepEffects()
        self.turn()

    @property
    def me(self) -> bytes:
        return self.signer.public

    def turn(self, *items: NodeInput) -> StepEffects:
        self.last = self.node.step(items, self.pack.now)
        send_messages(persist_effects(self.last, self.journal), self)
        for fault in self.last.faults:
            self.pack.cut(self.me, fault.peer)
        self._apply()
        return self.last

    def _apply(self) -> None:
        while (
            decided := self.journal.get_decision(self._applying.height + 1)
        ) is not None and decided.height <= self.applies_up_to:
            transition = self.node.rules.apply_block(self._applying, decided.decode())
            self._applying = transition.finish_state(
                {job: hashlib.sha256(job + decided.digest).digest() for job in stepped(transition)}
            )
            self.pack.queue.append((self.me, AppliedBlock(decided, transition, self._applying)))

    def send(self, to: tuple[bytes, ...] | None, message: OutgoingMessage) -> None:
        self.sent.append((to, message))
        data = codec.encode(message)
        for peer in sorted(self.links) if to is None else to:
            if peer in self.links:
                self.pack.queue.append((peer, DataReceived(self.me, data)))

    def say(self, *signed: Signed) -> None:
        """Submit transactions as `peer.runtime.transaction_submitter` does."""

        def put() -> RoundEffects:
            for transaction in signed:
                self.node.ledger.mempool.add_transaction(transaction)
            return RoundEffects(sends=list(signed))

        self.turn(StepAction(put))

    def said(self, kind: type[M]) -> list[M]:
        """Return the messages of this kind that were sent since the last call."""
        sent, self.sent = self.sent, []
        plain = [message for _, message in sent]
        relayed = [
            open_signed(message.signed, self.node.chain_id, FastVerifier(), (kind,))
            for message in plain
            if isinstance(message, GossipEnvelope) and codec.unpack(message.signed.body, len(message.signed.body))[0] == kind.TAG
        ]
        return [message for message in plain if isinstance(message, kind)] + relayed


class Pack:
    """A network that the first `voters` of `PEOPLE` found. `count` of them run from the start, linked with each other."""

    def __init__(
        self,
        voters: int = 4,
        count: int | None = None,
        trainers: int = 3,
        modules: Callable[[], tuple[Module[Any], ...]] = lambda: (),
        verifier: Verifier | None = None,
    ) -> None:
        self.modules, self.verifier = modules, verifier or FastVerifier()
        self.world = World(voters, trainers, modules=modules())  # makes transactions that assume nothing but founding
        self.genesis = self.world.genesis
        self.now = NOW
        self.queue: deque[tuple[bytes, NodeInput]] = deque()
        self.shells: dict[bytes, Shell] = {}
        for person in PEOPLE[: voters if count is None else count]:
            self.add(person)

    def __getitem__(self, number: int) -> Shell:
        return self.shells[PEOPLE[number].public]

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(list(self.shells.values()))

    def add(self, person: FastSigner) -> Shell:
        shell = self.shells[person.public] = Shell(self, person)
        self.link_all(shell)
        return shell

    def link_all(self, shell: Shell) -> None:
        for other in self:
            if other is not shell:
                self.link(shell.me, other.me)

    def link(self, one: bytes, other: bytes) -> None:
        for me, peer in ((one, other), (other, one)):
            self.shells[me].links.add(peer)
            self.shells[me].turn(PeerConnected(peer))

    def cut(self, one: bytes, other: bytes) -> None:
        for me, peer in ((one, other), (other, one)):
            if me in self.shells and peer in self.shells[me].links:
                self.shells[me].links.discard(peer)
                self.queue.append((me, PeerDisconnected(peer)))

    def restart(self, number: int) -> Shell:
        shell = self[number]
        for peer in sorted(shell.links):
            self.cut(shell.me, peer)
        self.queue = deque(entry for entry in self.queue if entry[0] != shell.me)
        self.settle()
        shell.start()
        self.link_all(shell)
        self.settle()
        return shell

    def settle(self) -> None:
        """Deliver messages until the queue is empty."""
        for _ in range(MESSAGES_MAX):
            if not self.queue:
                return
            to, item = self.queue.popleft()
            self.shells[to].turn(item)
        raise AssertionError("it goes round in circles")

    def pass_time(self, seconds: float) -> None:
        """Advance the time, and run all timers that come due on the way at their time."""
        end = self.now + seconds
        self.settle()
        while True:
            due = [shell.last.deadline for shell in self if shell.last.deadline is not None]
            self.now = max(self.now, min([*due, end]))
            if self.now >= end:
                return
            for shell in self:
                if shell.last.deadline is not None and shell.last.deadline <= self.now:
                    shell.turn()
            self.settle()

    def until(self, condition: Callable[[Shell], bool], seconds: float = 60.0) -> None:
        """Advance the time until the condition holds for all."""
        end = self.now + seconds
        while not all(condition(shell) for shell in self):
            assert self.now < end, "it did not happen"
            self.pass_time(0.25)


def decoded(data: bytes) -> OutgoingMessage:
    message: OutgoingMessage = codec.decode_message(data, (*AGREEMENT_MESSAGES, *GOSSIP_MESSAGES))
    return message
