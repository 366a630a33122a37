"""Snapshots in the daemon: this peer serves snapshots to other peers, and fetches one if it is far behind or has computed a wrong
state.

`ledger.snapshots` makes the decisions. This module only carries data between `ledger.snapshots`, the network and the disk.
No vote waits for this module: messages have a separate queue, disk work runs in a thread, and answers have the lowest priority.
"""

from __future__ import annotations

import json
import math
import shutil
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import trio

from consensus.effects import DecidedBlock
from consensus.light_client import TrustedBlock
from consensus.pbft.replica import Replica
from ledger.ledger_state import CurrentState, LedgerRules, LedgerState, module_digest
from ledger.snapshots.snapshot_assembly import RestoredSnapshot
from ledger.snapshots.snapshot_download import DownloadStep, SnapshotDownload, TrustBasis, make_trust_basis, request_order
from ledger.snapshots.snapshot_server import (
    SNAPSHOT_HEIGHT_MIN,
    SNAPSHOT_HEIGHTS,
    SNAPSHOT_LAG_HEIGHTS,
    SnapshotRequestQueue,
    SnapshotStore,
)
from peer.runtime.telemetry.event_log import EventLog
from peer.runtime.work_queues import run_charged
from protocol import codec
from protocol.errors import RemoteProtocolError, StorageError
from protocol.messages import SNAPSHOT_MESSAGES, GetSnapshot, GetSnapshotPart, LightBlock
from storage.durable_files import atomic_write
from storage.ledger_store import LedgerStore
from training.model_store import JobModelStore
from transport.connections.connection_manager import ConnectionManager
from transport.network import Priority

# Limits of waiting snapshot messages and of their bytes. Honest peers send fewer at once, and dropped messages are requested
# again.
INBOX_MAX: Final = 128
INBOX_BYTES_MAX: Final = 32 << 20
LINK_POLL_SECONDS: Final = 1.0  # seconds between checks for new and broken links during a transfer
RETRY_SECONDS: Final = 5.0  # seconds between two transfers: a transfer may fail because heights that peers claim may be false
# longest pause in the application of blocks during a transfer: the transfer needs the processor, too
APPLY_PAUSE_SECONDS_MAX: Final = 20.0
DIVERGENCE_REPORTS_KEPT: Final = 3  # stored reports on wrong states: each is as large as the ledger

# First bytes of snapshot messages. The reader of links distinguishes them from votes by these bytes, without decoding a megabyte.
_PREFIXES: Final = tuple(
    bytes((0x90 + 1 + len(fields(kind)), 0xA0 + len(kind.TAG))) + kind.TAG.encode() for kind in SNAPSHOT_MESSAGES
)


# Type of `Driver.restore_state`, which replaces the node's state and returns False if applied blocks were faster.
RestoreState = Callable[[RestoredSnapshot, tuple[LightBlock, ...], bool], Awaitable[bool]]


def is_snapshot_message(data: bytes) -> bool:
    return data.startswith(_PREFIXES)


class StateSync:
    """The task that serves and fetches snapshots. `run` is called once.

    The driver calls `receive_message`, `add_applied_state` and `start_if_needed`, which return at once.
    """

    def __init__(
        self,
        rules: LedgerRules,
        store: LedgerStore,
        host: JobModelStore,
        network: ConnectionManager,
        event_log: EventLog,
        anchor: TrustedBlock | None,
        applied: CurrentState,
        now: Callable[[], float],
        restore_state: RestoreState,
        drop_peer: Callable[[bytes, RemoteProtocolError], None],
    ) -> None:
        self._rules = rules
        self._store, self._host, self._network, self._events = store, host, network, event_log
        self._anchor, self._applied = anchor, applied
        self._now, self._restore_state, self._drop_peer = now, restore_state, drop_peer
        self._shelf, self._queue = SnapshotStore(store, host), SnapshotRequestQueue()
        self._news: deque[LedgerState] = deque()  # applied states that are not in the snapshot store yet
        self._inbox: deque[tuple[bytes, bytes]] = deque()
        self._inbox_bytes = 0
        self._wake = trio.Event()
        # Set unless a snapshot is being fetched whose height is proven: blocks are applied only while it is set.
        self._clear = trio.Event()
        self._clear.set()
        self._links: frozenset[bytes] = frozenset()
        self._transfer: SnapshotDownload | None = None
        self._repairs, self._begun = False, 0.0  # True if the transfer repairs a wrong state; time when the transfer began
        self._wanted: tuple[TrustBasis, int] | None = None
        self._asked_last = b""  # last peer to which a request for a snapshot's offer was sent
        if anchor is not None and (own := store.get_decision(anchor.height)) is not None:
            self.check_trusted_block((own,))
        self._not_before = -math.inf
        self._diagnosed: str | None = None

    # Calls of the driver -----------------------------------------------------------------------------------------------

    def receive_message(self, peer: bytes, data: bytes) -> None:
        """Queue a snapshot message, or drop it if the queue is full. Dropped messages are requested again."""
        if len(self._inbox) < INBOX_MAX and self._inbox_bytes + len(data) <= INBOX_BYTES_MAX:
            self._inbox.append((peer, data))
            self._inbox_bytes += len(data)
            self._wake.set()

    def add_applied_state(self, state: LedgerState) -> None:
        self._news.append(state)
        self._wake.set()

    def start_if_needed(self, replica: Replica) -> None:
        """Plan the transfer of a snapshot if this peer's state is wrong or far behind."""
        if self._transfer is not None or self._wanted is not None or self._now() < self._not_before:
            return
        self._repairs = replica.divergence is not None
        if replica.divergence is not None:
            self._wanted = self._after_divergence(replica.divergence)
        elif replica.highest_claimed_height - replica.height > SNAPSHOT_LAG_HEIGHTS and not replica.is_outdated:
            self._wanted = self._when_behind(replica.height - 1)
        if self._wanted is not None:
            self._wake.set()

    async def wait_to_apply(self) -> None:
        """Wait while a snapshot of proven height is being fetched.

        The wait ends `APPLY_PAUSE_SECONDS_MAX` after the transfer's start.
        """
        with trio.move_on_after(max(0.0, self._begun + APPLY_PAUSE_SECONDS_MAX - self._now())):
            await self._clear.wait()

    def check_trusted_block(self, decided: Iterable[DecidedBlock]) -> None:
        """Raise `StorageError` if one of these blocks has the height of the block in the invitation, but another digest."""
        for item in decided:
            if self._anchor is not None and self._anchor.height == item.height and self._anchor.digest != item.digest:
                raise StorageError(
                    f"the block of height {item.height} differs from the one in the invitation: the reached peers "
                    "have another history; ask for a new invitation, and join with a new data directory"
                )

    def _when_behind(self, decided: int) -> tuple[TrustBasis, int]:
        basis = make_trust_basis(self._rules, self._applied.current, self._store.get_decision(decided), self._anchor)
        # The next snapshot height: it exists if the heights that peers claim are true, and an offer proves that.
        return basis, decided + SNAPSHOT_HEIGHTS + 1

    def _after_divergence(self, reason: str) -> tuple[TrustBasis, int]:
        """Return (basis of trust, least height) for the repair of a wrong state.

        The basis trusts decided blocks, but not the voters in the wrong state.
        """
        if reason != self._diagnosed:
            self._diagnosed = reason
            try:
                folder = save_divergence_report(self._store.path.parent, self._rules, self._applied.current, reason)
                kept = f"the old state is kept in {folder}"
            except OSError as error:
                kept = f"the old state could not be kept: {error.strerror}"
            self._events.add("warning", f"{reason}; restoring the certified state, {kept}")
        decided = self._store.get_decision(self._store.decided_height)
        assert decided is not None, "a decided block showed the divergence"
        basis = make_trust_basis(self._rules, None, decided, self._anchor)
        return basis, max(SNAPSHOT_HEIGHT_MIN, self._applied.current.height)

    async def newest_certified_state(self) -> tuple[LedgerState, tuple[LightBlock, ...]] | None:
        """Return the last certified state, and the light blocks from the genesis to the block that certifies it.

        Return None if there is no certified state yet.
        """
        snapshot = self._shelf.newest_snapshot
        if snapshot is None:
            return None
        return snapshot.state, await trio.to_thread.run_sync(self._shelf.light_blocks_to, snapshot.height)

    # The task ----------------------------------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        state = self._applied.current
        task_status.started()
        await trio.to_thread.run_sync(self._shelf.add_initial_state, state)
        try:
            while True:
                self._wake = trio.Event()
                self._update_links()
                await self._take_messages()
                await self._serve()
                await self._fetch()
                self._hold_or_clear()
                wait = self._queue.wait_seconds()
                if self._transfer is not None:
                    wait = min(wait, LINK_POLL_SECONDS, max(0.0, self._transfer.deadline - self._now()))
                with trio.move_on_after(wait):
                    await self._wake.wait()
        finally:
            self._end_transfer()

    def _hold_or_clear(self) -> None:
        if self._transfer is None or not self._transfer.progress[0]:
            self._clear.set()
        elif self._clear.is_set():
            self._clear = trio.Event()

    def _update_links(self) -> None:
        while self._news:
            self._shelf.add_applied_state(self._news.popleft(), self._now())
        links, before = self._network.connected_peers(), self._links
        self._links = links
        for peer in self._queue.askers - links:  # a request may be handled after the end of its link
            self._queue.remove_peer(peer)
        if self._transfer is not None:
            for peer in before - links:
                self._apply_step(self._transfer.remove_peer(peer, self._now()))
        if self._transfer is not None:
            for peer in links - before:
                self._apply_step(self._transfer.add_peer(peer, self._now()))

    async def _take_messages(self) -> None:
        for _ in range(len(self._inbox)):
            peer, data = self._inbox.popleft()
            self._inbox_bytes -= len(data)
            try:
                message: Any = codec.decode_message(data, SNAPSHOT_MESSAGES)
                if isinstance(message, (GetSnapshot, GetSnapshotPart)):
                    self._queue.add_request(peer, message, self._now())
                elif self._transfer is not None:
                    self._apply_step(await trio.to_thread.run_sync(self._transfer.handle_answer, peer, message, self._now()))
            except RemoteProtocolError as error:
                self._drop_peer(peer, error)

    async def _serve(self) -> None:
        """Answer one request for a snapshot. The loop calls this method again at once if more requests wait."""
        request = self._queue.pop_request(self._now())
        if request is None:
            return
        peer, message = request
        try:
            answer = await run_charged(self._network, peer, self._shelf.answer_request, message, self._now())
        except RemoteProtocolError as error:
            self._drop_peer(peer, error)
        else:
            self._network.send(peer, codec.encode(answer), Priority.BULK)

    def _apply_step(self, step: DownloadStep) -> None:
        for fault in step.faults:
            self._drop_peer(fault.peer, fault.error)
        for peer, request in step.sends:
            self._network.send(peer, codec.encode(request), Priority.CONTROL)

    # Fetching --------------------------------------------------------------------------------------------------------

    async def _fetch(self) -> None:
        if self._wanted is not None:
            self._begin(*self._wanted)
        transfer = self._transfer
        if transfer is None:
            return
        if transfer.deadline <= self._now():
            self._apply_step(await trio.to_thread.run_sync(transfer.handle_tick, self._now()))
        if transfer.conflict is not None:
            self._warn_of_fork(transfer.conflict)
            self._end_transfer()
        elif transfer.restored is not None:
            await self._finish(transfer, transfer.restored)
        else:
            is_overtaken = not self._repairs and 0 < transfer.progress[0] <= self._applied.current.height
            # The transfer ends if applied blocks were faster, or if no peer is left that has the snapshot.
            if is_overtaken or transfer.has_no_source(self._now()):
                self._end_transfer()

    def _begin(self, basis: TrustBasis, wanted: int) -> None:
        self._wanted = None
        self._begun = self._now()
        self._transfer = SnapshotDownload(self._rules, self._host, basis, wanted, self._begun)
        self._events.add("snapshot", f"requesting a snapshot of height {wanted} or later", height=wanted)
        for peer in request_order(self._links, basis.voters, self._asked_last):
            self._apply_step(self._transfer.add_peer(peer, self._now()))

    async def _finish(self, transfer: SnapshotDownload, restored: RestoredSnapshot) -> None:
        own = [self._store.get_decision(decided.height) for decided in restored.decisions]
        if any(mine and mine.digest != theirs.digest for mine, theirs in zip(own, restored.decisions, strict=True)):
            self._warn_of_fork(f"the snapshot has another certified block at height {restored.height} than this peer")
            transfer.discard_parts()
        elif not restored.is_overtaken(self._applied.current.height, self._repairs) and await self._restore_state(
            restored, (*self._store.light_blocks(0, transfer.trusted_height), *transfer.light_blocks), self._repairs
        ):
            seconds = self._now() - self._begun
            self._events.add(
                "snapshot",
                f"restored the certified state of height {restored.height} in {seconds:.1f} s",
                height=restored.height,
                seconds=seconds,
            )
        else:
            transfer.discard_parts()
        self._end_transfer()

    def _warn_of_fork(self, what: str) -> None:
        self._events.add("warning", f"{what}: it is not restored; ask people you trust which history is right")

    def _end_transfer(self) -> None:
        if self._transfer is not None:
            if self._transfer.restored is None:  # a restored snapshot keeps its parts: the driver may be installing it
                self._transfer.discard_parts()
            self._asked_last = self._transfer.asked_last
        self._transfer = None
        self._not_before = self._now() + RETRY_SECONDS


def save_divergence_report(directory: Path, rules: LedgerRules, state: LedgerState, reason: str) -> Path:
    """Write a wrong state to a new folder for diagnosis, and return the folder.

    It has the state's bytes and the roots of its modules and models.
    """
    parent = directory / "diagnostics"
    folder = parent / f"height-{state.height}"
    folder.mkdir(parents=True, exist_ok=True)
    modules = {name: codec.encode(value) for name, value in state.modules.items()}
    content = {
        "reason": reason,
        "height": state.height,
        "state_root": state.state_root.hex(),
        "modules": {name: module_digest(data).hex() for name, data in sorted(modules.items())},
        "models": {key.hex(): {"round": job.round, "root": job.model_root.hex()} for key, job in state.jobs.jobs.items()},
    }
    with atomic_write(folder / "state.msgpack") as stream:
        stream.write(rules.encode_state(state))
    with atomic_write(folder / "roots.json") as stream:
        stream.write(json.dumps(content, indent=1).encode() + b"\n")
    by_height = sorted(parent.glob("height-*"), key=lambda path: int(path.name.removeprefix("height-")))
    for old in by_height[:-DIVERGENCE_REPORTS_KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def first_divergent_height(store: LedgerStore, restored: RestoredSnapshot) -> int:
    """Return the first height at which our state root differs from the certified one, or the restored height if there is none."""
    own = store.state_roots()
    certified = {decided.height - 1: decided.decode().state_root for decided in restored.decisions}
    first = restored.height
    for height in sorted((height for height in own if height < restored.height), reverse=True):
        child = store.get_decision(height + 1)
        if (child.decode().state_root if child else certified.get(height)) == own[height]:
            break
        first = height
    return first
