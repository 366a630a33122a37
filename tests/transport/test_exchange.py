"""Timeouts of transfers from silent holders, in virtual time. The links are simulated."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from peer.runtime.audit_scheduler import FETCHING_AUDITS_MAX
from protocol.errors import RemoteProtocolError
from protocol.limits import BLOB_CHUNK_BYTES
from protocol.messages import BlobChunk, BlobElsewhere, GetBlob, HasBlob, NoBlob
from tests.transport.helpers import ALICE, BOB, CAROL, MemoryBlobs, MemoryWriter, digest
from transport.blobs.blob_exchange import (
    ASKED_MAX,
    BUSY_SECONDS,
    FIRST_ANSWER_SECONDS,
    QUEUE_SECONDS,
    STALL_SECONDS,
    TRANSFERS_MAX,
    TURN_SECONDS,
    WINDOW_CHUNKS_MAX,
    WINDOW_CHUNKS_MIN,
    WINDOW_CHUNKS_START,
    BlobExchange,
    DownloadWindow,
)
from transport.blobs.blob_server import UPLOAD_SLOTS, BlobServer, UploadDecision, UploadQueue
from transport.wire.framing import Priority

ME, FROZEN, LIVE = ALICE.public, BOB.public, CAROL.public
BLOBS = [bytes([n]) * 100 for n in range(20)]


async def _run_here(work: Callable[[], None]) -> None:
    work()


class Links:
    """Two holders. A frozen holder answers its requests when it thaws, like a stopped process with open sockets."""

    nursery: trio.Nursery

    def __init__(self, *blobs: bytes) -> None:
        self.store, self.blobs = MemoryBlobs(), MemoryBlobs(*blobs)
        self.peers = {FROZEN, LIVE}
        self.frozen = {FROZEN}
        self.latency_seconds = dict.fromkeys(self.peers, 0.01)
        self.lacking: set[tuple[bytes, bytes]] = set()  # (holder, digest) of missing blobs
        self.asked: list[tuple[bytes, bytes]] = []
        self.dropped: list[bytes] = []
        self.unread: list[GetBlob] = []
        self.exchange = BlobExchange(
            ME,
            self.store,
            send=self._send,
            drop=self._drop,
            connected=lambda: frozenset(self.peers),
            run_blocking=_run_here,
        )

    def only_frozen_reveals(self, blob: bytes) -> None:
        self.lacking = {(LIVE, digest(blob))}
        self.store.reveals.add(digest(blob))

    def _send(self, peer: bytes, message: GetBlob | BlobChunk | NoBlob | BlobElsewhere | HasBlob, priority: Priority) -> bool:
        if isinstance(message, NoBlob | HasBlob):
            return True
        assert isinstance(message, GetBlob)
        self.asked.append((peer, message.digest))
        if peer in self.frozen:
            self.unread.append(message)
        else:
            self.nursery.start_soon(self._answer, peer, message)
        return True

    async def _answer(self, peer: bytes, request: GetBlob) -> None:
        await trio.sleep(self.latency_seconds[peer])
        size = self.blobs.size(request.digest)
        if size is None or (peer, request.digest) in self.lacking:
            self.exchange.on_no_blob(peer, NoBlob(request.digest))
        else:
            chunk = self.blobs.read_piece(request.digest, request.offset, size)
            self.exchange.on_blob_chunk(peer, BlobChunk(request.digest, request.offset, size, chunk))

    def _drop(self, peer: bytes, error: RemoteProtocolError) -> None:
        self.dropped.append(peer)

    def thaw(self) -> None:
        self.frozen.clear()
        for request in self.unread:
            self.nursery.start_soon(self._answer, FROZEN, request)

    async def fetch(self, blob: bytes, source: bytes = FROZEN) -> float:
        """Fetch the blob and return the seconds."""
        start = trio.current_time()
        await self.exchange.fetch_blob(digest(blob), len(blob), [source])
        return trio.current_time() - start


@asynccontextmanager
async def running(links: Links) -> AsyncIterator[Links]:
    async with trio.open_nursery() as links.nursery:
        await links.nursery.start(links.exchange.run)
        yield links
        links.nursery.cancel_scope.cancel()


@pytest.fixture
async def links() -> AsyncIterator[Links]:
    async with running(Links(*BLOBS)) as made:
        yield made


async def test_a_silent_holder_costs_its_patience_once_and_later_transfers_nothing(
    links: Links, autojump_clock: MockClock
) -> None:
    assert FIRST_ANSWER_SECONDS <= await links.fetch(BLOBS[0]) < FIRST_ANSWER_SECONDS + 0.1
    assert [await links.fetch(blob) < 0.1 for blob in BLOBS[1:]] == [True] * 19
    assert [peer for peer, _ in links.asked].count(FROZEN) == 1
    assert links.dropped == []


async def test_transfers_that_begin_together_lose_the_same_second(links: Links, autojump_clock: MockClock) -> None:
    start = trio.current_time()
    async with trio.open_nursery() as nursery:
        for blob in BLOBS[:10]:
            nursery.start_soon(links.fetch, blob)
    assert trio.current_time() - start < FIRST_ANSWER_SECONDS + 0.1


async def test_a_holder_that_answers_again_is_asked_again(links: Links, autojump_clock: MockClock) -> None:
    await links.fetch(BLOBS[0])
    links.thaw()
    await trio.sleep(1)
    links.asked.clear()
    await links.fetch(BLOBS[1])
    assert links.asked == [(FROZEN, digest(BLOBS[1]))]


async def test_a_new_link_is_a_new_chance(links: Links, autojump_clock: MockClock) -> None:
    await links.fetch(BLOBS[0])
    links.exchange.peer_disconnected(FROZEN)
    links.frozen.clear()
    links.asked.clear()
    await links.fetch(BLOBS[1])
    assert links.asked == [(FROZEN, digest(BLOBS[1]))]


async def test_a_reveal_is_taken_also_of_a_holder_that_was_given_up_meanwhile(links: Links, autojump_clock: MockClock) -> None:
    links.frozen.clear()
    links.latency_seconds[FROZEN] = 2.5 * FIRST_ANSWER_SECONDS
    links.only_frozen_reveals(BLOBS[0])
    assert await links.fetch(BLOBS[0]) < 2.6 * FIRST_ANSWER_SECONDS
    assert (LIVE, digest(BLOBS[0])) in links.asked
    assert links.asked.count((FROZEN, digest(BLOBS[0]))) == 1, "it was on its way"


async def test_what_was_under_way_is_taken_whatever_its_holder_is_known_for(links: Links, autojump_clock: MockClock) -> None:
    """All parts of an object share the state of a holder, and another part came from it meanwhile."""
    links.only_frozen_reveals(BLOBS[0])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(links.fetch, BLOBS[0])
        await trio.sleep(FIRST_ANSWER_SECONDS + 0.005)
        transfer = links.exchange._transfers[digest(BLOBS[0])]
        assert transfer.holder == LIVE and FROZEN in transfer.rests
        transfer.rests.clear()
        links.exchange.on_blob_chunk(FROZEN, BlobChunk(digest(BLOBS[0]), 0, len(BLOBS[0]), BLOBS[0]))
        await trio.sleep(0.1)
        assert links.store.size(digest(BLOBS[0])) is not None


@pytest.mark.parametrize("is_heard", [False, True])
async def test_what_never_comes_is_asked_for_again(links: Links, is_heard: bool, autojump_clock: MockClock) -> None:
    """A trainer that does not send it for that time is not busy, even if it sends other data."""
    links.only_frozen_reveals(BLOBS[0])

    async def send_else() -> None:
        await trio.sleep(8.0)  # the holder was given up once, and is asked again meanwhile
        while is_heard and links.frozen:
            await trio.sleep(1.0)
            links.exchange._mark_responsive(FROZEN)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send_else)
        nursery.start_soon(links.fetch, BLOBS[0])
        await trio.sleep(BUSY_SECONDS - 1.0)
        assert links.asked.count((FROZEN, digest(BLOBS[0]))) == 1
        await trio.sleep(10.0)
        assert links.asked.count((FROZEN, digest(BLOBS[0]))) == 2
        links.thaw()


async def test_what_a_link_took_with_it_or_cannot_be_used_is_not_under_way(links: Links, autojump_clock: MockClock) -> None:
    blob = bytes(2 * BLOB_CHUNK_BYTES)
    links.blobs.blobs[digest(blob)] = blob
    links.store.reveals.add(digest(blob))
    links.peers = {FROZEN}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(links.fetch, blob)
        await trio.sleep(0.1)
        transfer = links.exchange._transfers[digest(blob)]
        assert transfer.under_way.keys() == {(FROZEN, 0), (FROZEN, BLOB_CHUNK_BYTES)}
        late = BlobChunk(digest(blob), BLOB_CHUNK_BYTES, len(blob), blob[BLOB_CHUNK_BYTES:])
        links.exchange.on_blob_chunk(FROZEN, late)  # the first chunk was lost
        assert transfer.offset == 0 and transfer.under_way.keys() == {(FROZEN, 0)}
        links.peers.clear()
        links.exchange.peer_disconnected(FROZEN)
        assert not transfer.under_way
        transfer.under_way[FROZEN, 0] = trio.current_time()
        transfer.restart()  # the received data were wrong, and all of them are requested again
        assert not transfer.is_under_way(FROZEN, 0, trio.current_time())
        transfer.under_way[FROZEN, 0] = trio.current_time()
        links.exchange._decline(FROZEN, transfer)  # the holder sends none of the requested pieces
        assert not transfer.under_way
        links.peers.add(FROZEN)
        links.exchange.peer_connected(FROZEN)
        links.frozen.clear()


async def test_who_may_keep_us_waiting_is_asked_again_and_again(links: Links, autojump_clock: MockClock) -> None:
    """It fetched the reveal itself, and did not make it."""
    links.only_frozen_reveals(BLOBS[0])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(links.fetch, BLOBS[0], LIVE)
        await trio.sleep(6 * FIRST_ANSWER_SECONDS)
        assert links.asked.count((FROZEN, digest(BLOBS[0]))) >= 2
        links.thaw()


async def test_who_lacks_a_reveal_owes_no_answer_to_what_it_was_asked_for(links: Links, autojump_clock: MockClock) -> None:
    links.frozen.clear()
    links.lacking = {(FROZEN, digest(BLOBS[0]))}
    links.store.reveals.add(digest(BLOBS[0]))
    await links.fetch(BLOBS[0])
    assert (FROZEN, digest(BLOBS[0])) in links.asked
    assert {at for pace in links.exchange._paces.values() for *_, at in pace.asked} <= {-math.inf}, "they are timed"


@pytest.mark.parametrize("says", ["no", "elsewhere"])
async def test_who_does_not_send_a_reveal_now_is_asked_again_when_it_has_time(
    links: Links, says: str, autojump_clock: MockClock
) -> None:
    blob = digest(BLOBS[0])
    links.store.reveals.add(blob)
    links.lacking = {(LIVE, blob)}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(links.fetch, BLOBS[0])
        await trio.sleep(0.1)
        if says == "no":
            links.exchange.on_no_blob(FROZEN, NoBlob(blob))
        else:
            links.exchange.on_blob_elsewhere(FROZEN, BlobElsewhere(blob, True, ()))
        links.frozen.clear()
        await trio.sleep(0.1)
        if says == "elsewhere":
            links.exchange.on_has_blob(FROZEN, HasBlob(blob))
        await trio.sleep(FIRST_ANSWER_SECONDS)
        assert links.store.size(blob) is not None


@pytest.mark.parametrize("latency_seconds", [1.5, 3.0, STALL_SECONDS - 0.1])
async def test_a_holder_slower_than_the_patience_is_given_more_each_time(
    links: Links, autojump_clock: MockClock, latency_seconds: float
) -> None:
    links.frozen.clear()
    links.latency_seconds[FROZEN] = latency_seconds
    links.lacking = {(LIVE, digest(BLOBS[0]))}
    assert await links.fetch(BLOBS[0]) < 6 * STALL_SECONDS


async def test_the_only_link_is_given_all_the_time_and_asked_once(links: Links, autojump_clock: MockClock) -> None:
    links.peers = {FROZEN}
    links.frozen.clear()
    links.latency_seconds[FROZEN] = STALL_SECONDS - 0.1
    assert await links.fetch(BLOBS[0]) < STALL_SECONDS
    assert len(links.asked) == 1


async def test_a_holder_that_answers_others_is_busy_and_not_silent(links: Links, autojump_clock: MockClock) -> None:
    """Its queue is long, and it answers the last request after all others."""
    links.frozen.clear()
    async with trio.open_nursery() as nursery:
        for place, blob in enumerate(BLOBS[:4]):
            links.latency_seconds[FROZEN] = 0.9 * FIRST_ANSWER_SECONDS * (place + 1)
            nursery.start_soon(links.fetch, blob)
            await trio.testing.wait_all_tasks_blocked()
    assert links.asked == [(FROZEN, digest(blob)) for blob in BLOBS[:4]]


async def test_a_blob_that_somebody_gets_later_does_not_wait_for_the_silent_one(links: Links, autojump_clock: MockClock) -> None:
    """No other holder exists yet, so the silent one is asked too, each time for its patience at most."""
    await links.fetch(BLOBS[0])
    links.lacking = {(LIVE, digest(BLOBS[1]))}
    links.nursery.start_soon(_gets_it, links, 3.0)
    assert 3.0 <= await links.fetch(BLOBS[1]) < 3.0 + 2 * FIRST_ANSWER_SECONDS + 2.0


async def _gets_it(links: Links, seconds: float) -> None:
    await trio.sleep(seconds)
    links.lacking.clear()


async def test_a_blob_that_is_deleted_as_soon_as_it_is_there_is_fetched_again(
    links: Links, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its round was closed, and a new request has another purpose."""
    links.thaw()
    finish = MemoryWriter.finish

    def finish_and_delete(writer: MemoryWriter) -> None:
        finish(writer)
        if links.store.finished == 1:
            links.store.blobs.clear()

    monkeypatch.setattr(MemoryWriter, "finish", finish_and_delete)
    await links.fetch(BLOBS[0])
    assert links.store.finished == 2 and links.store.size(digest(BLOBS[0])) == len(BLOBS[0]) and not links.dropped


async def test_a_holder_that_drips_bytes_is_left_for_another(links: Links, autojump_clock: MockClock) -> None:
    blob = BLOBS[0]

    async def drip() -> None:
        await trio.testing.wait_all_tasks_blocked()  # it received a request
        for offset in range(len(blob)):
            links.exchange.on_blob_chunk(FROZEN, BlobChunk(digest(blob), offset, len(blob), blob[offset : offset + 1]))
            await trio.sleep(FIRST_ANSWER_SECONDS / 2)

    links.nursery.start_soon(drip)
    assert await links.fetch(blob) < 2 * STALL_SECONDS
    assert (LIVE, digest(blob)) in links.asked


SLOW = [bytes([n]) * (8 * BLOB_CHUNK_BYTES) for n in range(FETCHING_AUDITS_MAX)]


async def drip(links: Links, blob: bytes) -> None:
    """Send whole chunks: one soon after the request, and each other one just before the timeout."""
    while (transfer := links.exchange._transfers.get(digest(blob))) is not None:
        if transfer.holder == FROZEN:
            chunk = blob[transfer.offset : transfer.offset + BLOB_CHUNK_BYTES]
            links.exchange.on_blob_chunk(FROZEN, BlobChunk(digest(blob), transfer.offset, len(blob), chunk))
            await trio.sleep(STALL_SECONDS - 1)
        else:
            await trio.sleep(FIRST_ANSWER_SECONDS / 4)


@pytest.mark.parametrize(
    ("slow", "are_reveals", "is_reveal", "seconds_max"),
    [
        (SLOW[:TRANSFERS_MAX], False, False, TURN_SECONDS + 1),
        (SLOW, True, False, 0.1),
        (SLOW, True, True, 0.1),  # the most blobs that one auditor fetches
    ],
)
async def test_holders_that_drip_whole_chunks_hold_up_others_for_a_turn_and_reveals_hold_up_nobody(
    slow: list[bytes], are_reveals: bool, is_reveal: bool, seconds_max: float, autojump_clock: MockClock
) -> None:
    async with running(Links(*slow, BLOBS[-1])) as links:
        links.peers.discard(LIVE)
        links.store.reveals |= {digest(blob) for blob in slow if are_reveals} | ({digest(BLOBS[-1])} if is_reveal else set())
        async with trio.open_nursery() as nursery:
            for blob in slow:
                nursery.start_soon(links.fetch, blob)
            await trio.testing.wait_all_tasks_blocked()
            for blob in slow:
                nursery.start_soon(drip, links, blob)
            await trio.sleep(1.0)
            links.peers.add(LIVE)
            links.exchange.peer_connected(LIVE)
            links.lacking |= {(LIVE, digest(blob)) for blob in slow}
            assert await links.fetch(BLOBS[-1], LIVE) < seconds_max
        assert not links.dropped, "what drips comes in the end"


def took(pace: DownloadWindow, seconds: float, now: float) -> None:
    pace.record_request(bytes(32), 0, now - seconds)
    pace.record_chunk(bytes(32), 0, BLOB_CHUNK_BYTES, now)


@pytest.fixture
def pace() -> DownloadWindow:
    return DownloadWindow()


def test_the_window_of_reveals_grows_while_answers_come_quickly_and_shrinks_once_for_each_queue(pace: DownloadWindow) -> None:
    for _ in range(WINDOW_CHUNKS_MAX):
        took(pace, 0.3, now=1.0)
    assert pace.window == WINDOW_CHUNKS_MAX
    for _ in range(10):
        took(pace, 2.0, now=10.0)
    assert pace.window == WINDOW_CHUNKS_MAX // 2
    for later in range(1, 10):
        took(pace, 2.0, now=10.0 + 2.0 * later)
    assert pace.window == WINDOW_CHUNKS_MIN


def test_a_link_that_is_slow_from_the_start_is_no_fast_one_with_a_longer_way(pace: DownloadWindow) -> None:
    took(pace, 5.0, now=1.0)
    assert pace.window == WINDOW_CHUNKS_START // 2


def test_what_is_asked_for_again_while_it_is_on_its_way_does_not_make_a_link_quick(pace: DownloadWindow) -> None:
    """Otherwise every later answer would be late, and no more than two chunks would be requested at a time."""
    pace.record_request(bytes(32), 0, now=1.0)
    pace.record_request(bytes(32), 0, now=1.3)  # another transfer of the same blob
    pace.record_chunk(bytes(32), 0, BLOB_CHUNK_BYTES, now=1.31)
    assert pace.fastest == pytest.approx(0.31)
    pace.record_chunk(bytes(32), 0, BLOB_CHUNK_BYTES, now=1.61)
    pace.record_chunk(bytes(32), 0, BLOB_CHUNK_BYTES, now=1.62)  # nobody requested it
    assert pace.fastest == pytest.approx(0.31)


def test_what_a_holder_leaves_unanswered_is_remembered_no_longer_than_the_next_answer(pace: DownloadWindow) -> None:
    for number in range(10 * ASKED_MAX):
        pace.record_request(bytes(32), number, now=1.0)
    assert len(pace.asked) == ASKED_MAX
    pace.record_chunk(bytes(32), 10 * ASKED_MAX - 1, BLOB_CHUNK_BYTES, now=1.2)
    assert not pace.asked


def test_a_holder_is_waited_for_as_long_as_its_answers_take_and_as_they_differ(pace: DownloadWindow) -> None:
    for number in range(20):
        took(pace, 2.0, now=10.0 * number)
    assert pace.answer_timeout == pytest.approx(2.0, rel=0.1)
    for number in range(20, 40):
        took(pace, 1.0 + 2.0 * (number % 2), now=10.0 * number)
    assert 4.0 < pace.answer_timeout < 8.0


def test_short_answers_say_nothing_of_a_link_nor_do_those_that_a_holder_had_queued_before_it_refused() -> None:
    pace, state, short = DownloadWindow(), bytes(32), bytes([1]) * 32
    pace.record_request(state, 0, now=1.0)
    pace.record_request(short, 0, now=1.2)
    pace.cancel_requests(state)
    pace.record_request(state, 0, now=1.25)
    pace.record_chunk(state, 0, BLOB_CHUNK_BYTES, now=1.27)
    pace.record_chunk(short, 0, BLOB_CHUNK_BYTES - 1, now=1.3)
    assert pace.window == WINDOW_CHUNKS_START and pace.answer_timeout == 0.0
    pace.record_chunk(state, 0, BLOB_CHUNK_BYTES, now=1.65)
    assert pace.fastest == pytest.approx(0.4) and pace.window == WINDOW_CHUNKS_START + 1


def test_an_answer_a_second_late_is_none_that_waited_in_a_queue(pace: DownloadWindow) -> None:
    took(pace, 0.3, now=1.0)
    took(pace, 0.3 + 0.95 * QUEUE_SECONDS, now=10.0)
    assert QUEUE_SECONDS > 4 * 0.3 and pace.window == WINDOW_CHUNKS_START + 2
    took(pace, 0.3 + 1.05 * QUEUE_SECONDS, now=20.0)
    assert pace.window == (WINDOW_CHUNKS_START + 2) // 2


async def test_strangers_get_a_blob_one_after_the_other() -> None:
    blob, answers = bytes(8 * BLOB_CHUNK_BYTES * 20), list[tuple[bytes, type]]()
    name = digest(blob)

    def send(peer: bytes, message: object, priority: Priority) -> bool:
        answers.append((peer, type(message)))
        return True

    exchange = BlobExchange(
        ME,
        MemoryBlobs(blob),
        send=send,
        drop=lambda peer, error: None,
        connected=lambda: frozenset({FROZEN, LIVE}),
        run_blocking=_run_here,
        is_stranger=lambda peer: True,
    )
    first, *others = (GetBlob(name, offset) for offset in range(0, len(blob), BLOB_CHUNK_BYTES))
    exchange.server.on_get_blob(FROZEN, first)
    for request in (first, *others):
        exchange.server.on_get_blob(LIVE, request)
    assert (FROZEN, BlobChunk) in answers and (LIVE, BlobChunk) not in answers
    assert (LIVE, BlobElsewhere) in answers
    for request in others:
        exchange.server.on_get_blob(FROZEN, request)
    exchange.on_has_blob(FROZEN, HasBlob(name))
    exchange.server.on_get_blob(LIVE, first)
    assert (LIVE, BlobChunk) in answers


async def test_whoever_cannot_be_told_to_wait_waits_for_no_turn() -> None:
    """Its queue is full, so the peer asks again."""
    blob, name, sent = bytes(UPLOAD_SLOTS << 20), digest(bytes(UPLOAD_SLOTS << 20)), list[tuple[bytes, type]]()
    peers = [bytes([number]) * 32 for number in range(UPLOAD_SLOTS + 1)]

    def send(peer: bytes, message: object, priority: Priority) -> bool:
        sent.append((peer, type(message)))
        return not isinstance(message, BlobElsewhere)

    server = BlobServer(MemoryBlobs(blob), send, lambda wanted: False, lambda peer: False)
    for peer in peers:
        server.on_get_blob(peer, GetBlob(name, 0))
    assert sent[-1] == (peers[-1], BlobElsewhere)
    server.on_peer_has(name, peers[0])
    assert sent[-1] == (peers[-1], BlobElsewhere), "no turn is kept for it"
    server.on_get_blob(peers[-1], GetBlob(name, 0))
    assert sent[-2:] == [(peers[-1], HasBlob), (peers[-1], BlobChunk)]


def test_a_stranger_that_keeps_its_place_for_too_long_is_not_served_beside_the_places() -> None:
    serving = UploadQueue(is_stranger=lambda peer: True)
    size = 1 << 30
    assert serving.request_slot(b"a blob", FROZEN, size, 0.0) is UploadDecision.SLOT
    assert serving.request_slot(b"a blob", LIVE, size, 0.0) is UploadDecision.ELSEWHERE
    assert serving.expire_slots(1e6) == [(LIVE, b"a blob")]
    assert serving.request_slot(b"a blob", FROZEN, size, 1e6) is UploadDecision.ELSEWHERE
