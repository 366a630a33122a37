"""Payloads by digest: pulled in chunks over the links, from whoever holds them.

One transfer has one holder at a time and asks it for consecutive chunks, a window ahead. For what only audits ask for, the window
follows the link (`DownloadWindow`): as much as it carries in a round trip, and a queue of a second or two for each auditor. A
holder that says NoBlob, stalls or disappears is left for another, and the transfer goes on where it stands. Who answers nothing
in any transfer (a stopped process keeps its links) is known to be silent: asked after all others until it answers. If bytes of
several holders turn out not to have the right hash, nobody can say whose were wrong: the transfer starts again and keeps to bytes
of one holder, whose lie is his.

What others ask for is answered by `transport.blobs.blob_server`. A holder serves one blob to few receivers at a time, and names
to others who has it or is getting it. Those wait until it is their turn somewhere, and ask the named ones, and everybody else,
meanwhile. Names are hints: a liar that names peers without the blob costs a transfer so many questions, and its next names are
not believed.

Of an object that is larger than a part, the list of its parts comes first, under the object's own digest. Each part then is a
transfer of its own, a few at once, and each peer asks in an order of its own. So several holders are asked, also those that have
a few parts only; a lie costs a part; and what has come stays when this process ends.
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

WINDOW_CHUNKS = 32  # asked for ahead: 2 MiB, which is 20 MB/s over a link of 100 ms
# Of what only audits ask for, of one holder in all transfers together. At the start 4 MB/s over a link of 100 ms; at most what an
# uplink of 100 Mbit/s sends in 300 ms. At least two, so that the link is never idle while a request is on its way.
WINDOW_CHUNKS_START, WINDOW_CHUNKS_MIN, WINDOW_CHUNKS_MAX = 8, 2, 64
ASKED_MAX = 4 * WINDOW_CHUNKS_MAX  # requests remembered of one holder; there are more only where it leaves some unanswered
# An answer that comes so much later than the fastest one has waited in a queue: the window shrinks. What TCP sends again, or at
# first slowly, comes four round trips of 300 ms late without any queue; with half a second windows stayed at their least.
QUEUE_SECONDS = 1.5
FASTEST_SECONDS_MAX = 1.0  # a link takes no longer for one chunk, but for its queue: 400 kbit/s, or three round trips of 300 ms
STALL_SECONDS = 5.0  # without any chunk of a transfer: the next holder is tried
# As long a holder of a reveal may keep it back while it sends others, and is not asked for it again: at 2 Mbit/s 48 chunks that
# three auditors ask for take 9 s.
BUSY_SECONDS = 20.0
FIRST_ANSWER_SECONDS = 1.0  # for a first answer, where another could be asked: three round trips of 300 ms. Doubled each time
RETRY_SECONDS = 0.5  # a holder without the blob is asked again after this long, doubling
RETRY_SECONDS_MAX = 15.0
# At once; the others wait their turn, so that windows do not fill a holder's queue. What only audits ask for has turns of its
# own: a trainer that drips its buffers holds up no payload.
TRANSFERS_MAX = 10
# more than one auditor fetches at once (`auditing`): who drips its buffers holds up nobody else's either
AUDIT_TRANSFERS_MAX = 18
PARTS_AT_ONCE = 4  # of one object: its holders answer side by side, and turns are left for what is small
TURN_SECONDS = 15.0  # then it is the turn of who waits, and the transfer goes on later where it stands: a holder may drip

# A peer that was told to wait asks again after this long: for other names, and because its turn may have been lost.
WAIT_SECONDS = 2.0
WAIT_GETTING_SECONDS = 10.0  # the same of a peer that is getting the blob and says when it has it
REMAINING_SECONDS_MAX = 2.0  # who has to wait longer for the rest of a blob goes where it is its turn
SEARCH_SECONDS = 0.1  # meanwhile it asks one peer that nobody named in so long: whoever told it to wait may be a liar

assert WAIT_SECONDS > REPEAT_SECONDS
# What one asker can have queued at one holder fits into the holder's queue.
assert BLOB_CHUNK_BYTES * (WINDOW_CHUNKS * TRANSFERS_MAX // 2 + WINDOW_CHUNKS_MAX + AUDIT_TRANSFERS_MAX) <= 16 << 20
assert PARTS_AT_ONCE < TRANSFERS_MAX
assert WINDOW_CHUNKS_MIN <= WINDOW_CHUNKS_START <= WINDOW_CHUNKS_MAX

RunBlocking = Callable[[Callable[[], None]], Awaitable[None]]


@dataclass(slots=True)
class DownloadWindow:
    """How many chunks of reveals this peer asks one holder for ahead.

    | an answer                                     | the window                                     |
    | comes within QUEUE_SECONDS of the fastest one | grows by a chunk, so it doubles in a round trip |
    | comes later                                   | is halved, once in the time that it took       |

    Answers come in the order of the requests. What is asked for twice is answered twice: the first answer is that to the first
    request. Were it taken for one to the second, it would be the fastest ever, and every other one late.
    """

    window: int = WINDOW_CHUNKS_START  # chunks
    fastest: float = FASTEST_SECONDS_MAX  # seconds from a request to its chunk
    mean: float = 0.0  # of such seconds, lately, and how far from it they are: `patience`
    deviation: float = 0.0
    shrunk: float = -math.inf  # when
    # Digest, offset, and when it was asked for, in the order in which a holder answers.
    asked: deque[tuple[bytes, int, float]] = field(default_factory=lambda: deque(maxlen=ASKED_MAX))

    def record_request(self, digest: bytes, offset: int, now: float) -> None:
        self.asked.append((digest, offset, now))

    @property
    def answer_timeout(self) -> float:
        """Seconds in which nearly every answer comes: RFC 6298's time after which TCP sends again."""
        return self.mean + 4 * self.deviation

    def record_chunk(self, digest: bytes, offset: int, size: int, now: float) -> None:
        """A chunk came; what was asked for before it will not be answered any more. A short one takes less than others would."""
        place = next((place for place, (*what, _) in enumerate(self.asked) if what == [digest, offset]), None)
        if place is not None:
            at = self.asked[place][-1]
            for _ in range(place + 1):
                self.asked.popleft()
            if size == BLOB_CHUNK_BYTES and at > -math.inf:
                self._answered(now - at, now)

    def cancel_requests(self, digest: bytes) -> None:
        """The holder sends this blob not now, or not at all. What was in its queue before still comes, and is not timed."""
        for place, (asked, offset, _) in enumerate(self.asked):
            if asked == digest:
                self.asked[place] = digest, offset, -math.inf

    def _answered(self, took: float, now: float) -> None:
        self.deviation = 3 / 4 * self.deviation + 1 / 4 * abs(self.mean - took) if self.mean else took / 2
        self.mean = 7 / 8 * self.mean + 1 / 8 * took if self.mean else took
        self.fastest = min(self.fastest, took)
        if took <= self.fastest + QUEUE_SECONDS:
            self.window = min(WINDOW_CHUNKS_MAX, self.window + 1)
        elif now >= self.shrunk + took:  # what was asked before the window shrank says nothing about the new one
            self.window, self.shrunk = max(WINDOW_CHUNKS_MIN, self.window // 2), now


RetryTimes = dict[bytes, tuple[float, float]]  # peer -> (asked again at, last pause)


@dataclass(slots=True)
class _ObjectDownload:
    """An object that somebody waits for."""

    waiters: int = 0
    has_parts: bool = False
    rests: RetryTimes = field(default_factory=dict)  # of all its parts: a peer that lacks one mostly lacks them all
    holders: set[bytes] = field(default_factory=set)  # who sent some of it, and who was named as a source
    slow: Counter[bytes] = field(default_factory=Counter)  # how often a part had to be asked of another than this peer


@dataclass(slots=True)
class _Transfer:
    digest: bytes
    size_max: int
    download: _ObjectDownload | None = None  # of a part: what all parts of its object share
    object_digest: bytes | None = None  # the object, of a part
    preferred: list[bytes] = field(default_factory=list)
    waiters: int = 0
    done: trio.Event = field(default_factory=trio.Event)
    error: BaseException | None = None  # of the local store
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    changed: trio.Event = field(default_factory=trio.Event)  # another holder may be there, or this one is finished with
    pull: trio.CancelScope | None = None  # its deadline is the stall deadline
    holder: bytes | None = None
    asked: float = 0.0  # when this holder was
    begun: int = 0  # the offset then
    moved: float = 0.0  # when the last chunk of this transfer came from it, or it was asked
    is_audit_data: bool = False
    download_window: DownloadWindow | None = None  # of a reveal: its holder's
    total: int | None = None
    offset: int = 0  # written so far
    requested: int = 0
    awaited: set[int] = field(default_factory=set)  # offsets of chunks that its holder was asked for
    # Holder and offset, of a reveal: when it was asked for what has not come yet, also if that holder was given up meanwhile.
    under_way: dict[tuple[bytes, int], float] = field(default_factory=dict)
    window: int = WINDOW_CHUNKS * BLOB_CHUNK_BYTES  # bytes
    writer: BlobWriter | None = None
    contributors: set[bytes] = field(default_factory=set)
    lacked: bool = False  # its holder said so
    one_holder: bool = False  # after a wrong hash: never mix holders again
    rests: RetryTimes = field(default_factory=dict)
    waits: dict[bytes, float] = field(default_factory=dict)  # who told us to wait for our turn -> asked again at
    is_left: bool = False  # its holder told us to wait, or it is our turn elsewhere: no fault of that holder
    named: dict[bytes, bytes] = field(default_factory=dict)  # who may have it -> who said so; by itself: it is our turn there
    unbelieved: set[bytes] = field(default_factory=set)  # who named a peer that gave nothing, or a turn that was none
    is_found: bool = False  # somebody that told us to wait says that it has it
    search_at: float = 0.0  # while this is so: when a peer that nobody named is asked
    asked_peers: set[bytes] = field(default_factory=set)  # who may keep a place for us, or may name us

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
        """Whether this peer was asked for this chunk, and sends it without another request.

        Only the trainer that was named as a source answers at once. A peer that has fetched the reveal may let us wait our turn.
        """
        return peer in self.preferred and now < self.under_way.get((peer, offset), -math.inf) + BUSY_SECONDS

    def forget_asking(self, peer: bytes) -> None:
        self.under_way = {(of, offset): at for (of, offset), at in self.under_way.items() if of != peer}

    def accepts_chunk(self, peer: bytes, offset: int) -> bool:
        """Whether this chunk, which has just come, is of use.

        Over a slow link a holder answers after it was given up. The transfer takes what it had asked that holder for, for nobody
        sends it again.
        """
        was_under_way = self.under_way.pop((peer, offset), None) is not None
        return self.holder == peer or (was_under_way and not self.one_holder)

    def ends_soon(self, now: float) -> bool:
        """Whether its holder sends the rest before another could, as far as one can tell."""
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
        """`recall`: what waits to be sent of a blob."""
        self._me, self._blobs = me, blobs
        self._send, self._drop, self._connected, self._run_blocking = send, drop, connected, run_blocking
        self._transfers: dict[bytes, _Transfer] = {}
        self._goals: dict[bytes, _ObjectDownload] = {}
        self._paces: dict[bytes, DownloadWindow] = {}  # by holder
        self._left = trio.Event()  # somebody does not wait any more
        self._recall = recall
        self.server = BlobServer(blobs, send, self._transfers.__contains__, is_stranger)
        self._silent: set[bytes] = set()  # asked in vain, and not heard from since
        self._turns, self._reveals = trio.CapacityLimiter(TRANSFERS_MAX), trio.CapacityLimiter(AUDIT_TRANSFERS_MAX)
        self._nursery: trio.Nursery | None = None
        self.bytes_received = 0
        self.audit_bytes_received = 0  # of them, what serves audits alone

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as self._nursery:
            task_status.started()
            self._nursery.start_soon(self.server.run)
            while True:
                await self._left.wait()
                self._left = trio.Event()
                try:
                    await self._run_blocking(partial(self._blobs.sweep_partial, frozenset(self._goals)))
                except StorageError as error:  # nobody waits for it
                    log.warning("what came in part stays: %s", error)

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
                if wanted is None:  # it is small, or its list comes first
                    await self._fetch_piece(digest, size_max, named)
                elif wanted.total > size_max:  # whoever named it said that it is smaller: there is no such object
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
        """Each peer in an order of its own, so that they can give one another what they have."""
        parts = iter(sorted(lacking, key=lambda part: hashlib.sha256(self._me + part).digest()))
        errors: list[Exception] = []

        async def pull() -> None:
            for part in parts:
                try:
                    await self._fetch_piece(part, lacking[part], sources, digest, goal)
                except Exception as error:  # of the local store
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

    # What the links report -------------------------------------------------------------------------------------------

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
                transfer.rests.pop(other, None)  # it may have got it meanwhile
        transfer.changed.set()

    def on_has_blob(self, peer: bytes, answer: HasBlob) -> None:
        digest, now = answer.digest, trio.current_time()
        self.server.on_peer_has(digest, peer)
        transfer = self._transfers.get(digest)
        if transfer is not None and transfer.holder == peer:
            self._mark_responsive(peer)  # we have a place, and the first chunk is on its way
            return
        if transfer is None or peer not in transfer.waits or peer in transfer.unbelieved:
            return
        if transfer.ends_soon(now):
            self._decline(peer, transfer)
        else:
            transfer.waits[peer], transfer.named[peer], transfer.is_left = now, peer, True
            transfer.changed.set()

    def _mark_responsive(self, peer: bytes) -> None:
        """It answers, if only others of our transfers: those that wait for it give it the time that a busy holder needs."""
        self._silent.discard(peer)
        now = trio.current_time()
        for transfer in self._transfers.values():
            if transfer.holder == peer and transfer.pull is not None:
                until = transfer.asked + STALL_SECONDS
                if transfer.is_audit_data:  # mostly nobody else has a reveal
                    until = min(now + STALL_SECONDS, transfer.moved + BUSY_SECONDS)
                transfer.pull.deadline = max(transfer.pull.deadline, until)

    def _decline(self, peer: bytes, transfer: _Transfer) -> None:
        """We do not want it from there any more, not even what waits there to be sent."""
        self._send(peer, NoBlob(transfer.digest), Priority.CONTROL)
        transfer.forget_asking(peer)

    def _sends_none(self, peer: bytes, digest: bytes) -> None:
        """What it was asked for of this blob, it does not send."""
        if peer in self._paces:
            self._paces[peer].cancel_requests(digest)
        if digest in self._transfers:
            self._transfers[digest].forget_asking(peer)

    def on_no_blob(self, peer: bytes, answer: NoBlob) -> None:
        """Also: it does not want the blob from here any more."""
        self._mark_responsive(peer)
        self._recall(peer, answer.digest)
        self.server.release_slot(answer.digest, peer)
        self._sends_none(peer, answer.digest)
        transfer = self._transfers.get(answer.digest)
        if transfer is not None and transfer.holder == peer:
            transfer.lacked = True
            transfer.changed.set()

    def on_blob_chunk(self, peer: bytes, chunk: BlobChunk) -> None:
        """Runs in the link's reader, so that a slow disk slows the sender down and nothing piles up here."""
        self._mark_responsive(peer)
        self.bytes_received += len(chunk.chunk)
        self.audit_bytes_received += len(chunk.chunk) if self._blobs.is_audit_data(chunk.digest) else 0
        if peer in self._paces:
            self._paces[peer].record_chunk(chunk.digest, chunk.offset, len(chunk.chunk), trio.current_time())
        transfer = self._transfers.get(chunk.digest)
        if transfer is None or not transfer.accepts_chunk(peer, chunk.offset) or transfer.error is not None:
            return  # an answer that came after the transfer ended or moved on
        try:
            self._accept_chunk(transfer, peer, chunk)
        except Exception as error:  # the local store's; it belongs to those who wait for the blob, not to this link
            transfer.error = error
            transfer.changed.set()

    def _accept_chunk(self, transfer: _Transfer, peer: bytes, chunk: BlobChunk) -> None:
        if chunk.total > transfer.size_max or (transfer.total is not None and chunk.total != transfer.total):
            # Either this holder lies about the size, or whoever told us the size did: no proof, so no penalty.
            transfer.one_holder = transfer.one_holder or transfer.total is not None
            transfer.changed.set()
            return
        if chunk.offset != transfer.offset or len(chunk.chunk) < min(BLOB_CHUNK_BYTES, chunk.total - transfer.offset):
            return  # a gap, where the link loses messages, or a holder that drips bytes: the stall deadline asks another
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
            # half a window at once: a frame of many requests costs little more than one of one
            self._request_chunks(transfer, peer)

    def _window_bytes(self, transfer: _Transfer) -> int:
        """Bytes to ask for ahead. Transfers of reveals share their holder's window, and each has a chunk at least."""
        if transfer.download_window is None:
            return WINDOW_CHUNKS * BLOB_CHUNK_BYTES
        sharing = sum(other.download_window is transfer.download_window for other in self._transfers.values())
        return max(1, transfer.download_window.window // max(1, sharing)) * BLOB_CHUNK_BYTES

    # A transfer ------------------------------------------------------------------------------------------------------

    async def _run_transfer(self, transfer: _Transfer) -> None:
        with transfer.scope:
            try:
                await self._pull_until_held(transfer)
            except Exception as error:  # whoever waits for the blob gets it; the network goes on
                transfer.error = error
            finally:
                if transfer.writer is not None:
                    transfer.writer.abort()
        self._forget_transfer(transfer)
        self._announce_result(transfer)
        transfer.done.set()

    def _announce_result(self, transfer: _Transfer) -> None:
        """Whoever was asked may have kept a place for this peer, or may name it; whoever waits for it may ask now."""
        size = self._blobs.piece_size(transfer.digest)
        is_short = size is not None and size < QUEUED_BYTES_MIN  # nobody had to wait for a place
        for peer in transfer.waits.keys() if is_short else transfer.asked_peers:
            self._send(peer, NoBlob(transfer.digest) if size is None else HasBlob(transfer.digest), Priority.CONTROL)
        if size is not None:
            self.server.on_blob_stored(transfer.digest, size)

    async def _pull_until_held(self, transfer: _Transfer) -> None:
        while transfer.error is None and not self._is_here(transfer):
            transfer.is_audit_data = self._blobs.is_audit_data(transfer.digest)
            turns = self._reveals if transfer.is_audit_data else self._turns
            async with turns:  # held only while a holder is at work: a blob that nobody has blocks no other
                transfer.changed = trio.Event()
                # It may have come meanwhile, of a holder that was given up.
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
        """The holder to ask now, or None and how long to wait for one."""
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
        """When this peer may be asked."""
        at = max(transfer.rests.get(peer, (-math.inf, 0.0))[0], transfer.waits.get(peer, -math.inf))
        return max(at, transfer.search_at) if self._is_search(transfer, peer) else at

    def _is_search(self, transfer: _Transfer, peer: bytes) -> bool:
        is_hinted = peer in transfer.waits or peer in transfer.named or peer in transfer.preferred
        return transfer.is_found and bool(transfer.waits) and not is_hinted

    def _preference(self, transfer: _Transfer, peer: bytes) -> tuple[object, ...]:
        """Asked first: whoever failed least, who answers, the named sources; the rest spreads the load over the holders.

        Of the parts of one object each holder is asked for about as many. At most one is asked of a peer that may have none, and
        if that is so, of a holder next.
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
        """Take chunks from `holder` until the blob is complete, the holder is given up, or it is the turn of another transfer."""
        if transfer.one_holder and transfer.contributors - {holder}:
            transfer.restart()
        transfer.holder, transfer.requested, transfer.begun = holder, transfer.offset, transfer.offset
        transfer.asked = trio.current_time()
        # What is under way was asked for before: this pull ends when it may be asked for again.
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
            self._decline(holder, transfer)  # our place there is another's
        if transfer.is_left:
            return
        transfer.waits.pop(holder, None)
        if transfer.offset == transfer.begun and holder in transfer.named:
            transfer.disbelieve(transfer.named[holder])
        if transfer.download is not None and transfer.complete:
            transfer.rests.pop(holder, None)  # it does not lack them all
        elif transfer.download is not None and not transfer.lacked:
            transfer.download.slow[holder] += 1
        if not transfer.complete and transfer.rests.get(holder, (now, 0.0))[0] <= now:  # another part may have said so meanwhile
            pause = min(RETRY_SECONDS_MAX, 2 * transfer.rests.get(holder, (0.0, RETRY_SECONDS / 2))[1])
            transfer.rests[holder] = (now + pause, pause)

    async def _has_used_turn(self, transfer: _Transfer, turns: trio.CapacityLimiter) -> bool:
        """Whether others have waited long enough; False once the transfer has changed."""
        while True:
            with trio.move_on_after(TURN_SECONDS):
                await transfer.changed.wait()
                return False
            if turns.statistics().tasks_waiting and transfer.offset:
                return True
            if transfer.download is not None and transfer.holder is not None and not transfer.one_holder:
                others = self._ready_holders(transfer) - {transfer.holder} - self._silent - transfer.download.slow.keys()
                if others:  # a part takes longer than a turn: this holder has a slow link, or drips
                    transfer.download.slow[transfer.holder] += 1
                    return True

    def _answer_timeout(self, transfer: _Transfer, holder: bytes) -> float:
        """Seconds for its first answer. Who fails often gets more, so that a link of any delay is waited for in the end."""
        if self._connected() <= {holder}:
            return STALL_SECONDS
        failed = 0.0 if holder in self._silent else transfer.rests.get(holder, (0.0, 0.0))[1]
        usual = transfer.download_window.answer_timeout if transfer.download_window is not None else 0.0
        return min(STALL_SECONDS, max(FIRST_ANSWER_SECONDS, usual, 2 * FIRST_ANSWER_SECONDS * failed / RETRY_SECONDS))

    def _request_chunks(self, transfer: _Transfer, holder: bytes) -> None:
        """A window ahead, also before the first answer has told the size: often `size_max` is it."""
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
        except trio.Cancelled:  # perhaps before it began
            writer.abort()
            raise
        except RemoteProtocolError as error:
            if len(transfer.contributors) == 1:
                self._drop(next(iter(transfer.contributors)), error)
            transfer.one_holder = True
        transfer.restart()  # it is held now; if it is not, because it was wrong or is deleted already, all of it is needed
