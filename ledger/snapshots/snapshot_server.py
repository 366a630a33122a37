"""Snapshots that a peer offers: the stored snapshots, their proofs, and answers to requests. Sans-IO.

A snapshot of height H is the state after H: the ledger's modules and the models of its jobs. The block at H + 1 certifies it. A
snapshot costs nothing until it is requested: states are immutable, and models of past rounds are folders that are kept longer.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, Protocol

from consensus.block import decode_header, encode_header, make_header
from consensus.effects import DecidedBlock
from ledger.ledger_state import CERTIFIED_ROOTS_KEPT, LedgerState, module_digest
from ledger.tables import decode_range_name, range_depth
from protocol import codec
from protocol.errors import RemoteProtocolError, StorageError
from protocol.limits import HEADER_BYTES_MAX, LIGHT_BLOCKS_MAX, SNAPSHOT_PART_BYTES_MAX
from protocol.messages import GetSnapshot, GetSnapshotPart, LightBlock, NoSnapshot, SnapshotContent, SnapshotOffer, SnapshotPart

# Heights between two snapshots, at multiples of this number: all peers have the same snapshots and share the work.
SNAPSHOT_HEIGHTS: Final = 8
# Number of heights by which a peer must lag to request a snapshot. A model has 64 bits per parameter, and an update has about
# 1. With a few trainers, the updates of these heights are therefore as large as a model, and the peer must also apply them.
SNAPSHOT_LAG_HEIGHTS: Final = 16
RECENT_STATES: Final = 3  # certified states to offer if no snapshot at a multiple is suitable; each keeps a model longer
SNAPSHOTS_KEPT: Final = 2  # snapshots at multiples: a transfer of one can end while the next is made
EXTRA_SNAPSHOTS_KEPT: Final = 2  # snapshots at other heights that are kept while they are downloaded
SNAPSHOTS_MAX: Final = 6  # snapshots in total; a snapshot at a multiple then stays for 32 heights while it is downloaded
LEASE_SECONDS: Final = 30.0  # seconds after a request for which a snapshot counts as being downloaded
SNAPSHOT_HEIGHT_MIN: Final = 2  # lowest height of a snapshot, which includes the blocks H − 1 to H + 1

REQUESTS_MAX: Final = 16  # waiting requests of one peer: an honest peer has half as many
RESPONSE_BYTES_PER_SECOND: Final = 32 << 20  # bytes per second to one peer: a download must not slow down training
RESPONSE_BURST_BYTES: Final = 8 << 20
OFFER_COST_BYTES: Final = 256 << 10  # bytes that an offer counts as: it is small, but hashes the whole state
OFFER_LIGHT_BLOCKS_BYTES_MAX: Final = SNAPSHOT_PART_BYTES_MAX

assert SNAPSHOT_HEIGHTS < SNAPSHOT_LAG_HEIGHTS  # a peer that has installed a snapshot must not lag enough to request the next one
assert RESPONSE_BURST_BYTES >= SNAPSHOT_PART_BYTES_MAX


class ModelReceiver(Protocol):
    """The download of one model in parts. A model that is already stored stays."""

    parts: int

    def add_part(self, index: int, data: bytes) -> None:
        """Store a part. Raises `RemoteProtocolError` if the part does not belong to the model root."""

    def install(self) -> None:
        """Store the complete model durably and atomically under its name."""

    def discard_parts(self) -> None: ...


class ModelStore(Protocol):
    """The stored models of jobs, by job and round: each one is the model with which the round starts.

    Reads raise `StorageError`.
    """

    def read_manifest(self, job: bytes, number: int) -> bytes: ...

    def read_part(self, job: bytes, number: int, index: int) -> bytes: ...

    def start_receiving(self, job: bytes, number: int, root: bytes, manifest: bytes) -> ModelReceiver:
        """Start a download. Raises `RemoteProtocolError` if `root` does not cover this manifest."""

    def has_model(self, job: bytes, number: int, root: bytes) -> bool:
        """Return whether the model with this root is stored. Every byte is checked."""

    def set_pinned_models(self, models: frozenset[tuple[bytes, int]]) -> None:
        """Protect exactly these models against deletion, however old they are."""


def models_in_state(state: LedgerState) -> dict[tuple[bytes, int], bytes]:
    """Return (job, round) -> model root, for the present, anchored and saved models of all jobs in the state."""
    jobs = state.jobs.jobs.items()
    earlier = {(key, model.round): model.root for key, job in jobs for model in (*job.anchors, *job.saved_models)}
    return earlier | {(key, job.round): job.model_root for key, job in jobs}


def encode_model_name(job: bytes, number: int) -> bytes:
    """Return the name of a model in requests, which contains its job and its round."""
    return job + number.to_bytes(8, "big")


def decode_model_name(name: bytes) -> tuple[bytes, int]:
    return name[:-8], int.from_bytes(name[-8:], "big")


class BlockArchive(Protocol):
    """The decided blocks that this peer stores, and headers and links of older blocks."""

    def get_decision(self, height: int) -> DecidedBlock | None: ...

    def get_header(self, height: int) -> bytes | None:
        """Return the header at this height. None: it is not stored. Headers just before the first stored block are available."""

    def light_blocks(self, after: int, until: int) -> Iterable[LightBlock]:
        """Return, ascending, the light blocks of the heights in `after` < h ≤ `until` that change the voter set."""


@dataclass
class Snapshot:
    """The state after `height`. Only the modules of `state` belong to the snapshot: an empty block does not change them."""

    height: int
    state: LedgerState
    last_request_at: float = float("-inf")  # time of the last request for this snapshot or a part of it
    modules_read: dict[str, bytes] = field(default_factory=dict)
    # Name and encoding of the last requested range, of which a peer may request several pieces.
    rows_read: tuple[bytes, bytes] = (b"", b"")

    @cached_property
    def digests(self) -> dict[str, bytes]:
        return {name: module_digest(self.encoded_module(name)) for name in sorted(self.state.modules)}

    def encoded_module(self, name: str) -> bytes:
        if name not in self.modules_read:
            self.modules_read[name] = codec.encode(self.state.modules[name])
        return self.modules_read[name]

    def encoded_range(self, name: bytes) -> bytes:
        """Return the encoded range of this name. Raises `RemoteProtocolError` if no correct peer needs it, and `StorageError`."""
        if self.rows_read[0] != name:
            table, of = decode_range_name(name)
            found = self.state.tables.get(table)
            if found is None or len(of) != range_depth(found.root):
                raise RemoteProtocolError("bad-request", f"no table {table!r} with ranges of {len(of)} bits")
            self.rows_read = (name, codec.encode(found.prove_range(of)))
        return self.rows_read[1]

    @cached_property
    def models(self) -> frozenset[tuple[bytes, int]]:
        return frozenset(models_in_state(self.state))


class SnapshotStore:
    """The snapshots of one peer.

    `add_applied_state` adds each new state. `answer_request` reads from disk, perhaps in a thread.
    """

    def __init__(self, archive: BlockArchive, models: ModelStore) -> None:
        self._archive, self._models = archive, models
        self._recent: dict[int, Snapshot] = {}  # height -> recent state; the last one is not certified yet
        self._held: dict[int, Snapshot] = {}

    def add_initial_state(self, state: LedgerState) -> None:
        """Add the state with which this peer starts.

        If the last block left the state root unchanged, that block also certifies this state for the height before.
        """
        last = self._archive.get_decision(state.height)
        if last is not None and last.decode().state_root == state.state_root:
            self._add(Snapshot(state.height - 1, state))
        self._add(Snapshot(state.height, state))
        self._pin()

    def add_applied_state(self, state: LedgerState, now: float) -> None:
        """Add the state after an applied block. The block certifies the state of the height before."""
        self._add(Snapshot(state.height, state))
        before = state.height - 1
        if before % SNAPSHOT_HEIGHTS == 0 and before in self._recent and before >= SNAPSHOT_HEIGHT_MIN:
            self._held[before] = self._recent[before]
        self._forget(now)
        self._pin()

    def _add(self, snapshot: Snapshot) -> None:
        self._recent[snapshot.height] = snapshot
        self._recent = {height: kept for height, kept in self._recent.items() if height >= snapshot.height - RECENT_STATES}

    def _forget(self, now: float) -> None:
        """Keep the newest snapshots at multiples of SNAPSHOT_HEIGHTS, and as many of the snapshots in download as fit.

        Multiples come first: all peers download these snapshots, while a stranger could request one at every height. A new peer
        whose invitation names a block between two multiples may need another height. The lowest snapshots in download at other
        heights therefore stay, too.
        """
        multiples = sorted(height for height in self._held if height % SNAPSHOT_HEIGHTS == 0)
        stay = multiples[-SNAPSHOTS_KEPT:]
        leased = sorted(of for of, held in self._held.items() if of not in stay and held.last_request_at + LEASE_SECONDS >= now)
        stay += [height for height in leased if height not in multiples][:EXTRA_SNAPSHOTS_KEPT]
        leased = sorted(set(leased) - set(stay), key=lambda height: (height in multiples, height), reverse=True)
        stay += leased[: SNAPSHOTS_MAX - len(stay)]
        self._held = {height: self._held[height] for height in stay}

    @property
    def _certified(self) -> dict[int, Snapshot]:
        return {height: kept for height, kept in self._recent.items() if height < max(self._recent)} | self._held

    @property
    def newest_snapshot(self) -> Snapshot | None:
        """The newest certified snapshot; None: there is none yet."""
        return max(self._certified.values(), key=lambda kept: kept.height, default=None)

    def _pin(self) -> None:
        self._models.set_pinned_models(
            frozenset().union(*(kept.models for kept in (*self._recent.values(), *self._held.values())))
        )

    # Answers ---------------------------------------------------------------------------------------------------------

    def answer_request(self, message: GetSnapshot | GetSnapshotPart, now: float) -> SnapshotOffer | NoSnapshot | SnapshotPart:
        """Answer a request. Raises `RemoteProtocolError` for a request that no correct peer sends."""
        try:
            return self._offer(message, now) if isinstance(message, GetSnapshot) else self._part(message, now)
        except StorageError:  # a damaged model is not reported here, because the rounds of this peer detect it soon
            height = message.height if isinstance(message, GetSnapshotPart) else 0
            for kept in (self._recent, self._held):
                kept.pop(height, None)
            return NoSnapshot(height)

    def _offer(self, message: GetSnapshot, now: float) -> SnapshotOffer | NoSnapshot:
        snapshot = self._choose(max(message.wanted, message.known + SNAPSHOT_HEIGHT_MIN, message.anchor - 1))
        proof = self._proof(message, snapshot.height) if snapshot else None
        if snapshot is None or proof is None:
            return NoSnapshot(0)
        snapshot.last_request_at = now
        self._held[snapshot.height] = snapshot
        self._forget(now)
        links, is_whole = proof
        return SnapshotOffer(snapshot.height, links, snapshot.digests if is_whole else {})

    def _choose(self, wanted: int) -> Snapshot | None:
        """Return the certified snapshot at height `wanted`, else the newest stored one above it, else the newest recent one.

        None: all certified snapshots are below `wanted`.
        """
        able = {height: kept for height, kept in self._certified.items() if height >= max(wanted, SNAPSHOT_HEIGHT_MIN)}
        if wanted in able or not able:
            return able.get(wanted)
        return max(able.values(), key=lambda kept: (kept.height in self._held, kept.height))

    def _proof(self, message: GetSnapshot, height: int) -> tuple[tuple[LightBlock, ...], bool] | None:
        """Return the links of an offer for the snapshot of this `height`, and whether they reach the snapshot.

        None: a header that the proof must contain is not stored. The number of links is limited by the size of an offer. The last
        three links stay together, because they prove the snapshot.
        """
        heights = [message.anchor] if message.known < message.anchor < height - 1 else []
        heights += [height - 1, height, height + 1]
        shown = [link for of in heights if (link := self._link(of))]
        if len(shown) < len(heights):
            return None
        links: list[LightBlock] = []
        size = last = 0
        for link in heapq.merge(shown, self._archive.light_blocks(message.known, height + 1), key=light_block_height):
            if light_block_height(link) == last:
                continue
            last, size = light_block_height(link), size + len(codec.encode(link))
            if (size > OFFER_LIGHT_BLOCKS_BYTES_MAX or len(links) >= LIGHT_BLOCKS_MAX - 3) and links and last < height - 1:
                return tuple(links), False
            links.append(link)
        return tuple(links), True

    def light_blocks_to(self, height: int) -> tuple[LightBlock, ...]:
        """Return the links from the genesis to the block that certifies the state after `height`."""
        last = self._link(height + 1)
        return (*self._archive.light_blocks(0, height), last) if last else ()

    def _link(self, height: int) -> LightBlock | None:
        for link in self._archive.light_blocks(height - 1, height):
            return link
        decided = self._archive.get_decision(height)
        return LightBlock(encode_header(make_header(decided.decode())), decided.certificate, ()) if decided else None

    def _part(self, message: GetSnapshotPart, now: float) -> NoSnapshot | SnapshotPart:
        snapshot = self._certified.get(message.height)
        if snapshot is None:
            return NoSnapshot(message.height)
        snapshot.last_request_at = now
        data = self._data(snapshot, message)
        if data is None:
            return NoSnapshot(message.height)
        return SnapshotPart(message.height, message.content, message.name, message.index, data)

    def _data(self, snapshot: Snapshot, message: GetSnapshotPart) -> bytes | None:
        """Return the data of a part.

        None: only another peer may have it. Raises `RemoteProtocolError` for a part of no such snapshot.
        """
        match message.content:
            case SnapshotContent.BLOCK:
                for near in (snapshot.height - 1, snapshot.height, snapshot.height + 1):
                    decided = self._archive.get_decision(near)
                    if decided is not None and decided.digest == message.name:
                        return _piece(decided.block, message.index)
                raise RemoteProtocolError("bad-request", f"no block with this digest in the snapshot of height {snapshot.height}")
            case SnapshotContent.HEADERS:
                if not 0 < message.index < snapshot.height:
                    problem = f"no header of height {message.index} in the snapshot of height {snapshot.height}"
                    raise RemoteProtocolError("bad-request", problem)
                return self._headers(message.index)
            case SnapshotContent.MODULE:
                name = message.name.decode(errors="replace")
                if name not in snapshot.state.modules:
                    raise RemoteProtocolError("bad-request", f"no module {name!r} in the snapshot of height {snapshot.height}")
                return _piece(snapshot.encoded_module(name), message.index)
            case SnapshotContent.ROWS:
                return _piece(snapshot.encoded_range(message.name), message.index)
        model = decode_model_name(message.name)
        if model not in snapshot.models:
            raise RemoteProtocolError("bad-request", f"no such model in the snapshot of height {snapshot.height}")
        if message.content is SnapshotContent.MANIFEST:
            return _piece(self._models.read_manifest(*model), message.index)
        return self._models.read_part(*model, message.index)

    def _headers(self, first: int) -> bytes | None:
        """Return encoded headers in descending order from height `first`. None: there is none.

        A peer that began with a snapshot has only the headers that the snapshot contained.
        """
        headers: list[bytes] = []
        size = 0
        for height in range(first, max(0, first - CERTIFIED_ROOTS_KEPT), -1):
            header = self._archive.get_header(height)
            if header is None or size + len(header) > SNAPSHOT_PART_BYTES_MAX - HEADER_BYTES_MAX:
                break
            size += len(header) + 8
            headers.append(header)
        return codec.encode(tuple(headers)) if headers else None


def light_block_height(link: LightBlock) -> int:
    return decode_header(link.header).height


def _piece(data: bytes, index: int) -> bytes:
    return data[index * SNAPSHOT_PART_BYTES_MAX : (index + 1) * SNAPSHOT_PART_BYTES_MAX]


@dataclass
class _RequestingPeer:
    waiting: deque[Any] = field(default_factory=deque)
    budget: float = RESPONSE_BURST_BYTES
    at: float = 0.0


class SnapshotRequestQueue:
    """Waiting requests of peers for snapshots. Peers take turns, each within its rate."""

    def __init__(self) -> None:
        self._askers: dict[bytes, _RequestingPeer] = {}

    @property
    def askers(self) -> frozenset[bytes]:
        return frozenset(self._askers)

    def add_request(self, peer: bytes, message: GetSnapshot | GetSnapshotPart, now: float) -> None:
        asker = self._askers.setdefault(peer, _RequestingPeer(at=now))
        if len(asker.waiting) >= REQUESTS_MAX:
            raise RemoteProtocolError("flood", f"more than {REQUESTS_MAX} waiting requests for snapshots")
        asker.waiting.append(message)

    def remove_peer(self, peer: bytes) -> None:
        self._askers.pop(peer, None)

    def pop_request(self, now: float) -> tuple[bytes, GetSnapshot | GetSnapshotPart] | None:
        """Return the next request to answer, with its peer. None: no request can be answered within its peer's rate."""
        for peer, asker in self._askers.items():
            asker.budget = min(RESPONSE_BURST_BYTES, asker.budget + (now - asker.at) * RESPONSE_BYTES_PER_SECOND)
            asker.at = now
            if asker.waiting and asker.budget >= _cost(asker.waiting[0]):
                message = asker.waiting.popleft()
                asker.budget -= _cost(message)
                self._askers[peer] = self._askers.pop(peer)  # the peer goes to the end of the queue
                return peer, message
        return None

    def wait_seconds(self) -> float:
        """Return the seconds until `pop_request` can return a request, if no further request arrives."""
        lacks = [_cost(asker.waiting[0]) - asker.budget for asker in self._askers.values() if asker.waiting]
        return max(0.0, min(lacks) / RESPONSE_BYTES_PER_SECOND) if lacks else float("inf")


def _cost(message: GetSnapshot | GetSnapshotPart) -> int:
    return OFFER_COST_BYTES if isinstance(message, GetSnapshot) else SNAPSHOT_PART_BYTES_MAX
