"""Uploads: a blob goes to three receivers at a time, which pass it on. Liars name other holders, or keep slots. Virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import trio
from trio.testing import MockClock

from protocol.codec import encode
from protocol.identity import Identity
from protocol.messages import BlobElsewhere, GetBlob, HasBlob
from scenarios.emulation.link_profiles import steady_profile
from scenarios.emulation.memory_network import LinkConditions, MemoryNetwork, Mesh
from tests.transport.conftest import MemoryWorld, open_world
from tests.transport.helpers import MemoryBlobs, digest, linked
from transport.blobs import blob_server
from transport.blobs.blob_exchange import FIRST_ANSWER_SECONDS, SEARCH_SECONDS, STALL_SECONDS
from transport.blobs.blob_server import ANSWER_SECONDS, REPEAT_SECONDS, SLOW_SECONDS, UPLOAD_SLOTS, UploadDecision, UploadQueue
from transport.quotas.memory_quota import MemoryQuota
from transport.relay.circuit_session import SILENT_SECONDS, WITHHELD_SECONDS, RelayWatchdog
from transport.wire.framing import Channel, Inbox, Message, Outbox, Priority

PEERS = [Identity(bytes([200 + n]) * 32) for n in range(13)]
KEYS = [peer.public for peer in PEERS]
BLOB = bytes(range(256)) * 4_000  # 16 chunks
DIGEST = digest(BLOB)
UPLINK = 20.0  # Mbit/s

Spoil = Callable[[list[MemoryNetwork]], None]


async def last_comes(
    *,
    uplink: float = UPLINK / 10,
    receivers: Iterable[int] = range(1, 13),
    named: Iterable[int] = (0,),
    spoil: Spoil = lambda networks: None,
) -> float:
    """Return the seconds until the last receiver has the blob of the first peer, whose uplink has the rate `uplink`."""
    async with open_world(MemoryWorld) as world:
        assert isinstance(world, MemoryWorld)
        world.mesh = Mesh(seed=1)
        networks = []
        for number, peer in enumerate(PEERS):
            world.mesh.set_profile(peer.public, steady_profile("", UPLINK if number else uplink, 100.0, 30.0))
            network = await world.start(peer, MemoryBlobs(*() if number else (BLOB,)))
            assert isinstance(network, MemoryNetwork)
            networks.append(network)
        await linked(*networks)
        spoil(networks)
        start = trio.current_time()
        async with trio.open_nursery() as nursery:
            for number in receivers:
                nursery.start_soon(networks[number].fetch_blob, DIGEST, len(BLOB), [KEYS[source] for source in named])
        return trio.current_time() - start


def copies(count: int) -> float:
    """Return the seconds in which the first peer's uplink carries `count` copies of the blob."""
    return count * len(BLOB) * 8 / (UPLINK / 10 * 1e6)


async def test_the_last_of_twelve_has_it_in_half_the_time_or_less(autojump_clock: MockClock) -> None:
    assert await last_comes() <= copies(12) / 2


async def test_a_fast_uplink_serves_all_at_once_when_that_is_known(autojump_clock: MockClock) -> None:
    assert await last_comes(uplink=100 * UPLINK) < 1.0


async def test_who_asks_again_and_again_and_takes_nothing_has_no_more_queued_than_memory_for_links(
    autojump_clock: MockClock,
) -> None:
    budget, chunk = 1 << 20, GetBlob(DIGEST, 0)
    async with open_world(MemoryWorld) as world:
        assert isinstance(world, MemoryWorld)
        world.mesh = Mesh(seed=1, conditions=LinkConditions(bytes_per_second=1_000.0))
        networks = [world.make(peer, MemoryBlobs(*() if number else (BLOB,))) for number, peer in enumerate(PEERS[:5])]
        holder = networks[0]
        assert isinstance(holder, MemoryNetwork)
        holder.memory_quota = MemoryQuota(members=budget)
        for network in networks:
            await world.serve(network)
        await linked(*networks)
        most, link = 0, holder._links
        for _ in range(20):
            for asker in networks[1:]:
                if asker.me in link:
                    await holder.deliver_message(link[asker.me], Message(Channel.LINK, Priority.CONTROL, encode(chunk)))
                    most = max(most, holder.memory_quota.held)
        assert budget // 2 < most <= budget
        assert all(peer in link for peer in KEYS[1:5]), "and all of them are served"


async def test_what_was_shown_is_counted_for_members_alone(autojump_clock: MockClock) -> None:
    """Strangers have any number of keys, and each count would stay."""
    async with open_world(MemoryWorld) as world:
        networks = [world.make(peer, MemoryBlobs(*() if number else (BLOB,))) for number, peer in enumerate(PEERS[:3])]
        for network in networks:
            await world.serve(network)
        await linked(*networks)
        holder = networks[0]
        answers = holder._exchange.server
        answers._blobs.reveals.add(DIGEST)
        answers._is_stranger = [KEYS[1]].__contains__
        for asker in networks[1:]:
            await holder.deliver_message(
                holder._links[asker.me], Message(Channel.LINK, Priority.CONTROL, encode(GetBlob(DIGEST, 0)))
            )
        assert (
            set(holder.audit_bytes_sent_by_peer()) == {KEYS[2]}
            and answers.audit_bytes_sent == 2 * holder.audit_bytes_sent_by_peer()[KEYS[2]]
        )


def test_what_waits_for_a_peer_that_goes_elsewhere_is_taken_back_but_for_what_has_begun() -> None:
    outbox = Outbox()
    for size in (3000, 5000, 7000):
        outbox.push(Channel.LINK, bytes([size // 1000]) * size, Priority.BULK)
    begun = outbox.next_frame(1000)
    outbox.withdraw_waiting(Priority.BULK, lambda data: data[0] in (3, 7))
    inbox, left = Inbox(), outbox.next_frame(60_000)
    assert [len(message.data) for message in (*inbox.receive_frame(begun), *inbox.receive_frame(left))] == [3000, 5000]
    assert not outbox and outbox.held == outbox.account.held == 0


def lie(network: MemoryNetwork, answer: Callable[[bytes], object]) -> None:
    """Answer each first request for the blob like this, and send nothing else."""

    def on_get_blob(peer: bytes, request: GetBlob) -> None:
        if request.offset == 0 and (said := answer(peer)) is not None:
            network._post(peer, said, Priority.CONTROL)

    network._exchange.server.on_get_blob = on_get_blob  # type: ignore[method-assign]


async def test_a_liar_that_names_peers_without_the_blob_costs_a_few_questions(autojump_clock: MockClock) -> None:
    """It is the named source. Its accomplices are silent, and nobody names the peer with the blob."""

    def spoil(networks: list[MemoryNetwork]) -> None:
        lie(networks[1], lambda peer: BlobElsewhere(DIGEST, True, tuple(KEYS[2:5])))
        for accomplice in networks[2:5]:
            lie(accomplice, lambda peer: None)

    seconds = await last_comes(uplink=UPLINK, receivers=[12], named=[1], spoil=spoil)
    assert seconds < 3 * FIRST_ANSWER_SECONDS + 12 * SEARCH_SECONDS + 1.0


async def test_turns_that_are_none_are_taken_once(autojump_clock: MockClock) -> None:
    """A liar sends "your turn" again and again, and then "elsewhere"."""
    asked = list[float]()

    def spoil(networks: list[MemoryNetwork]) -> None:
        def answer(peer: bytes) -> BlobElsewhere:
            asked.append(trio.current_time())
            for _ in range(5):
                networks[1]._post(peer, HasBlob(DIGEST), Priority.CONTROL)
            return BlobElsewhere(DIGEST, True, ())

        lie(networks[1], answer)
        networks[0]._exchange.server.on_get_blob = lambda peer, request: None  # type: ignore[method-assign]

    with trio.move_on_after(20):
        await last_comes(receivers=[12], named=[1], spoil=spoil)
    assert 2 <= len(asked) <= 2 + 20 / 2


async def test_receivers_that_take_and_keep_places_delay_others_once(autojump_clock: MockClock) -> None:
    """They never announce that they have it."""

    def spoil(networks: list[MemoryNetwork]) -> None:
        for liar in networks[1:4]:
            for number in range(2):  # and no more chunks: a window would be four
                liar._post(KEYS[0], GetBlob(DIGEST, number), Priority.CONTROL)

    assert await last_comes(receivers=range(4, 13), spoil=spoil) < copies(9)


# Slots, without a network ------------------------------------------------------------------------------------------------

SIZE = 1_000_000


def full(made: UploadQueue, now: float = 0.0) -> None:
    assert [made.request_slot(DIGEST, key, SIZE, now) for key in KEYS[:UPLOAD_SLOTS]] == [UploadDecision.SLOT] * UPLOAD_SLOTS


@pytest.fixture
def made() -> UploadQueue:
    return UploadQueue()


def test_the_fourth_waits_and_is_told_of_the_three(made: UploadQueue) -> None:
    full(made)
    assert made.request_slot(DIGEST, KEYS[3], SIZE, 0.0) is UploadDecision.ELSEWHERE
    assert set(made.other_holders(DIGEST, KEYS[3])) == set(KEYS[:3])
    assert made.request_slot(DIGEST, KEYS[3], SIZE, REPEAT_SECONDS / 2) is UploadDecision.NOTHING, "the rest of its window"
    assert made.request_slot(DIGEST, KEYS[0], SIZE, 0.0) is UploadDecision.CHUNK
    assert made.on_peer_has(DIGEST, KEYS[1], 1.0) == [KEYS[3]], "it is its turn"
    assert made.request_slot(DIGEST, KEYS[3], SIZE, 1.1) is UploadDecision.SLOT


def test_a_turn_that_is_not_taken_is_the_next_one_s_and_blames_nobody(made: UploadQueue) -> None:
    full(made)
    for key in KEYS[3:5]:
        made.request_slot(DIGEST, key, SIZE, 0.0)
    assert made.on_declined(DIGEST, KEYS[0], 1.0) == [KEYS[3]]
    assert made.next_expiry() == 1.0 + ANSWER_SECONDS
    assert made.expire_slots(1.0 + ANSWER_SECONDS) == [(KEYS[4], DIGEST)]
    assert made.request_slot(DIGEST, KEYS[3], SIZE, 3.0) is UploadDecision.ELSEWHERE


def test_who_keeps_a_place_loses_it_and_holds_up_nobody_afterwards(made: UploadQueue) -> None:
    for round in range(5):  # others have shown the rate of the uplink
        for key in KEYS[5:10]:
            made.request_slot(bytes([round]) * 32, key, SIZE, 0.0)
            made.on_peer_has(bytes([round]) * 32, key, 0.05)
    size = 1000 * SIZE
    for key in KEYS[:3]:
        made.request_slot(DIGEST, key, size, 0.0)
    waits = KEYS[3]
    assert made.request_slot(DIGEST, waits, size, 0.0) is UploadDecision.ELSEWHERE
    assert made.next_expiry() < SLOW_SECONDS + 0.1, "they have asked for little"
    assert (waits, DIGEST) in made.expire_slots(made.next_expiry())
    places = dict(made._blobs[DIGEST].places)
    assert made.request_slot(DIGEST, KEYS[0], SIZE, 5.0) is UploadDecision.CHUNK and KEYS[0] not in places, "beside the places"


def test_nobody_is_named_that_never_asked_here(made: UploadQueue) -> None:
    full(made)
    made.on_peer_has(DIGEST, KEYS[9], 0.0)
    assert KEYS[9] not in [*made.other_holders(DIGEST, KEYS[4]), *made.other_holders(DIGEST, KEYS[4])]


def test_what_is_remembered_is_bounded(made: UploadQueue) -> None:
    for number in range(2 * blob_server.BLOBS_MAX):
        made.request_slot(number.to_bytes(32, "big"), KEYS[0], SIZE, 0.0)
    assert len(made._blobs) == blob_server.BLOBS_MAX
    for number in range(2 * blob_server.WAITING_MAX):
        made.request_slot(DIGEST, number.to_bytes(32, "big"), SIZE, 0.0)
    assert len(made._blobs[DIGEST].waiting) == blob_server.WAITING_MAX
    for number in range(UPLOAD_SLOTS, UPLOAD_SLOTS + 2 * blob_server.KNOWN_MAX):
        made.on_peer_has(DIGEST, number.to_bytes(32, "big"), 0.0)
    assert len(made._blobs[DIGEST].known) <= blob_server.KNOWN_MAX
    assert STALL_SECONDS > SLOW_SECONDS


def fill(made: UploadQueue, waiting: bytes) -> None:
    """Give all slots to members, with one more member that waits."""
    for key in [*KEYS[4 : 4 + UPLOAD_SLOTS], waiting]:
        made.request_slot(DIGEST, key, 1 << 30, 0.0)


def asks(made: UploadQueue, peer: bytes, count: int, of: int = 0) -> None:
    for number in range(count):
        made.request_slot(of.to_bytes(1, "big") + number.to_bytes(31, "big"), peer, 1 << 30, 0.0)


def waits(made: UploadQueue, peer: bytes) -> bool:
    """Return whether the peer gets a slot when others give theirs back."""
    return any(peer in made.on_declined(DIGEST, key, 1.0) for key in KEYS[4 : 4 + UPLOAD_SLOTS])


def test_questions_of_strangers_push_out_none_of_members() -> None:
    strangers, waiting = KEYS[:2], KEYS[9]
    made = UploadQueue(strangers.__contains__)
    fill(made, waiting)
    for of, stranger in enumerate(strangers):
        asks(made, stranger, 2 * blob_server.BLOBS_MAX, of)
    assert waits(made, waiting)
    assert len(made._blobs) == 1 + blob_server.BLOBS_OF_STRANGERS_MAX


def test_questions_of_strangers_decide_not_what_is_forgotten_of_a_member() -> None:
    made = UploadQueue([KEYS[0]].__contains__)
    asks(made, KEYS[1], blob_server.BLOBS_MAX)
    first = next(iter(made._blobs))
    asks(made, KEYS[0], 1)
    asks(made, KEYS[1], 1, of=1)
    assert first not in made._blobs and len(made._blobs) == blob_server.BLOBS_MAX


def test_of_members_the_one_that_asked_for_most_is_forgotten_first() -> None:
    made, waiting = UploadQueue(), KEYS[9]
    fill(made, waiting)
    asks(made, KEYS[0], 2 * blob_server.BLOBS_MAX)
    assert waits(made, waiting)
    assert len(made._blobs) == blob_server.BLOBS_MAX


def test_what_a_stranger_asked_for_first_is_a_member_s_once_that_asks() -> None:
    made = UploadQueue([KEYS[0]].__contains__)
    made.request_slot(DIGEST, KEYS[0], 1 << 30, 0.0)
    fill(made, KEYS[9])
    asks(made, KEYS[0], 2 * blob_server.BLOBS_OF_STRANGERS_MAX)
    assert waits(made, KEYS[9])


def test_places_of_strangers_lengthen_no_member_s() -> None:
    ends = list[float]()
    for blobs in (0, blob_server.BLOBS_OF_STRANGERS_MAX):
        made = UploadQueue([KEYS[0]].__contains__)
        asks(made, KEYS[0], blobs)
        made.request_slot(DIGEST, KEYS[4], 1 << 30, 0.0)
        ends.append(made._expiry(made._blobs[DIGEST].places[KEYS[4]]))
    assert ends[0] == ends[1]


def test_places_of_members_lengthen_a_stranger_s() -> None:
    made = UploadQueue([KEYS[0]].__contains__)
    for key in (KEYS[0], *KEYS[4 : 4 + UPLOAD_SLOTS]):
        made.request_slot(DIGEST, key, 1 << 30, 0.0)
    assert [made._blobs[DIGEST].places[key].shared for key in (KEYS[0], KEYS[4])] == [UPLOAD_SLOTS + 1, UPLOAD_SLOTS]


def test_strangers_have_a_place_of_their_own_and_take_none_of_others() -> None:
    strangers, members = KEYS[:4], KEYS[4:9]
    made = UploadQueue(strangers.__contains__)
    took = [made.request_slot(DIGEST, peer, 1 << 30, 0.0) for peer in [*strangers, *members]]
    places = [peer for peer, answer in zip([*strangers, *members], took, strict=True) if answer is UploadDecision.SLOT]
    assert places == [strangers[0], *members[:UPLOAD_SLOTS]]
    assert made.on_peer_has(DIGEST, members[0], 1.0) == [members[UPLOAD_SLOTS]], "a stranger has waited for longer"
    assert made.on_peer_has(DIGEST, strangers[0], 1.0) == [strangers[1]]
    rate = made._rate
    assert made.request_slot(DIGEST, strangers[1], 1 << 30, 1.1) is UploadDecision.SLOT
    made.on_peer_has(DIGEST, strangers[1], 1.2)
    assert made._rate == rate, "a stranger tells nothing of this uplink"


# Lanes ----------------------------------------------------------------------------------------------------------------


STEP_SECONDS = 0.25


def noticed(*dropped: Priority, listens: bool = True, seconds: float = 60.0) -> float | None:
    """Return the seconds until the failure of these lanes is detected. A ping is sent each second, and the other lanes work."""
    lanes, sent, arrived = RelayWatchdog(0.0), [0, 0, 0], [0, 0, 0]
    for step in range(int(seconds / STEP_SECONDS)):
        now = step * STEP_SECONDS
        if now % 1.0 == 0:
            sent = [sent[lane] + 100 for lane in Priority]
            arrived = [arrived[lane] if lane in dropped else sent[lane] for lane in Priority]
            lanes.on_arrived((arrived[0], arrived[1], arrived[2]), now)
        if lanes.is_withholding((sent[0], sent[1], sent[2]), now, listens=listens):
            return now
    return None


def test_nothing_is_held_back_where_all_arrives() -> None:
    assert noticed() is None


@pytest.mark.parametrize("lane", Priority)
def test_whoever_holds_back_one_lane_is_found_out(lane: Priority) -> None:
    assert noticed(lane) == (SILENT_SECONDS if lane is Priority.VOTE else WITHHELD_SECONDS)


def test_a_peer_that_does_not_read_knows_nothing() -> None:
    assert noticed(*Priority, listens=False) is None


def test_a_slow_lane_is_none_that_is_held_back_and_an_idle_one_neither() -> None:
    lanes = RelayWatchdog(0.0)
    for second in range(600):  # a megabyte in flight, of which a record arrives now and then
        lanes.on_arrived((second, 0, second // int(WITHHELD_SECONDS - 1) << 14), float(second))
        assert not lanes.is_withholding(
            (second + 100, 0, 1 << 20 if second < 300 else 300 // 7 << 14), float(second), listens=True
        )
