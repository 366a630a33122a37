"""Snapshots around a simulated node, as `peer.driver.transfer` has them around a real one: serving them, and fetching one.

The real shelf, queue and transfer; only the model is a hash, whose one part is the root itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ledger.snapshots.assembly import Restored
from ledger.snapshots.snapshot import HEIGHT_MIN, LAG_HEIGHTS, SNAPSHOT_HEIGHTS, IncomingModel, Queue, Shelf, models_of
from ledger.snapshots.transfer import Basis, Step, Transfer, basis_of, in_turn
from ledger.state import State
from peer.driver.transfer import PAUSE_SECONDS, is_about_snapshots
from protocol import codec
from protocol.errors import RemoteProtocolError, StorageError
from protocol.messages import SNAPSHOT_MESSAGES, GetSnapshot, GetSnapshotPart

if TYPE_CHECKING:
    from peer.node.node import Node
    from tests.sim.simulation import Peer

__all__ = ["HashedModels", "Snapshots", "is_about_snapshots"]

ModelKey = tuple[bytes, int]  # job, round
SHORTEST_WAIT_SECONDS = 0.001


class Incoming:
    """A model on its way."""

    parts = 1

    def __init__(self, models: dict[ModelKey, bytes], key: ModelKey, root: bytes) -> None:
        self._models, self._key, self._root = models, key, root
        self._data = b""

    def put(self, index: int, data: bytes) -> None:
        if data != self._root:
            raise RemoteProtocolError("bad-part", "of a model")
        self._data = data

    def install(self) -> None:
        assert self._data == self._root, "installed before it was whole"
        self._models[self._key] = self._data

    def abandon(self) -> None:
        pass


class HashedModels:
    """Implements `ledger.snapshots.snapshot.Models`."""

    def __init__(self) -> None:
        self.held: dict[ModelKey, bytes] = {}

    def follow(self, state: State) -> None:
        self.held |= models_of(state)

    def manifest(self, job: bytes, number: int) -> bytes:
        return b"one part" if self.part(job, number, 0) else b""

    def part(self, job: bytes, number: int, index: int) -> bytes:
        if (job, number) not in self.held:
            raise StorageError(f"no model of round {number}")
        return self.held[job, number]

    def receive(self, job: bytes, number: int, root: bytes, manifest: bytes) -> IncomingModel:
        if manifest != b"one part":
            raise RemoteProtocolError("bad-part", "the manifest of a model")
        return Incoming(self.held, (job, number), root)

    def holds(self, job: bytes, number: int, root: bytes) -> bool:
        return self.held.get((job, number)) == root

    def pin(self, models: frozenset[ModelKey]) -> None:
        self.held = {key: root for key, root in self.held.items() if key in models}


class Snapshots:
    """One peer's; made anew at each start."""

    def __init__(self, peer: Peer, state: State) -> None:
        self._peer = peer
        self._models = peer.models
        self._models.follow(state)
        self._shelf, self._queue = Shelf(peer.disk, self._models), Queue()
        self._shelf.begin(state)
        self._transfer: Transfer | None = None
        self._not_before = float("-inf")
        self._repairs = False  # the transfer is because of a wrong state
        self._links: set[bytes] = set()
        self._serving = False
        self._deadline = float("inf")
        self._asked_last = b""

    def connected(self, key: bytes) -> None:
        self._links.add(key)
        if self._transfer is not None:
            self._do(self._transfer.connected(key, self._peer.now()))

    def disconnected(self, key: bytes) -> None:
        self._links.discard(key)
        self._queue.forget(key)
        if self._transfer is not None:
            self._do(self._transfer.disconnected(key, self._peer.now()))

    def applied(self, state: State) -> None:
        self._models.follow(state)
        self._shelf.applied(state, self._peer.now())

    def received(self, key: bytes, data: bytes) -> None:
        now = self._peer.now()
        try:
            message: Any = codec.decode_message(data, SNAPSHOT_MESSAGES)
            if isinstance(message, (GetSnapshot, GetSnapshotPart)):
                self._queue.add(key, message, now)
                self._serve_later()
            elif self._transfer is not None:
                self._do(self._transfer.received(key, message, now))
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
        request = self._queue.next(self._peer.now())
        if request is not None:
            key, message = request
            try:
                self._send(key, self._shelf.answer(message, self._peer.now()))
            except RemoteProtocolError as error:
                self._peer.simulation.drop(self._peer, key, error)
        self._serve_later()

    def _send(self, key: bytes, message: Any) -> None:
        self._peer.simulation.send_aside(self._peer, key, message)

    # Fetching --------------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Whether a snapshot is needed now."""
        node, now = self._peer.node, self._peer.now()
        if node is None or self._transfer is not None or now < self._not_before:
            return
        replica = node.replica
        if replica.divergence is not None:
            self._begin(*self._after_divergence(node))
        elif replica.highest_claimed_height - replica.height > LAG_HEIGHTS:
            self._begin(*self._when_behind(node))

    def _when_behind(self, node: Node) -> tuple[Basis, int]:
        decided = node.replica.height - 1
        last = self._peer.disk.get_decision(decided)
        basis = basis_of(node.rules, self._peer.simulation.verifier, node.state, last, self._peer.anchor)
        return basis, decided + SNAPSHOT_HEIGHTS + 1

    def _after_divergence(self, node: Node) -> tuple[Basis, int]:
        """Of a state that is wrong nothing is trusted; but the decided blocks are."""
        last = self._peer.disk.decided[self._peer.disk.last]
        basis = basis_of(node.rules, self._peer.simulation.verifier, None, last, self._peer.anchor)
        return basis, max(HEIGHT_MIN, node.state.height)

    def _begin(self, basis: Basis, wanted: int) -> None:
        now = self._peer.now()
        self._repairs = basis.height == 0 and self._peer.is_wrong
        self._transfer = Transfer(self._peer.rules, self._models, basis, wanted, now)
        self._peer.simulation.count("transfer")
        for key in in_turn(self._links, basis.voters, self._asked_last):
            self._do(self._transfer.connected(key, now))

    def _do(self, step: Step) -> None:
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
                self._peer.restore(transfer.restored, transfer.links)
            self._end()
        elif (
            transfer.conflict is not None
            or (0 < fetched <= height and not self._repairs)
            or transfer.is_in_vain(self._peer.now())
        ):
            self._end()
        elif transfer.deadline != self._deadline:
            self._deadline = transfer.deadline
            if self._deadline < float("inf"):
                wait = max(SHORTEST_WAIT_SECONDS, self._deadline - self._peer.now())
                self._peer.after(wait, self._tick, transfer)

    def _tick(self, transfer: Transfer) -> None:
        if self._transfer is transfer:
            self._deadline = float("inf")
            self._do(transfer.tick(max(self._peer.now(), transfer.deadline)))

    def _end(self) -> None:
        if self._transfer is not None:
            self._asked_last = self._transfer.asked_last
            if self._transfer.restored is None:
                self._transfer.abandon()
        self._transfer, self._deadline = None, float("inf")
        self._not_before = self._peer.now() + PAUSE_SECONDS


Restoring = tuple[Restored, tuple[Any, ...]]
