"""Snapshots around a simulated node, as `peer.runtime.state_sync` has them around a real one: serving them, and fetching
one.

The shelf, queue and transfer are the real ones. Only the model is a hash, whose single part is the root itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ledger.ledger_state import LedgerState
from ledger.snapshots.snapshot_assembly import RestoredSnapshot
from ledger.snapshots.snapshot_download import DownloadStep, SnapshotDownload, TrustBasis, make_trust_basis, request_order
from ledger.snapshots.snapshot_server import (
    SNAPSHOT_HEIGHT_MIN,
    SNAPSHOT_HEIGHTS,
    SNAPSHOT_LAG_HEIGHTS,
    ModelReceiver,
    SnapshotRequestQueue,
    SnapshotStore,
)
from peer.runtime.state_sync import RETRY_SECONDS, is_snapshot_message
from protocol import codec
from protocol.errors import RemoteProtocolError, StorageError
from protocol.messages import SNAPSHOT_MESSAGES, GetSnapshot, GetSnapshotPart

if TYPE_CHECKING:
    from peer.node.node import Node
    from tests.sim.simulation import Peer

__all__ = ["HashedModels", "Snapshots", "is_snapshot_message"]

ModelKey = tuple[bytes, int]  # job, round
SHORTEST_WAIT_SECONDS = 0.001


class Incoming:
    """A model in transfer."""

    parts = 1

    def __init__(self, models: dict[ModelKey, bytes], key: ModelKey, root: bytes) -> None:
        self._models, self._key, self._root = models, key, root
        self._data = b""

    def add_part(self, index: int, data: bytes) -> None:
        if data != self._root:
            raise RemoteProtocolError("bad-part", "of a model")
        self._data = data

    def install(self) -> None:
        assert self._data == self._root, "installed before it was whole"
        self._models[self._key] = self._data

    def discard_parts(self) -> None:
        pass


class HashedModels:
    """An implementation of `ledger.snapshots.snapshot_server.ModelStore`."""

    def __init__(self) -> None:
        self.held: dict[ModelKey, bytes] = {}

    def follow(self, state: LedgerState) -> None:
        """Add the present models. Earlier ones that the state names must be here already."""
        self.held |= {(key, job.round): job.model_root for key, job in state.jobs.jobs.items()}

    def read_manifest(self, job: bytes, number: int) -> bytes:
        return b"one part" if self.read_part(job, number, 0) else b""

    def read_part(self, job: bytes, number: int, index: int) -> bytes:
        if (job, number) not in self.held:
            raise StorageError(f"no model of round {number}")
        return self.held[job, number]

    def start_receiving(self, job: bytes, number: int, root: bytes, manifest: bytes) -> ModelReceiver:
        if manifest != b"one part":
            raise RemoteProtocolError("bad-part", "the manifest of a model")
        return Incoming(self.held, (job, number), root)

    def has_model(self, job: bytes, number: int, root: bytes) -> bool:
        return self.held.get((job, number)) == root

    def set_pinned_models(self, models: frozenset[ModelKey]) -> None:
        self.held = {key: root for key, root in self.held.items() if key in models}


class Snapshots:
    """Snapshots of one peer; created at each start."""

    def __init__(self, peer: Peer, state: LedgerState) -> None:
        self._peer = peer
        self._models = peer.models
        self._models.follow(state)
        self._shelf, self._queue = SnapshotStore(peer.disk, self._models), SnapshotRequestQueue()
        self._shelf.add_initial_state(state)
        self._transfer: SnapshotDownload | None = None
        self._not_before = float("-inf")
        self._repairs = False  # the transfer is because of a wrong state
        self._links: set[bytes] = set()
        self._serving = False
        self._deadline = float("inf")
        self._asked_last = b""

    def connected(self, key: bytes) -> None:
        self._links.add(key)
        if self._transfer is not None:
            self._do(self._transfer.add_peer(key, self._peer.now()))

    def disconnected(self, key: bytes) -> None:
        self._links.discard(key)
        self._queue.remove_peer(key)
        if self._transfer is not None:
            self._do(self._transfer.remove_peer(key, self._peer.now()))

    def applied(self, state: LedgerState) -> None:
        self._models.follow(state)
        self._shelf.add_applied_state(state, self._peer.now())

    def received(self, key: bytes, data: bytes) -> None:
        now = self._peer.now()
        try:
            message: Any = codec.decode_message(data, SNAPSHOT_MESSAGES)
            if isinstance(message, (GetSnapshot, GetSnapshotPart)):
                self._queue.add_request(key, message, now)
                self._serve_later()
            elif self._transfer is not None:
                self._do(self._transfer.handle_answer(key, message, now))
        except RemoteProtocolError as error:
            self._peer.simulation.drop(self._peer, key, error)

    # Serving ---------------------------------------------------------------------------------------------------------

    def _serve_later(self) -> None:
        wait = self._queue.wait_seconds()
        if not self._serving and wait < float("inf"):
            self._serving = True
            self._peer.after(wait + SHORTEST_WAIT_SECONDS, self._serve)

    def _serve(self) -> None:
        self._serving = False
        request = self._queue.pop_request(self._peer.now())
        if request is not None:
            key, message = request
            try:
                self._send(key, self._shelf.answer_request(message, self._peer.now()))
            except RemoteProtocolError as error:
                self._peer.simulation.drop(self._peer, key, error)
        self._serve_later()

    def _send(self, key: bytes, message: Any) -> None:
        self._peer.simulation.send_aside(self._peer, key, message)

    # Fetching --------------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Start a transfer if a snapshot is needed now."""
        node, now = self._peer.node, self._peer.now()
        if node is None or self._transfer is not None or now < self._not_before:
            return
        replica = node.replica
        if replica.divergence is not None:
            self._begin(*self._after_divergence(node))
        elif replica.highest_claimed_height - replica.height > SNAPSHOT_LAG_HEIGHTS:
            self._begin(*self._when_behind(node))

    def _when_behind(self, node: Node) -> tuple[TrustBasis, int]:
        decided = node.replica.height - 1
        basis = make_trust_basis(node.rules, node.state, self._peer.disk.get_decision(decided), self._peer.anchor)
        return basis, decided + SNAPSHOT_HEIGHTS + 1

    def _after_divergence(self, node: Node) -> tuple[TrustBasis, int]:
        """Return the trust basis after a divergence: the decided blocks are trusted, and the wrong state is not."""
        basis = make_trust_basis(node.rules, None, self._peer.disk.decided[self._peer.disk.last], self._peer.anchor)
        return basis, max(SNAPSHOT_HEIGHT_MIN, node.state.height)

    def _begin(self, basis: TrustBasis, wanted: int) -> None:
        now = self._peer.now()
        self._repairs = basis.height == 0 and self._peer.is_wrong
        self._transfer = SnapshotDownload(self._peer.rules, self._models, basis, wanted, now)
        self._peer.simulation.count("transfer")
        for key in request_order(self._links, basis.voters, self._asked_last):
            self._do(self._transfer.add_peer(key, now))

    def _do(self, step: DownloadStep) -> None:
        for fault in step.faults:
            self._peer.simulation.drop(self._peer, fault.peer, fault.error)
        for key, request in step.sends:
            self._send(key, request)
        self._conclude()

    def _conclude(self) -> None:
        transfer, node = self._transfer, self._peer.node
        if transfer is None or node is None:
            return
        fetched, height = transfer.progress[0], node.state.height
        if transfer.restored is not None:
            if not transfer.restored.is_overtaken(height, self._repairs):
                self._peer.restore(transfer.restored, transfer.light_blocks)
            self._end()
        elif (
            transfer.conflict is not None
            or (0 < fetched <= height and not self._repairs)
            or transfer.has_no_source(self._peer.now())
        ):
            self._end()
        elif transfer.deadline != self._deadline:
            self._deadline = transfer.deadline
            if self._deadline < float("inf"):
                self._peer.after(max(SHORTEST_WAIT_SECONDS, self._deadline - self._peer.now()), self._tick, transfer)

    def _tick(self, transfer: SnapshotDownload) -> None:
        if self._transfer is transfer:
            self._deadline = float("inf")
            self._do(transfer.handle_tick(max(self._peer.now(), transfer.deadline)))

    def _end(self) -> None:
        if self._transfer is not None:
            self._asked_last = self._transfer.asked_last
            if self._transfer.restored is None:
                self._transfer.discard_parts()
        self._transfer, self._deadline = None, float("inf")
        self._not_before = self._peer.now() + RETRY_SECONDS


Restoring = tuple[RestoredSnapshot, tuple[Any, ...]]
