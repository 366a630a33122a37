"""Downloads of blobs by digest, in chunks over the links, from peers that hold them.

A transfer downloads one piece: a small blob, a list of parts, or a part. It requests consecutive chunks from one holder at a
time. The window limits the number of requested chunks that have not arrived. For audit data the window adapts to the link
(`DownloadWindow`): it covers a round trip, and one or two seconds in the holder's queue. If a holder answers NoBlob, stalls or
disconnects, the transfer continues with another holder at the same offset. A peer that answers no transfer at all, such as a
stopped process that keeps its links, is asked last until it answers again. If bytes of several holders have a wrong hash, the
faulty holder is unknown: the transfer starts again, and from then on never mixes the bytes of two holders.

`transport.blobs.blob_server` answers the requests of other peers. A holder sends a blob to few receivers at a time. To further
requesters it names other holders and receivers of the blob. A requester then waits for an upload slot, and meanwhile asks the
named peers and all other linked peers. The names are hints: a faulty holder that names peers without the blob causes one useless
request for each name. Its later names are ignored.

An object larger than a part has a list of parts, which is downloaded first, under the object's digest. Then each part is a
transfer. A few parts are transferred at once, in a different order at each peer. So several holders can send, even holders that
have only a few parts. A wrong byte costs only one part, and complete parts survive a restart.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import trio

from protocol.errors import RemoteProtocolError, StorageError
from protocol.limits import BLOB_CHUNK_BYTES
from protocol.messages import BlobChunk, BlobElsewhere, GetBlob, HasBlob, NoBlob
from transport.blobs.blob_server import QUEUED_BYTES_MIN, REPEAT_SECONDS, BlobServer, SendBlobMessage
from transport.blobs.blob_store import BlobStore, BlobWriter
from transport.wire.framing import Priority

log = logging.getLogger(__name__)

WINDOW_CHUNKS = 32  # chunks requested ahead: 2 MiB, which allow 20 MB/s over a link of 100 ms
# Limits of the window for audit data: chunks requested ahead from one holder, in all transfers together. At the start, 8 chunks
# allow 4 MB/s over a link of 100 ms. With at least 2 chunks the link is not idle while a request is on its way. An uplink of 100
# Mbit/s sends 64 chunks in 300 ms.
WINDOW_CHUNKS_START, WINDOW_CHUNKS_MIN, WINDOW_CHUNKS_MAX = 8, 2, 64
ASKED_MAX = 4 * WINDOW_CHUNKS_MAX  # remembered requests to one holder; more exist only if the holder leaves some unanswered
# Delay in seconds after the fastest answer from which an answer shrinks the window, since it has waited in a queue. Without a
# queue, retransmissions and slow start of TCP delay answers by up to four round trips of 300 ms. With 0.5 s, windows stayed at
# their minimum.
QUEUE_SECONDS = 1.5
FASTEST_SECONDS_MAX = 1.0  # largest assumed time of a chunk on an idle link: at 400 kbit/s, or three round trips of 300 ms
STALL_SECONDS = 5.0  # time without a chunk after which a transfer tries the next holder
# Seconds in which a requested chunk of audit data is not requested again, since a busy holder may first send other chunks. At 2
# Mbit/s, 48 chunks for three auditors take 13 s.
BUSY_SECONDS = 20.0
# Timeout of a first answer if other holders exist: 3 round trips of 300 ms; doubled after each failure.
FIRST_ANSWER_SECONDS = 1.0
RETRY_SECONDS = 0.5  # pause before a peer that lacked the blob is asked again; doubled each time
RETRY_SECONDS_MAX = 15.0
# Concurrent transfers except those of audit data, limited so that their windows do not fill a holder's queue. Audit data has a
# separate limit, so that a trainer that sends its buffers slowly delays no payload.
TRANSFERS_MAX = 10
# Concurrent transfers of audit data: more than FETCHING_AUDITS_MAX of an auditor, so that a trainer that sends its buffers slowly
# does not delay the buffers of other trainers.
AUDIT_TRANSFERS_MAX = 18
# Concurrent transfers of parts of one object: several holders send, and some transfers stay free for small blobs.
PARTS_AT_ONCE = 4
TURN_SECONDS = 15.0  # seconds after which a transfer pauses if others wait, since its holder may send slowly on purpose

# Seconds until a peer asks a holder again that told it to wait: the holder may name other peers, or its offer may have been lost.
WAIT_SECONDS = 2.0
# Seconds until a peer asks a holder again that is still downloading the blob: the holder announces the end of its download.
WAIT_GETTING_SECONDS = 10.0
REMAINING_SECONDS_MAX = 2.0  # seconds; a transfer that needs longer for its last bytes moves to a holder that offers a slot
SEARCH_SECONDS = 0.1  # interval of requests to unnamed peers: the holders that let this peer wait may be faulty

assert WAIT_SECONDS > REPEAT_SECONDS
# The requests of one peer to one holder fit into the holder's queue.
assert BLOB_CHUNK_BYTES * (WINDOW_CHUNKS * TRANSFERS_MAX // 2 + WINDOW_CHUNKS_MAX + AUDIT_TRANSFERS_MAX) <= 16 << 20
assert PARTS_AT_ONCE < TRANSFERS_MAX
assert WINDOW_CHUNKS_MIN <= WINDOW_CHUNKS_START <= WINDOW_CHUNKS_MAX

RunBlocking = Callable[[Callable[[], None]], Awaitable[None]]


@dataclass(slots=True)
class DownloadWindow:
    """The window for audit data from one holder: the number of chunks that this peer requests ahead.

    | an answer                                     | the window                                      |
    | comes within QUEUE_SECONDS of the fastest one | grows by a chunk, so it doubles in a round trip |
    | comes later                                   | is halved, once in the answer's own time        |

    Answers come in the order of the requests. A chunk that was requested twice comes twice, and the first answer belongs to the
    first request. Timed from the second request, the first answer would seem the fastest of all, and all other answers would seem
    late.
    """

    window: int = WINDOW_CHUNKS_START  # window in chunks
    fastest: float = FASTEST_SECONDS_MAX  # least seconds from a request to its chunk
    mean: float = 0.0  # moving average of the seconds from a request to its chunk, for `answer_timeout`
    deviation: float = 0.0
    shrunk: float = -math.inf  # time of the last halving
    # (digest, offset, time) of each request, in the order of the answers.
    asked: deque[tuple[bytes, int, float]] = field(default_factory=lambda: deque(maxlen=ASKED_MAX))

    def record_request(self, digest: bytes, offset: int, now: float) -> None:
        self.asked.append((digest, offset, now))

    @property
    def answer_timeout(self) -> float:
        """Seconds in which nearly all answers come, as for TCP's retransmission timer (RFC 6298, section 2)."""
        return self.mean + 4 * self.deviation

    def record_chunk(self, digest: bytes, offset: int, size: int, now: float) -> None:
        """Record the time of a chunk's arrival, and forget earlier requests, which get no answer any more.

        A short chunk does not change the window.
        """
        place = next((place for place, (*what, _) in enumerate(self.asked) if what == [digest, offset]), None)
        if place is not None:
            at = self.asked[place][-1]
            for _ in range(place + 1):
                self.asked.popleft()
            if size == BLOB_CHUNK_BYTES and at > -math.inf:
                self._answered(now - at, now)

    def cancel_requests(self, digest: bytes) -> None:
        """Stop timing the requests of a blob that the holder refuses. Chunks in its queue still come."""
        for place, (asked, offset, _) in enumerate(self.asked):
            if asked == digest:
                self.asked[place] = digest, offset, -math.inf

    def _answered(self, took: float, now: float) -> None:
        self.deviation = 3 / 4 * self.deviation + 1 / 4 * abs(self.mean - took) if self.mean else took / 2
        self.mean = 7 / 8 * self.mean + 1 / 8 * took if self.mean else took
        self.fastest = min(self.fastest, took)
        if took <= self.fastest + QUEUE_SECONDS:
            self.window = min(WINDOW_CHUNKS_MAX, self.window + 1)
        elif now >= self.shrunk + took:  # Requests from before the last halving do not measure the new window.
            self.window, self.shrunk = max(WINDOW_CHUNKS_MIN, self.window // 2), now


RetryTimes = dict[bytes, tuple[float, float]]  # peer -> (time of the next request, last pause)


@dataclass(slots=True)
class _ObjectDownload:
    """The download of an object: the state that the transfers of all its parts share."""

    waiters: int = 0  # local tasks that wait for the object
    has_parts: bool = False
    # Retry times for all parts, since a peer that lacks one part usually lacks all.
    rests: RetryTimes = field(default_factory=dict)
    holders: set[bytes] = field(default_factory=set)  # peers that sent a part of the object, and peers named as its sources
    slow: Counter[bytes] = field(default_factory=Counter)  # peer -> number of parts that it sent too slowly


@dataclass(slots=True)
class _Transfer:
    """The download of one piece: a small blob, a list of parts, or a part."""

    digest: bytes
    size_max: int
    download: _ObjectDownload | None = None  # download of the object that this piece is a part of; None: not a part
    object_digest: bytes | None = None  # digest of that object; None: the piece is not a part
    preferred: list[bytes] = field(default_factory=list)
    waiters: int = 0
    done: trio.Event = field(default_factory=trio.Event)
    error: BaseException | None = None  # error of the local store
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    # Set when another holder may be ready, or when the download from this holder ends.
    changed: trio.Event = field(default_factory=trio.Event)
    pull: trio.CancelScope | None = None  # scope of the download from one holder; its deadline is the stall timeout
    holder: bytes | None = None
    asked: float = 0.0  # time of the first request to the present holder
    begun: int = 0  # value of `offset` at the time `asked`
    moved: float = 0.0  # time of the holder's last chunk; before the first one, `asked`
    is_audit_data: bool = False
    download_window: DownloadWindow | None = None  # window of the present holder, only for audit data
    total: int | None = None
    offset: int = 0  # bytes written so far
    requested: int = 0
    awaited: set[int] = field(default_factory=set)  # offsets of the chunks requested from the holder
    # For audit data: (holder, offset) -> time of a request without an answer. The holder may have been replaced since.
    under_way: dict[tuple[bytes, int], float] = field(default_factory=dict)
    window: int = WINDOW_CHUNKS * BLOB_CHUNK_BYTES  # bytes requested ahead
    writer: BlobWriter | None = None
    contributors: set[bytes] = field(default_factory=set)
    lacked: bool = False  # The holder answered NoBlob.
    one_holder: bool = False  # After a wrong hash, bytes of two holders are never mixed again.
    rests: RetryTimes = field(default_factory=dict)
    waits: dict[bytes, float] = field(default_factory=dict)  # peer that told this one to wait -> time of the next request to it
    is_left: bool = False  # True if the holder has done no wrong: it told us to wait, or another holder offers a slot.
    # Possible holder -> peer that named it, or itself if it offers a slot.
    named: dict[bytes, bytes] = field(default_factory=dict)
    unbelieved: set[bytes] = field(default_factory=set)  # peers that made a false offer or named a peer without the blob
    is_found: bool = False  # True if a peer that told us to wait has the blob.
    search_at: float = 0.0  # earliest time of a request to an unnamed peer, if `is_found`
    asked_peers: set[bytes] = field(default_factory=set)  # peers that may reserve a slot for us, or name us as a receiver

    @property
    def complete(self) -> bool:
        return self.total is not None and self.offset == self.total

    def restart(self) -> None:
        if self.writer is not None:
            self.writer.abort()
        self.writer, self.total, self.offset = None, None, 0
        self.contributors.clear()
        self.under_way.clear()

    def is_under_way(self, peer: bytes, offset: int, now: float) -> bool:
        """Return whether `peer` will send the chunk at `offset` without another request.

        Only the trainer that was named as the source answers at once. Another holder may make this peer wait.
        """
        return peer in self.preferred and now < self.under_way.get((peer, offset), -math.inf) + BUSY_SECONDS

    def forget_asking(self, peer: bytes) -> None:
        self.under_way = {(of, offset): at for (of, offset), at in self.under_way.items() if of != peer}

    def accepts_chunk(self, peer: bytes, offset: int) -> bool:
        """Return whether a received chunk is useful.

        Over a slow link a holder may answer after the transfer has moved to another holder. The transfer still accepts the chunks
        that it had requested.
        """
        was_under_way = self.under_way.pop((peer, offset), None) is not None
        return self.holder == peer or (was_under_way and not self.one_holder)

    def ends_soon(self, now: float) -> bool:
        """Return whether the present holder probably sends the rest of the piece before another holder could."""
        came, left = self.offset - self.begun, (self.total or 0) - self.offset
        return self.holder is not None and came > 0 and left / came * (now - self.asked) < REMAINING_SECONDS_MAX

    def forget_peer(self, peer: bytes) -> None:
        self.forget_asking(peer)
        for table in (self.waits, self.named):
            table.pop(peer, None)
        for peers in (self.unbelieved, self.asked_peers):
            peers.discard(peer)

    def disbelieve(self, liar: bytes) -> None:
        self.unbelieved.add(liar)
        self.named = {peer: by for peer, by in self.named.items() if by != liar}


class BlobExchange:
    def __init__(
        self,
        me: bytes,
        blobs: BlobStore,
        *,
        send: SendBlobMessage,
        drop: Callable[[bytes, RemoteProtocolError], None],
        connected: Callable[[], frozenset[bytes]],
        run_blocking: RunBlocking,
        recall: Callable[[bytes, bytes], None] = lambda peer, digest: None,
        is_stranger: Callable[[bytes], bool] = lambda peer: False,
    ) -> None:
        """`recall(peer, digest)` withdraws queued chunks of a blob for a peer."""
        self._me, self._blobs = me, blobs
        self._send, self._drop, self._connected, self._run_blocking = send, drop, connected, run_blocking
        self._transfers: dict[bytes, _Transfer] = {}
        self._goals: dict[bytes, _ObjectDownload] = {}
        self._paces: dict[bytes, DownloadWindow] = {}  # holder -> window of audit data
        self._left = trio.Event()  # set when no task waits for an object with parts any more
        self._recall = recall
        self.server = BlobServer(blobs, send, self._transfers.__contains__, is_stranger)
        self._silent: set[bytes] = set()  # peers that left a request unanswered, and have sent nothing since
        self._turns, self._reveals = trio.CapacityLimiter(TRANSFERS_MAX), trio.CapacityLimiter(AUDIT_TRANSFERS_MAX)
        self._nursery: trio.Nursery | None = None
        self.bytes_received = 0
        self.audit_bytes_received = 0  # bytes of audit data in `bytes_received`

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as self._nursery:
            task_status.started()
            self._nursery.start_soon(self.server.run)
            while True:
                await self._left.wait()
                self._left = trio.Event()
                try:
                    await self._run_blocking(partial(self._blobs.sweep_partial, frozenset(self._goals)))
                except StorageError as error:  # No task waits for the deletion.
                    log.warning("cannot delete incomplete downloads: %s", error)

    async def fetch_blob(self, digest: bytes, size_max: int, sources: Iterable[bytes] | None = None) -> None:
        await trio.lowlevel.checkpoint()
        if self._blobs.size(digest) is not None:
            return
        goal = self._goals.setdefault(digest, _ObjectDownload())
        goal.waiters += 1
        goal.holders.update(named := tuple(sources or ()))
        try:
            while self._blobs.size(digest) is None:
                wanted = self._blobs.missing_parts(digest)
                goal.has_parts = wanted is not None
                if wanted is None:  # a small blob, or the list of an object's parts
                    await self._fetch_piece(digest, size_max, named)
                elif wanted.total > size_max:  # The list is false, since the expected object is smaller.
                    await trio.sleep(RETRY_SECONDS_MAX)
                elif wanted.lacking:
                    await self._fetch_parts(digest, wanted.lacking, named, goal)
                else:
                    await self._run_blocking(partial(self._blobs.complete_object, digest))
        finally:
            goal.waiters -= 1
            if goal.waiters == 0:
                del self._goals[digest]
                if goal.has_parts:
                    self._left.set()

    async def _fetch_parts(
        self, digest: bytes, lacking: Mapping[bytes, int], sources: tuple[bytes, ...], goal: _ObjectDownload
    ) -> None:
        """Fetch the missing parts of an object. The order differs between peers, so that they can exchange parts."""
        parts = iter(sorted(lacking, key=lambda part: hashlib.sha256(self._me + part).digest()))
        errors: list[Exception] = []

        async def pull() -> None:
            for part in parts:
                try:
                    await self._fetch_piece(part, lacking[part], sources, digest, goal)
                except Exception as error:  # an error of the local store
                    errors.append(error)
                    nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for _ in range(PARTS_AT_ONCE):
                nursery.start_soon(pull)
        if errors:
            raise errors[0]

    async def _fetch_piece(
        self,
        digest: bytes,
        size_max: int,
        sources: tuple[bytes, ...],
        of: bytes | None = None,
        goal: _ObjectDownload | None = None,
    ) -> None:
        transfer = self._transfers.get(digest)
        if transfer is None:
            assert self._nursery is not None, "fetch before run"
            transfer = self._transfers[digest] = _Transfer(digest, size_max, goal, of)
            transfer.rests = goal.rests if goal is not None else transfer.rests
            self._nursery.start_soon(self._run_transfer, transfer)
        transfer.waiters += 1
        transfer.size_max = max(transfer.size_max, size_max)
        transfer.preferred.extend(peer for peer in sources if peer not in transfer.preferred)
        try:
            await transfer.done.wait()
        finally:
            transfer.waiters -= 1
            if transfer.waiters == 0:
                transfer.scope.cancel()
                self._forget_transfer(transfer)
        if transfer.error is not None:
            raise transfer.error

    def _forget_transfer(self, transfer: _Transfer) -> None:
        if self._transfers.get(transfer.digest) is transfer:
            del self._transfers[transfer.digest]

    # Reports of the links --------------------------------------------------------------------------------------------

    def peer_connected(self, peer: bytes) -> None:
        for goal in self._goals.values():
            goal.rests.pop(peer, None)
        for transfer in self._transfers.values():
            transfer.rests.pop(peer, None)
            if transfer.holder is None:
                transfer.changed.set()

    def peer_disconnected(self, peer: bytes) -> None:
        self._silent.discard(peer)
        self._paces.pop(peer, None)
        self.server.on_unlinked(peer)
        for transfer in self._transfers.values():
            transfer.forget_peer(peer)
            if transfer.holder == peer:
                transfer.changed.set()

    def on_blob_elsewhere(self, peer: bytes, answer: BlobElsewhere) -> None:
        self._mark_responsive(peer)
        self._sends_none(peer, answer.digest)
        transfer = self._transfers.get(answer.digest)
        if transfer is None or transfer.holder != peer:
            return
        pause = WAIT_SECONDS if answer.held else WAIT_GETTING_SECONDS
        transfer.waits[peer], transfer.is_left = trio.current_time() + pause, True
        transfer.is_found = transfer.is_found or answer.held
        if transfer.named.get(peer) == peer:
            transfer.disbelieve(peer)
        if peer not in transfer.unbelieved:
            for other in self._connected().intersection(answer.holders):
                transfer.named[other] = peer
                transfer.rests.pop(other, None)  # The peer may have received the blob meanwhile.
        transfer.changed.set()

    def on_has_blob(self, peer: bytes, answer: HasBlob) -> None:
        digest, now = answer.digest, trio.current_time()
        self.server.on_peer_has(digest, peer)
        transfer = self._transfers.get(digest)
        if transfer is not None and transfer.holder == peer:
            self._mark_responsive(peer)  # The holder has a slot for us, and the first chunk is on its way.
            return
        if transfer is None or peer not in transfer.waits or peer in transfer.unbelieved:
            return
        if transfer.ends_soon(now):
            self._decline(peer, transfer)
        else:
            transfer.waits[peer], transfer.named[peer], transfer.is_left = now, peer, True
            transfer.changed.set()

    def _mark_responsive(self, peer: bytes) -> None:
        """Record that a peer answers, and extend the timeouts of transfers from it, since it is busy and not silent."""
        self._silent.discard(peer)
        now = trio.current_time()
        for transfer in self._transfers.values():
            if transfer.holder == peer and transfer.pull is not None:
                until = transfer.asked + STALL_SECONDS
                if transfer.is_audit_data:  # Usually no other peer has audit data.
                    until = min(now + STALL_SECONDS, transfer.moved + BUSY_SECONDS)
                transfer.pull.deadline = max(transfer.pull.deadline, until)

    def _decline(self, peer: bytes, transfer: _Transfer) -> None:
        """Tell a peer to send no chunk of this blob, not even the chunks that it has queued already."""
        self._send(peer, NoBlob(transfer.digest), Priority.CONTROL)
        transfer.forget_asking(peer)

    def _sends_none(self, peer: bytes, digest: bytes) -> None:
        """Forget the requests for a blob that a peer will not answer."""
        if peer in self._paces:
            self._paces[peer].cancel_requests(digest)
        if digest in self._transfers:
            self._transfers[digest].forget_asking(peer)

    def on_no_blob(self, peer: bytes, answer: NoBlob) -> None:
        """Handle NoBlob: the peer lacks the blob, or does not want it from this peer any more."""
        self._mark_responsive(peer)
        self._recall(peer, answer.digest)
        self.server.release_slot(answer.digest, peer)
        self._sends_none(peer, answer.digest)
        transfer = self._transfers.get(answer.digest)
        if transfer is not None and transfer.holder == peer:
            transfer.lacked = True
            transfer.changed.set()

    def on_blob_chunk(self, peer: bytes, chunk: BlobChunk) -> None:
        """Handle a chunk in the task that reads the link. So a slow disk causes backpressure, and not a queue in this peer."""
        self._mark_responsive(peer)
        self.bytes_received += len(chunk.chunk)
        self.audit_bytes_received += len(chunk.chunk) if self._blobs.is_audit_data(chunk.digest) else 0
        if peer in self._paces:
            self._paces[peer].record_chunk(chunk.digest, chunk.offset, len(chunk.chunk), trio.current_time())
        transfer = self._transfers.get(chunk.digest)
        if transfer is None or not transfer.accepts_chunk(peer, chunk.offset) or transfer.error is not None:
            return  # The transfer has ended, or has another holder.
        try:
            self._accept_chunk(transfer, peer, chunk)
        except Exception as error:  # An error of the local store concerns the waiting tasks, not this link.
            transfer.error = error
            transfer.changed.set()

    def _accept_chunk(self, transfer: _Transfer, peer: bytes, chunk: BlobChunk) -> None:
        if chunk.total > transfer.size_max or (transfer.total is not None and chunk.total != transfer.total):
            # Either this holder or an earlier one sent a false size. Nothing proves which one, so neither is penalized.
            transfer.one_holder = transfer.one_holder or transfer.total is not None
            transfer.changed.set()
            return
        if chunk.offset != transfer.offset or len(chunk.chunk) < min(BLOB_CHUNK_BYTES, chunk.total - transfer.offset):
            return  # A message was lost, or the chunk is too short: the stall timeout ends the download from this holder.
        if transfer.writer is None:
            transfer.total, transfer.writer = (
                chunk.total,
                self._blobs.open_writer(transfer.digest, chunk.total, transfer.object_digest),
            )
        if transfer.offset + len(chunk.chunk) > chunk.total:
            transfer.changed.set()
            return
        transfer.writer.write(chunk.chunk)
        transfer.offset += len(chunk.chunk)
        transfer.contributors.add(peer)
        if transfer.download is not None:
            transfer.download.holders.add(peer)
        transfer.requested = max(transfer.requested, transfer.offset)
        transfer.awaited.discard(chunk.offset)
        if peer == transfer.holder:
            transfer.moved = trio.current_time()
            if transfer.pull is not None:
                transfer.pull.deadline = transfer.moved + STALL_SECONDS
            transfer.window = self._window_bytes(transfer)
        if transfer.complete:
            transfer.changed.set()
        elif peer == transfer.holder and transfer.requested <= transfer.offset + transfer.window // 2:
            # Requests are sent for half a window at once, since a frame of many requests costs little more than a frame of one.
            self._request_chunks(transfer, peer)

    def _window_bytes(self, transfer: _Transfer) -> int:
        """Return the bytes to request ahead. Transfers of audit data share their holder's window, with a chunk each at least."""
        if transfer.download_window is None:
            return WINDOW_CHUNKS * BLOB_CHUNK_BYTES
        sharing = sum(other.download_window is transfer.download_window for other in self._transfers.values())
        return max(1, transfer.download_window.window // max(1, sharing)) * BLOB_CHUNK_BYTES

    # A transfer ------------------------------------------------------------------------------------------------------

    async def _run_transfer(self, transfer: _Transfer) -> None:
        with transfer.scope:
            try:
                await self._pull_until_held(transfer)
            except Exception as error:  # The waiting tasks raise it, and the network continues.
                transfer.error = error
            finally:
                if transfer.writer is not None:
                    transfer.writer.abort()
        self._forget_transfer(transfer)
        self._announce_result(transfer)
        transfer.done.set()

    def _announce_result(self, transfer: _Transfer) -> None:
        """Announce the result of a transfer, and offer slots to waiting peers.

        The asked peers are told, since they may hold a slot for this peer or name it to others.
        """
        size = self._blobs.piece_size(transfer.digest)
        is_short = size is not None and size < QUEUED_BYTES_MIN  # The blob is too small for slots.
        for peer in transfer.waits.keys() if is_short else transfer.asked_peers:
            self._send(peer, NoBlob(transfer.digest) if size is None else HasBlob(transfer.digest), Priority.CONTROL)
        if size is not None:
            self.server.on_blob_stored(transfer.digest, size)

    async def _pull_until_held(self, transfer: _Transfer) -> None:
        while transfer.error is None and not self._is_here(transfer):
            transfer.is_audit_data = self._blobs.is_audit_data(transfer.digest)
            turns = self._reveals if transfer.is_audit_data else self._turns
            async with turns:  # A turn is held only while a holder sends, so that a blob without a holder blocks no other blob.
                transfer.changed = trio.Event()
                # An earlier holder may have completed the blob meanwhile.
                holder, pause = (None, 0.0) if transfer.complete else self._choose_holder(transfer)
                if holder is not None:
                    transfer.download_window = (
                        self._paces.setdefault(holder, DownloadWindow()) if transfer.is_audit_data else None
                    )
                    transfer.window = BLOB_CHUNK_BYTES if self._is_search(transfer, holder) else self._window_bytes(transfer)
                    await self._pull_from(transfer, holder, turns)
            if holder is None:
                with trio.move_on_after(pause):
                    await transfer.changed.wait()
            if transfer.complete:
                await self._finish_transfer(transfer)

    def _is_here(self, transfer: _Transfer) -> bool:
        if transfer.object_digest is not None:
            return not self._blobs.lacks_part(transfer.object_digest, transfer.digest)
        return self._blobs.size(transfer.digest) is not None or self._blobs.missing_parts(transfer.digest) is not None

    def _choose_holder(self, transfer: _Transfer) -> tuple[bytes | None, float]:
        """Return the holder to ask now and 0, or None and the seconds until a holder can be asked."""
        now, ready = trio.current_time(), self._ready_holders(transfer)
        if not ready:
            waits = (self._asked_again(transfer, peer) - now for peer in self._connected())
            return None, min(waits, default=RETRY_SECONDS_MAX)
        holder = min(ready, key=lambda peer: self._preference(transfer, peer))
        if self._is_search(transfer, holder):
            transfer.search_at = now + SEARCH_SECONDS
        return holder, 0.0

    def _ready_holders(self, transfer: _Transfer) -> set[bytes]:
        now = trio.current_time()
        return {peer for peer in self._connected() if self._asked_again(transfer, peer) <= now}

    def _asked_again(self, transfer: _Transfer, peer: bytes) -> float:
        """Return the earliest time of the next request to a peer."""
        at = max(transfer.rests.get(peer, (-math.inf, 0.0))[0], transfer.waits.get(peer, -math.inf))
        return max(at, transfer.search_at) if self._is_search(transfer, peer) else at

    def _is_search(self, transfer: _Transfer, peer: bytes) -> bool:
        is_hinted = peer in transfer.waits or peer in transfer.named or peer in transfer.preferred
        return transfer.is_found and bool(transfer.waits) and not is_hinted

    def _preference(self, transfer: _Transfer, peer: bytes) -> tuple[object, ...]:
        """Return a sort key of a peer. The peer with the least key is asked first. The first row that differs decides:

        | first, for a whole blob                         | first, for a part of an object                            |
        |-------------------------------------------------|-----------------------------------------------------------|
        | peers with a shorter pause after failures       | peers that sent fewer parts too slowly                    |
        | peers that answer                               | peers that answer                                         |
        | peers that offer a slot                         | peers that offer a slot                                   |
        | peers that another peer named as a holder       | peers that another peer named as a holder                 |
        | sources in `preferred`                          | known holders, if an unknown one sends or lacks a part    |
        |                                                 | peers that send fewer parts of the object now             |
        |                                                 | known holders of parts                                    |
        | peers with a smaller hash: it spreads the load  | peers with a smaller hash                                 |

        A known holder has sent a part, or was named as a source. Each one therefore sends about the same number of parts. At most
        one part at a time is requested from unknown holders. If one lacks the part, the next request goes to a known holder.
        """
        spread, goal = hashlib.sha256(self._me + transfer.digest + peer).digest(), transfer.download
        hint = transfer.named.get(peer) != peer, peer not in transfer.named
        if goal is None:
            return transfer.rests.get(peer, (0.0, 0.0))[1], peer in self._silent, *hint, peer not in transfer.preferred, spread
        busy = [other.holder for other in self._transfers.values() if other.download is goal and other.holder is not None]
        is_unknown = peer not in goal.holders
        is_second_try = is_unknown and (transfer.lacked or not goal.holders.issuperset(busy))
        return goal.slow.get(peer, 0), peer in self._silent, *hint, is_second_try, busy.count(peer), is_unknown, spread

    async def _pull_from(self, transfer: _Transfer, holder: bytes, turns: trio.CapacityLimiter) -> None:
        """Download from `holder` until the blob is complete, another holder is needed, or a waiting transfer has its turn."""
        if transfer.one_holder and transfer.contributors - {holder}:
            transfer.restart()
        transfer.holder, transfer.requested, transfer.begun = holder, transfer.offset, transfer.offset
        transfer.asked = trio.current_time()
        # If this chunk was requested before, BUSY_SECONDS count from that request. Then it may be requested again.
        transfer.moved = transfer.under_way.get((holder, transfer.offset), transfer.asked)
        transfer.lacked = transfer.is_left = False
        if not transfer.is_audit_data:
            transfer.asked_peers.add(holder)
        transfer.awaited.clear()
        patience = self._answer_timeout(transfer, holder)
        self._request_chunks(transfer, holder)
        try:
            with trio.move_on_after(patience) as transfer.pull:
                if await self._has_used_turn(transfer, turns):
                    return
            if transfer.pull.cancelled_caught and holder in self._connected():
                self._silent.add(holder)
        finally:
            transfer.holder = transfer.pull = transfer.download_window = None
        now = trio.current_time()
        if transfer.lacked:
            transfer.asked_peers.discard(holder)
        elif not transfer.complete and holder in transfer.asked_peers and transfer.waits.get(holder, 0.0) <= now:
            self._decline(holder, transfer)  # This frees our slot at the holder.
        if transfer.is_left:
            return
        transfer.waits.pop(holder, None)
        if transfer.offset == transfer.begun and holder in transfer.named:
            transfer.disbelieve(transfer.named[holder])
        if transfer.download is not None and transfer.complete:
            transfer.rests.pop(holder, None)  # The holder has at least one part.
        elif transfer.download is not None and not transfer.lacked:
            transfer.download.slow[holder] += 1
        # The transfer of another part may have set the pause.
        if not transfer.complete and transfer.rests.get(holder, (now, 0.0))[0] <= now:
            pause = min(RETRY_SECONDS_MAX, 2 * transfer.rests.get(holder, (0.0, RETRY_SECONDS / 2))[1])
            transfer.rests[holder] = (now + pause, pause)

    async def _has_used_turn(self, transfer: _Transfer, turns: trio.CapacityLimiter) -> bool:
        """Wait until the transfer must pause or change its holder (True), or until `transfer.changed` is set (False)."""
        while True:
            with trio.move_on_after(TURN_SECONDS):
                await transfer.changed.wait()
                return False
            if turns.statistics().tasks_waiting and transfer.offset:
                return True
            if transfer.download is not None and transfer.holder is not None and not transfer.one_holder:
                others = self._ready_holders(transfer) - {transfer.holder} - self._silent - transfer.download.slow.keys()
                if others:  # The part took longer than TURN_SECONDS: this holder has a slow link, or is slow on purpose.
                    transfer.download.slow[transfer.holder] += 1
                    return True

    def _answer_timeout(self, transfer: _Transfer, holder: bytes) -> float:
        """Return the timeout in seconds of a holder's first answer.

        It grows with failures, up to STALL_SECONDS, for slow links.
        """
        if self._connected() <= {holder}:
            return STALL_SECONDS
        failed = 0.0 if holder in self._silent else transfer.rests.get(holder, (0.0, 0.0))[1]
        usual = transfer.download_window.answer_timeout if transfer.download_window is not None else 0.0
        return min(STALL_SECONDS, max(FIRST_ANSWER_SECONDS, usual, 2 * FIRST_ANSWER_SECONDS * failed / RETRY_SECONDS))

    def _request_chunks(self, transfer: _Transfer, holder: bytes) -> None:
        """Request chunks up to the window.

        Before the first answer the blob's size is unknown, and is assumed to be `size_max`.
        """
        size, pace, now = (
            transfer.size_max if transfer.total is None else transfer.total,
            transfer.download_window,
            trio.current_time(),
        )
        end = min(size, transfer.offset + transfer.window)
        while transfer.requested < end or transfer.requested == 0:
            if pace is not None and transfer.awaited:
                awaited = sum(len(other.awaited) for other in self._transfers.values() if other.download_window is pace)
                if awaited >= pace.window:
                    return
            if not transfer.is_under_way(holder, transfer.requested, now):
                if not self._send(holder, GetBlob(transfer.digest, transfer.requested), Priority.CONTROL):
                    return
                if pace is not None:
                    pace.record_request(transfer.digest, transfer.requested, now)
                    transfer.under_way[holder, transfer.requested] = now
            transfer.awaited.add(transfer.requested)
            transfer.requested += BLOB_CHUNK_BYTES

    async def _finish_transfer(self, transfer: _Transfer) -> None:
        assert transfer.writer is not None
        writer, transfer.writer = transfer.writer, None
        try:
            await self._run_blocking(writer.finish)
        except trio.Cancelled:  # The cancellation may come before `finish` began.
            writer.abort()
            raise
        except RemoteProtocolError as error:
            if len(transfer.contributors) == 1:
                self._drop(next(iter(transfer.contributors)), error)
            transfer.one_holder = True
        transfer.restart()  # If the blob was wrong or is deleted already, all of it is needed again.
