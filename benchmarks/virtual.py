"""Nodes in virtual time with measured costs: the cost of a decision in a network that one machine cannot hold.

Every peer is a `peer.node.node.Node` with the real ledger and codec; only signatures are replaced by a fast keyed hash. The
charged times are measured. A turn costs its processor time in this process. The cost of a signature made or verified, a frame
sealed or opened, and a durable write is measured on this machine at the start. A peer has one core and one uplink. It does one
turn at a time, like the daemon, and waits for its disk before it sends.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import heapq
import socket
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from consensus.effects import (
    DecidedBlock,
    JournalRecord,
    OutgoingMessage,
    OwnStatement,
    RestartState,
    StepEffects,
    persist_effects,
)
from consensus.voter_set import quorum
from ledger.blocks.application import LedgerApplication
from ledger.core.genesis import TRAINER, Founder, Genesis
from ledger.jobs import JobTerms, StartJob
from ledger.ledger_state import CurrentState, LedgerRules, core_modules, newest_module_versions
from peer.node.future_messages import RoundKey
from peer.node.node import AppliedBlock, Node, NodeInput, StepAction
from peer.node.open_rounds import RoundEffects
from protocol import codec
from protocol.identity import CachingVerifier, Ed25519Verifier, Identity, Signed, sign_message
from protocol.messages import Commit, Proposal, ProposeEnvelope, Transaction
from protocol.verdicts import Verdict
from storage.ledger_store import LedgerStore
from transport.network import DataReceived, PeerConnected
from transport.wire.framing import Channel, Inbox, Outbox, Priority
from transport.wire.noise_session import CipherState

BATCH_MAX = 64  # items in one turn, as in `peer.runtime.driver`
TRAINERS = 8  # verdicts in each ballot
PACKET_BYTES = 1_448  # of TCP payload
PACKET_OVERHEAD_BYTES = 66  # Ethernet, IP and TCP headers
FRAME_OVERHEAD_BYTES = 21  # length, record header, authentication tag
PAUSE_SECONDS = 0.5  # from a round's last opening to its verdicts; no message of the last block is then on its way
STALL_SECONDS_MAX = 600.0  # of virtual time without a decision, which indicates an error


# Measured costs ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Costs:
    """Seconds of processor time; `write_wait` is the rest of a durable write, in which the core is free but the turn waits."""

    sign: float
    verify: float
    frame: float  # sealed, through a socket's two system calls, and opened
    frame_byte: float
    write: float
    write_wait: float

    @classmethod
    def measured(cls) -> Costs:
        identity, body = Identity(bytes(32)), bytes(200)
        signature, verifier = identity.sign(body), Ed25519Verifier()
        sender, receiver = socket.socketpair()
        with sender, receiver:
            small, large = (_per_call(partial(_through, bytes(size), sender, receiver), 300) for size in (300, 60_000))
        per_byte = (large - small) / 59_700
        write, waits = _writes()
        return cls(
            _per_call(lambda: identity.sign(body), 300),
            _per_call(lambda: verifier.verify(identity.public, body, signature), 300),
            small - 300 * per_byte,
            per_byte,
            write,
            waits,
        )


def _per_call(call: Callable[[], object], count: int) -> float:
    """Return the median of a few blocks, because other programs on this machine disturb some of them."""
    call()
    samples = []
    for _ in range(9):
        started = time.thread_time()
        for _ in range(count):
            call()
        samples.append((time.thread_time() - started) / count)
    return statistics.median(samples)


_ciphers = CipherState(bytes(32)), CipherState(bytes(32))


def _through(data: bytes, sender: socket.socket, receiver: socket.socket) -> None:
    outbox = Outbox()
    outbox.push(Channel.APPLICATION, data, Priority.VOTE)
    sealed = _ciphers[0].encrypt(outbox.next_frame())
    sender.sendall(sealed)
    received = b""
    while len(received) < len(sealed):
        received += receiver.recv(1 << 16)
    Inbox().receive_frame(_ciphers[1].decrypt(received))


def _writes() -> tuple[float, float]:
    """Return processor time and waiting time of one durable vote."""
    signed = Signed(bytes(120), bytes(32), bytes(64))
    with tempfile.TemporaryDirectory(prefix="folkmoot-bench-", dir=Path.cwd()) as folder:
        store = LedgerStore(Path(folder) / "ledger.sqlite", bytes(32))
        processor, wall = [], []
        for view in range(200):
            started, started_wall = time.thread_time(), time.perf_counter()
            store.append_records([OwnStatement(("prepare", 1, view), signed)])
            processor.append(time.thread_time() - started)
            wall.append(time.perf_counter() - started_wall)
        store.close()
    return statistics.median(processor), max(0.0, statistics.median(wall) - statistics.median(processor))


# Peers ----------------------------------------------------------------------------------------------------------------


class CountingKeys:
    """Keys that sign and verify with a keyed hash, and count."""

    def __init__(self, name: str) -> None:
        self.public = hashlib.sha256(b"public " + name.encode()).digest()
        self.signed = self.verified = 0

    def sign(self, data: bytes) -> bytes:
        self.signed += 1
        return hashlib.blake2b(data, key=self.public, digest_size=64).digest()

    def verify(self, public: bytes, data: bytes, signature: bytes) -> bool:
        self.verified += 1
        return signature == hashlib.blake2b(data, key=public, digest_size=64).digest()


class UnauditedJobs:
    def terms_of_spec(self, spec: bytes) -> JobTerms:
        return JobTerms("bench", "bench", 10_000, audited=False, needs_worker=True, proposal_seconds=600.0)

    def why_base_refused(self, base: bytes, spec: bytes) -> str | None:
        return None

    why_read_model_refused = why_base_refused
    why_continuation_refused = why_base_refused


class Log:
    """A journal in memory: the cost of the disk is charged without any write."""

    def __init__(self) -> None:
        self.decided: dict[int, DecidedBlock] = {}
        self.blocks: dict[bytes, bytes] = {}

    def append_records(self, records: Sequence[JournalRecord]) -> None:
        for record in records:
            if isinstance(record, DecidedBlock):
                self.decided[record.height] = record

    def read_restart_state(self) -> RestartState:
        return RestartState()

    def get_decision(self, height: int) -> DecidedBlock | None:
        return self.decided.get(height)

    def get_block(self, digest: bytes) -> bytes | None:
        return self.blocks.get(digest)


@dataclass
class Spent:
    """Processor seconds of one peer, and its bytes on the wire, since the last reset."""

    turns: float = 0.0
    applying: float = 0.0
    signatures: float = 0.0
    frames: float = 0.0
    writes: float = 0.0
    bytes_sent: int = 0
    verified: int = 0
    messages: int = 0

    @property
    def processor(self) -> float:
        return self.turns + self.applying + self.signatures + self.frames + self.writes


class Peer:
    def __init__(self, network: Network, keys: CountingKeys, genesis: Genesis) -> None:
        self.network, self.keys = network, keys
        verifier = CachingVerifier(keys)
        rules = LedgerRules(genesis, verifier, core_modules(UnauditedJobs()))
        state = rules.genesis_state()
        self.applied = state
        self.journal = Log()
        ledger = LedgerApplication(rules, CurrentState(state), state.state_root)
        self.node = Node(keys, rules, ledger, RestartState(), verifier, lambda job, number: {}, lambda job, number: ())
        self.inbox: deque[NodeInput] = deque()
        self.free = self.uplink_free = 0.0
        self.spent = Spent()
        self.decided_at: dict[int, float] = {}
        self._awake: float | None = None

    @property
    def me(self) -> bytes:
        return self.keys.public

    # The core

    def take(self, *items: NodeInput) -> None:
        self.inbox.extend(items)
        self.wake(self.network.now)

    def wake(self, at: float) -> None:
        at = max(at, self.free)
        if self._awake is None or at < self._awake:
            self._awake = at
            self.network.at(at, lambda: self._run(at))

    def _run(self, at: float) -> None:
        if self._awake != at:
            return  # it was moved to an earlier time
        self._awake = None
        items = [self.inbox.popleft() for _ in range(min(BATCH_MAX, len(self.inbox)))]
        frames = sum(isinstance(item, DataReceived) for item in items)
        turn, outgoing = self._charged("turns", lambda: self._turn(items))
        self._charge("frames", frames * self.network.costs.frame / 2)
        if turn.records:
            self._charge("writes", self.network.costs.write)
            self.free += self.network.costs.write_wait
        self._send(outgoing)
        for decided in turn.decided_blocks:
            self.decided_at[decided.height] = self.free
            self._apply()
        self.network.opened(self)
        if self.inbox:
            self.wake(self.free)
        elif turn.deadline is not None:
            self.wake(turn.deadline)

    def _turn(self, items: list[NodeInput]) -> tuple[StepEffects, list[tuple[tuple[bytes, ...] | None, bytes, OutgoingMessage]]]:
        turn = self.node.step(items, self.network.epoch + self.network.now)
        assert not turn.faults, turn.faults
        sends = persist_effects(turn, self.journal)
        deadline = None if turn.deadline is None else turn.deadline - self.network.epoch
        return StepEffects(turn.records, (), deadline), [(send.to, codec.encode(send.message), send.message) for send in sends]

    def _charged(self, what: str, work: Callable[[], Any]) -> Any:
        """Do the work, and charge its measured time and the costs of real signatures."""
        costs, signed, verified = self.network.costs, self.keys.signed, self.keys.verified
        started = time.thread_time()
        result = work()
        seconds = time.thread_time() - started
        self.free = max(self.free, self.network.now)
        self._charge(what, seconds)
        self._charge("signatures", (self.keys.signed - signed) * costs.sign + (self.keys.verified - verified) * costs.verify)
        self.spent.verified += self.keys.verified - verified
        return result

    def _charge(self, what: str, seconds: float) -> None:
        setattr(self.spent, what, getattr(self.spent, what) + seconds)
        self.free += seconds

    def _apply(self) -> None:
        decided = self.journal.decided[self.applied.height + 1]

        def work() -> AppliedBlock:
            transition = self.node.rules.apply_block(self.applied, decided.decode())
            stepped = [*transition.started_jobs, *(closed.job for closed in transition.closed_rounds)]
            roots = {job: hashlib.sha256(job + decided.digest).digest() for job in stepped}
            self.applied = transition.finish_state(roots)
            self.node.rules.encode_state(self.applied)
            return AppliedBlock(decided, transition, self.applied)

        applied = self._charged("applying", work)
        self._charge("writes", self.network.costs.write)
        self.network.at(self.free + self.network.costs.write_wait, lambda: self.take(applied))

    # The uplink

    def _send(self, outgoing: list[tuple[tuple[bytes, ...] | None, bytes, OutgoingMessage]]) -> None:
        boxes: dict[bytes, list[bytes]] = {}
        for to, data, message in outgoing:
            if isinstance(message, ProposeEnvelope):
                self.network.proposed(self.free, self.node.replica.height, len(data))
            for peer in self.network.linked(self.me) if to is None else to:
                boxes.setdefault(peer, []).append(data)
        for peer, messages in boxes.items():
            if peer in self.network.peers:
                self._transmit(peer, messages)

    def _transmit(self, peer: bytes, messages: list[bytes]) -> None:
        """Send all messages of a turn to one peer together."""
        size = sum(map(len, messages)) + FRAME_OVERHEAD_BYTES
        self._charge("frames", self.network.costs.frame / 2 + size * self.network.costs.frame_byte)
        wire = size + PACKET_OVERHEAD_BYTES * -(-size // PACKET_BYTES)
        self.spent.bytes_sent += wire
        self.spent.messages += len(messages)
        self.uplink_free = max(self.uplink_free, self.free) + 8 * wire / self.network.bits_per_second
        items = [DataReceived(self.me, data) for data in messages]
        self.network.at(self.uplink_free + self.network.delay, lambda: self.network.peers[peer].take(*items))


# The network ----------------------------------------------------------------------------------------------------------


@dataclass
class Height:
    """One closed round, in seconds. `decided` of every peer counts from the verdicts and from the proposal."""

    from_verdicts: list[float]
    from_proposal: list[float]
    processor: list[float]  # of each peer, until all have applied the block
    bytes_sent: list[int]
    block_bytes: int
    proposal_bytes: int
    views: int  # views of the decision
    spent: Spent  # summed over all peers


@dataclass
class Network:
    """`n` voters, `silent` of which send nothing. All links have the same delay."""

    n: int
    round_trip: float
    bits_per_second: float
    costs: Costs
    silent: int = 0
    now: float = 0.0
    epoch: float = 1_700_000_000.0
    peers: dict[bytes, Peer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        keys = sorted((CountingKeys(f"voter {i}") for i in range(self.n)), key=lambda entry: entry.public)
        apart = self.n // self.silent if self.silent else 1  # their turns to lead are spread
        silent = {entry.public for entry in keys[::apart][: self.silent]}
        present = [entry for entry in keys if entry.public not in silent]
        trainers = {entry.public for entry in present[:TRAINERS]}  # none of the silent ones, because rounds would wait for them
        founders = {entry.public: Founder("voter", (TRAINER,) if entry.public in trainers else ()) for entry in keys}
        self.genesis = Genesis("bench", 1, bytes(16), founders, newest_module_versions(core_modules(UnauditedJobs())))
        self.trainers = sorted(trainers)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._proposals: dict[int, tuple[float, int]] = {}
        self._open: dict[RoundKey, set[bytes]] = {}
        for entry in present:
            self.peers[entry.public] = Peer(self, entry, self.genesis)
        for me, peer in self.peers.items():
            peer.take(*(PeerConnected(other) for other in self.peers if other != me))

    @property
    def delay(self) -> float:
        return self.round_trip / 2

    def linked(self, me: bytes) -> list[bytes]:
        return [peer for peer in self.peers if peer != me]

    def at(self, when: float, call: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._queue, (max(when, self.now), self._number, call))

    def proposed(self, when: float, height: int, size: int) -> None:
        self._proposals.setdefault(height, (when, size))

    def opened(self, peer: Peer) -> None:
        for change in peer.node.take_round_changes():
            self._open.setdefault(change.key, set()).add(peer.me)

    # Running

    def run(self, until: float) -> None:
        while self._queue and self._queue[0][0] <= until:
            self.now, _, call = heapq.heappop(self._queue)
            call()
        self.now = until

    def run_until(self, condition: Callable[[], bool], seconds_max: float) -> None:
        end = self.now + seconds_max
        while not condition():
            assert self._queue and self._queue[0][0] <= end, f"nothing was decided for {seconds_max} s, at {self.now:.1f} s"
            self.now, _, call = heapq.heappop(self._queue)
            call()

    def begin(self) -> None:
        """Start the job whose rounds are measured."""
        self.run_until(lambda: all(peer.node.may_sign_round_messages for peer in self.peers.values()), STALL_SECONDS_MAX)
        author = self.peers[self.trainers[0]]
        transaction = Transaction(1, 500, "job/start", codec.encode(StartJob(b"bench")))
        signed = sign_message(author.keys, self.genesis.chain_id, transaction)

        def put() -> RoundEffects:
            author.node.ledger.mempool.add_transaction(signed)
            return RoundEffects(sends=[signed])

        author.take(StepAction(put))
        self.run_until(lambda: self._everybody_in(0), STALL_SECONDS_MAX)
        self.job = next(iter(author.node.state.jobs.jobs))

    def _everybody_in(self, number: int) -> bool:
        return all(any(job.round == number for job in peer.node.state.jobs.running().values()) for peer in self.peers.values())

    def round(self, number: int) -> Height:
        """Measure one round, from the verdicts of all peers at one moment. All proposals have arrived before."""
        for trainer in self.trainers:
            self.peers[trainer].take(StepAction(self._publication(self.peers[trainer], number)))
        self.run(self.now + 2 * self.round_trip + PAUSE_SECONDS)
        for peer in self.peers.values():
            peer.spent = Spent()
        started = self.now
        for peer in self.peers.values():
            peer.take(StepAction(self._verdicts(peer, number)))
        height = next(iter(self.peers.values())).node.replica.height
        with _collected():
            self.run_until(lambda: self._everybody_in(number + 1), STALL_SECONDS_MAX)
        return self._height(height, started)

    def _publication(self, peer: Peer, number: int) -> Callable[[], RoundEffects]:
        def publish() -> RoundEffects:
            root = peer.node.state.jobs.jobs[self.job].model_root
            payload = hashlib.sha256(peer.me + root).digest()
            now = self.epoch + self.now
            return peer.node.rounds.publish_proposal(Proposal(self.job, number, root, payload, 60_000, payload, None), now)

        return publish

    def _verdicts(self, peer: Peer, number: int) -> Callable[[], None]:
        def judge() -> None:
            for trainer in self.trainers:
                peer.node.rounds.record_verdict((self.job, number), trainer, Verdict.ACCEPT, self.epoch + self.now)

        return judge

    def _height(self, height: int, started: float) -> Height:
        peers = self.peers.values()
        decided = next(iter(peers)).journal.decided[height]
        proposed, size = self._proposals[height]
        total = Spent()
        for peer in peers:
            for name, value in asdict(peer.spent).items():
                setattr(total, name, getattr(total, name) + value)
        view = codec.decode_message(decided.certificate.vote, (Commit,)).view
        return Height(
            [peer.decided_at[height] - started for peer in peers],
            [peer.decided_at[height] - proposed for peer in peers],
            [peer.spent.processor for peer in peers],
            [peer.spent.bytes_sent for peer in peers],
            len(decided.block),
            size,
            view + 1,
            total,
        )


@contextlib.contextmanager
def _collected() -> Iterator[None]:
    """Disable garbage collection, which would charge one peer for the objects of all."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def limit(network: Network, height: Height) -> float:
    """Return a lower bound: four one-way delays, four durable writes, and the proposal to q − 1 others on one uplink."""
    votes = 4 * (network.costs.write + network.costs.write_wait)
    needed = quorum(network.n) - 1
    return 4 * network.delay + votes + 8 * needed * height.proposal_bytes / network.bits_per_second
