"""Ledger without consensus: real blocks and certificates, models of a few bytes, serving peers and a fetching peer."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from consensus.block import encode_header, make_header
from consensus.effects import DecidedBlock, PeerFault
from consensus.light_client import TrustedBlock, make_light_block
from consensus.voter_set import VoterSet
from ledger.blocks.application import LedgerApplication
from ledger.core.module import Module
from ledger.jobs import Job
from ledger.ledger_state import CurrentState, LedgerState
from ledger.members import ApproveVoter, ResignAsVoter, StandAsVoter
from ledger.snapshots.snapshot_download import DownloadStep, SnapshotAnswer, SnapshotDownload, SnapshotRequest, TrustBasis
from ledger.snapshots.snapshot_server import SnapshotStore, models_in_state
from protocol import codec, merkle
from protocol.errors import RemoteProtocolError, StorageError
from protocol.messages import GetSnapshot, GetSnapshotPart, LightBlock
from tests.ledger.blocks import decided_after
from tests.ledger.notebook import NotebookModule, Write, notes
from tests.ledger.world import BY_KEY, PEOPLE, World
from tests.sim.keys import FastSigner, FastVerifier

PARTS = 5  # of a model
DELAY_SECONDS = 0.01  # one way


@dataclass
class MemoryModels:
    """Implements `ledger.snapshots.snapshot_server.ModelStore`."""

    models: dict[tuple[bytes, int], list[bytes]] = field(default_factory=dict)
    pinned: frozenset[tuple[bytes, int]] = frozenset()

    def make(self, job: bytes, number: int) -> bytes:
        """Make the model at the start of round `number` and return its root."""
        self.models[job, number] = [job + bytes([number, part]) * (part + 1) for part in range(PARTS)]
        return self.root(job, number)

    def root(self, job: bytes, number: int) -> bytes:
        return merkle.merkle_root(list(map(merkle.leaf_hash, self._get(job, number))))

    def _get(self, job: bytes, number: int) -> list[bytes]:
        if (job, number) not in self.models:
            raise StorageError("no such model")
        return self.models[job, number]

    def read_manifest(self, job: bytes, number: int) -> bytes:
        return codec.encode(tuple(map(merkle.leaf_hash, self._get(job, number))))

    def read_part(self, job: bytes, number: int, index: int) -> bytes:
        return self._get(job, number)[index]

    def start_receiving(self, job: bytes, number: int, root: bytes, manifest: bytes) -> MemoryIncoming:
        leaves = codec.decode(tuple[bytes, ...], manifest)
        if merkle.merkle_root(leaves) != root:
            raise RemoteProtocolError("bad-part", "manifest")
        return MemoryIncoming(self, (job, number), leaves, [b""] * len(leaves))

    def has_model(self, job: bytes, number: int, root: bytes) -> bool:
        return (job, number) in self.models and self.root(job, number) == root

    def set_pinned_models(self, models: frozenset[tuple[bytes, int]]) -> None:
        self.pinned = models


@dataclass
class MemoryIncoming:
    host: MemoryModels
    key: tuple[bytes, int]
    leaves: tuple[bytes, ...]
    data: list[bytes]
    abandoned: bool = False

    @property
    def parts(self) -> int:
        return len(self.leaves)

    def add_part(self, index: int, data: bytes) -> None:
        if merkle.leaf_hash(data) != self.leaves[index]:
            raise RemoteProtocolError("bad-part", "model")
        self.data[index] = data

    def install(self) -> None:
        self.host.models[self.key] = self.data

    def discard_parts(self) -> None:
        self.abandoned = True


class Chain(World):
    """All decided blocks. Implements `BlockArchive` for a peer that was there from the start."""

    def __init__(self, voters: int = 4, trainers: int = 3, modules: tuple[Module[Any], ...] = (NotebookModule(),)) -> None:
        super().__init__(voters, trainers, modules=modules)
        self.models = MemoryModels()
        self.decided: dict[int, DecidedBlock] = {}
        self.states = {0: self.state}
        self.proof: dict[int, LightBlock] = {}
        self.signers: Callable[[VoterSet], Iterable[FastSigner]] = lambda voters: [BY_KEY[key] for key in voters.keys]

    def fork(self) -> Chain:
        """Return a copy of the history, which continues independently."""
        other = Chain()
        other.genesis, other.rules, other.chain = self.genesis, self.rules, self.chain
        other.ledger = LedgerApplication(self.rules, CurrentState(self.state), self.ledger.certified_root)
        other.models = MemoryModels(dict(self.models.models))
        other.decided, other.states, other.proof = dict(self.decided), dict(self.states), dict(self.proof)
        other.signers = self.signers
        return other

    def new_root(self, job: Job, key: bytes) -> bytes:
        return self.models.make(key, job.round)

    def keep(self, before: LedgerState, after: LedgerState, body: bytes) -> None:
        signers = self.signers(VoterSet(before.members.voters))
        decided = decided_after(before, self.decided.get(before.height), self.chain, body, signers)
        self.decided[after.height], self.states[after.height] = decided, after
        link = make_light_block(decided, VoterSet(before.members.upcoming))
        if link is not None:
            self.proof[after.height] = link

    # Archive

    def get_decision(self, height: int) -> DecidedBlock | None:
        return self.decided.get(height)

    def get_header(self, height: int) -> bytes | None:
        decided = self.decided.get(height)
        return encode_header(make_header(decided.decode())) if decided else None

    def light_blocks(self, after: int, until: int) -> list[LightBlock]:
        return [self.proof[height] for height in sorted(self.proof) if after < height <= until]

    # History

    def grow(self, height: int) -> None:
        while self.state.height < height:
            self.decide()

    def play(self, job: bytes) -> None:
        self.decide(closings=(self.closing(job),))

    def write(self, notes: dict[bytes, bytes | None]) -> None:
        self.decide(self.tx(PEOPLE[0], "notebook/write", Write(notes)))

    def admit_voter(self, person: FastSigner, number: int) -> None:
        """Decide three blocks, after which the newcomer votes."""
        self.decide(self.admission(person, token=FastSigner(f"token {number}")))
        self.decide()  # certifies a root
        root = self.state.certified_roots[self.state.height - 1]
        self.decide(self.tx(person, "member/stand", StandAsVoter(self.state.height - 1, root)))
        self.decide(
            *(self.tx(BY_KEY[key], "member/approve", ApproveVoter(person.public)) for key in self.state.members.voters),
            empty_after=2,
        )
        assert person.public in self.state.members.voters

    def dismiss_voter(self, person: FastSigner) -> None:
        self.decide(self.tx(person, "member/resign", ResignAsVoter()), empty_after=2)
        assert person.public not in self.state.members.voters

    def anchor(self, height: int) -> TrustedBlock:
        return TrustedBlock(height, self.decided[height].digest)

    def shelf(self, until: int | None = None) -> SnapshotStore:
        """Return the snapshot store of a peer that has applied all blocks, or those up to a height."""
        shelf = SnapshotStore(self, self.models)
        for height in range(1, (until or self.state.height) + 1):
            shelf.add_applied_state(self.states[height], 0.0)
        return shelf

    def basis(self, height: int = 0, anchor: TrustedBlock | None = None) -> TrustBasis:
        return TrustBasis(self.chain, FastVerifier(), height, VoterSet(self.states[height].members.voters), anchor)


def lived(height: int = 40) -> Chain:
    """Return a chain with joined and removed voters, a finished job, a running job and notes."""
    chain = Chain()
    done = chain.start()
    chain.admit_voter(PEOPLE[4], 1)
    for _ in range(2):
        chain.play(done)
    chain.write(notes(60))
    chain.dismiss_voter(PEOPLE[1])
    running = chain.start(spec=b"unaudited:99")
    chain.grow(height - 3)
    chain.play(running)
    chain.grow(height)
    return chain


Says = Callable[[SnapshotRequest, Any], Any]  # (request, honest answer) -> answer that is sent, or None for silence


def honestly(request: SnapshotRequest, answer: SnapshotAnswer) -> SnapshotAnswer:
    return answer


@dataclass
class Server:
    shelf: SnapshotStore
    says: Says = honestly
    delay: float = DELAY_SECONDS
    asked: list[SnapshotRequest] = field(default_factory=list)
    served: list[GetSnapshotPart] = field(default_factory=list)


class Fetch:
    """A peer that fetches from these servers, in virtual time."""

    def __init__(self, chain: Chain, servers: dict[bytes, Server], basis: TrustBasis | None = None, wanted: int = 0) -> None:
        self.servers = servers
        self.models = MemoryModels()
        self.transfer = SnapshotDownload(chain.rules, self.models, basis or chain.basis(), wanted)
        self.faults: list[PeerFault] = []
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[[], DownloadStep]]] = []
        self._order = itertools.count()
        for peer in servers:
            self.at(0.0, lambda peer=peer: self.transfer.add_peer(peer, self.now))

    def at(self, time: float, action: Callable[[], DownloadStep]) -> None:
        heapq.heappush(self._queue, (time, next(self._order), action))

    def run(self, seconds: float = 60.0) -> Fetch:
        """Run until the state is restored, a fork is detected, or time is up."""
        turns = 0
        while self.transfer.restored is None and self.transfer.conflict is None:
            turns += 1
            assert turns < 20_000, "it turns without getting anywhere"
            deadline = self.transfer.deadline
            comes = self._queue[0][0] if self._queue else math.inf
            if min(comes, deadline) > seconds:
                break
            self.now = max(self.now, min(comes, deadline))
            self.do(heapq.heappop(self._queue)[2]() if comes <= deadline else self.transfer.handle_tick(self.now))
        return self

    def do(self, step: DownloadStep) -> None:
        self.faults.extend(step.faults)
        for peer, request in step.sends:
            self._serve(peer, request)

    def _serve(self, peer: bytes, request: SnapshotRequest) -> None:
        server = self.servers[peer]
        server.asked.append(request)
        try:
            answer: Any = server.shelf.answer_request(
                codec.decode_message(codec.encode(request), (GetSnapshot, GetSnapshotPart)), self.now
            )
        except RemoteProtocolError as error:
            raise AssertionError(f"an honest request was refused: {error}") from error
        answer = server.says(request, answer)
        if answer is not None:
            if isinstance(request, GetSnapshotPart):
                server.served.append(request)
            self.at(self.now + 2 * server.delay, lambda: self.transfer.handle_answer(peer, answer, self.now))

    @property
    def blamed(self) -> dict[bytes, str]:
        return {fault.peer: fault.error.reason for fault in self.faults}


def assert_restored(fetch: Fetch, chain: Chain) -> Fetch:
    """Check that the state has the bytes of every other peer, and that the models have the roots in the state."""
    restored = fetch.transfer.restored
    assert restored is not None
    expected = chain.states[restored.height]
    assert restored.state.state_root == expected.state_root
    assert chain.rules.encode_state(restored.state) == chain.rules.encode_state(expected)
    assert [decided.height for decided in restored.decisions] == [restored.height + i for i in (-1, 0, 1)]
    assert list(restored.decisions) == [chain.decided[decided.height] for decided in restored.decisions]
    for name, table in expected.tables.items():
        assert list(restored.state.tables[name].items()) == list(table.items())
    restored.install_models()
    for (key, number), root in models_in_state(restored.state).items():
        assert fetch.models.root(key, number) == root
    return fetch
