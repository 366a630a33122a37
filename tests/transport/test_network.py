"""One suite for both networks: the daemon's assumptions must hold over TCP and in memory alike."""

from __future__ import annotations

import random
from typing import Any

import pytest
import trio

from protocol.errors import RemoteProtocolError, StorageError
from protocol.limits import BLOB_CHUNK_BYTES
from tests.transport.conftest import World
from tests.transport.helpers import (
    ALICE,
    BOB,
    CAROL,
    DAVE,
    DEADLINE_SECONDS,
    LyingBlobs,
    MemoryBlobs,
    digest,
    linked,
    next_event,
    until,
)
from transport.blobs import blob_exchange
from transport.connections import connection_manager
from transport.connections.connection_manager import ConnectionManager
from transport.network import DataReceived, PeerConnected, PeerDisconnected, Priority
from transport.swarm import Swarm
from transport.wire.framing import Channel


def blob_of(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


async def test_peers_connect_and_talk(world: World) -> None:
    alice, bob = await world.start(ALICE), await world.start(BOB)
    assert await alice.events.receive() == PeerConnected(bob.me)
    assert await bob.events.receive() == PeerConnected(alice.me)
    assert alice.connected_peers() == {bob.me}
    for n, priority in enumerate(Priority):
        assert alice.send(bob.me, b"%d" % n, priority)
        assert await bob.events.receive() == DataReceived(alice.me, b"%d" % n)
    assert bob.send(alice.me, b"back")
    assert await alice.events.receive() == DataReceived(bob.me, b"back")
    assert not alice.refusal_counts()


async def test_a_broadcast_reaches_everybody(world: World) -> None:
    networks = [await world.start(identity) for identity in (ALICE, BOB, CAROL, DAVE)]
    await linked(*networks)
    assert networks[0].broadcast(b"to all", Priority.VOTE) == 3
    for network in networks[1:]:
        assert await next_event(network, DataReceived) == DataReceived(networks[0].me, b"to all")


async def test_sending_to_a_stranger_is_refused(world: World) -> None:
    alice = await world.start(ALICE)
    assert not alice.send(BOB.public, b"x")
    assert alice.broadcast(b"x") == 0


async def test_one_senders_messages_stay_in_order(world: World) -> None:
    alice, bob = await world.pair()
    sent = [b"%d" % n * (1 + n * 37) for n in range(200)]
    for data in sent:
        assert alice.send(bob.me, data)
    assert [(await next_event(bob, DataReceived)).data for _ in sent] == sent


async def test_a_peer_that_dies_is_noticed_and_found_again(world: World) -> None:
    bob, alice = await world.start(BOB), await world.start(ALICE)  # Alice knows the other address
    await linked(alice, bob)
    listen = {"listen": bob.address} if isinstance(bob, Swarm) else {}
    world.stop(bob)
    assert await next_event(alice, PeerDisconnected) == PeerDisconnected(bob.me)
    assert not alice.send(bob.me, b"nobody there")
    again = await world.start(BOB, **listen, **({"bootstrap": []} if listen else {}))
    assert await next_event(alice, PeerConnected) == PeerConnected(bob.me)
    assert await next_event(again, PeerConnected) == PeerConnected(alice.me)
    assert alice.send(bob.me, b"welcome back")
    assert await next_event(again, DataReceived) == DataReceived(alice.me, b"welcome back")


async def test_events_of_a_peer_are_in_order_when_the_network_ends(world: World) -> None:
    alice, bob = await world.pair()
    world.stop(alice)
    assert await alice.events.receive() == PeerConnected(bob.me)
    assert await alice.events.receive() == PeerDisconnected(bob.me)
    assert not alice.connected_peers()


async def test_a_dropped_peer_is_counted_kept_out_for_a_while_and_then_let_in(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_manager, "BAN_SECONDS", 0.5)
    alice, bob = await world.pair()
    start = trio.current_time()
    alice.ban_peer(bob.me, RemoteProtocolError("bad-manners", "ate with his fingers"))
    assert bob.me not in alice.connected_peers()
    assert alice.refusal_counts()["bad-manners"] == 1
    assert await next_event(alice, PeerDisconnected) == PeerDisconnected(bob.me)
    assert await next_event(bob, PeerDisconnected) == PeerDisconnected(alice.me)
    await next_event(alice, PeerConnected)
    assert trio.current_time() - start >= 0.5


def test_bans_grow_and_are_forgotten() -> None:
    bans = connection_manager.BanList()
    lengths, now = [], 0.0
    for _ in range(12):
        bans.add(b"x", now)
        lengths.append(bans.banned_until(b"x") - now)
        now = bans.banned_until(b"x")
    assert lengths[:3] == [connection_manager.BAN_SECONDS, 2 * connection_manager.BAN_SECONDS, 4 * connection_manager.BAN_SECONDS]
    assert lengths[-1] == connection_manager.BAN_SECONDS_MAX
    bans.add(b"x", now + connection_manager.BAN_MEMORY_SECONDS + 1)
    assert bans.banned_until(b"x") == now + connection_manager.BAN_MEMORY_SECONDS + 1 + connection_manager.BAN_SECONDS
    for n in range(connection_manager.BANS_MAX):
        bans.add(b"%d" % n, now)
    assert bans.banned_until(b"x") < 0, "bounded"


async def test_a_key_that_is_banned_does_not_stay(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_manager, "BAN_SECONDS", 1000.0)
    alice = await world.start(ALICE)
    alice.ban_peer(BOB.public, RemoteProtocolError("flood"))
    bob, carol = await world.start(BOB), await world.start(CAROL)
    await until(lambda: alice.refusal_counts().get("banned"))
    await linked(alice, carol)
    await linked(bob, carol)
    assert bob.me not in alice.connected_peers()
    assert alice.me not in bob.connected_peers()


async def test_a_bad_message_of_transports_own_costs_the_connection(world: World) -> None:
    alice, bob = await world.pair()
    alice._push(bob.me, Channel.LINK, b"\x91\xa5bogus", Priority.CONTROL)
    assert await next_event(bob, PeerDisconnected) == PeerDisconnected(alice.me)
    assert bob.refusal_counts()["unknown-message"] == 1


async def test_links_and_traffic_tell_what_happened(world: World) -> None:
    alice, bob = await world.pair()
    before = alice.traffic(), bob.traffic()
    alice.send(bob.me, bytes(1000), Priority.BULK)
    await next_event(bob, DataReceived)
    await until(lambda: all(network.links()[0].meter.round_trip_seconds is not None for network in (alice, bob)))
    assert alice.traffic().sent[Priority.BULK] - before[0].sent[Priority.BULK] == 1000
    assert bob.traffic().received[Priority.BULK] - before[1].received[Priority.BULK] == 1000
    (link,) = alice.links()
    assert link.peer == bob.me
    assert link.dialed != bob.links()[0].dialed
    assert 0 < link.meter.round_trip_seconds < DEADLINE_SECONDS
    total = alice.traffic().sent
    world.stop(bob)
    await next_event(alice, PeerDisconnected)
    assert alice.traffic().sent >= total, "what closed links carried is not forgotten"


async def test_a_peer_that_does_not_listen_loses_the_connection_rather_than_a_vote(world: World) -> None:
    alice, bob = await world.pair()
    vote = bytes(1 << 20)
    count = 0
    while alice.send(bob.me, vote, Priority.VOTE):  # nobody takes Bob's events
        count += 1
        assert count < 80, "what is in flight is bounded"
        with trio.move_on_after(0.05):  # the time that it may take to leave; it does not leave at the end
            await until(lambda: alice.traffic().sent[Priority.VOTE] > count << 20)  # noqa: B023
    assert await next_event(alice, PeerDisconnected) == PeerDisconnected(bob.me)
    assert alice.refusal_counts()["vote-queue-full"] == 1


async def test_a_full_queue_of_less_urgent_messages_is_counted_and_keeps_the_connection(world: World) -> None:
    alice, bob = await world.pair()
    while alice.send(bob.me, bytes(4 << 20), Priority.BULK):
        pass
    assert alice.refusal_counts() == {"queue-full": 1}
    assert bob.me in alice.connected_peers()


# Payload exchange -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, BLOB_CHUNK_BYTES, BLOB_CHUNK_BYTES + 1, 5_000_000])
async def test_a_blob_is_fetched_from_its_holder(world: World, size: int) -> None:
    blob = blob_of(size)
    alice = await world.start(ALICE, MemoryBlobs(blob))
    bob = await world.start(BOB, wanted := MemoryBlobs())
    await bob.fetch_blob(digest(blob), size)
    assert wanted.blobs[digest(blob)] == blob
    assert alice.traffic().blobs_sent == bob.traffic().blobs_received == size
    await bob.fetch_blob(digest(blob), size)  # is held now
    assert bob.traffic().blobs_received == size


async def test_what_serves_audits_alone_is_counted_apart_at_both_ends(world: World) -> None:
    payload, state = blob_of(1_000), blob_of(70_000)
    served, wanted = MemoryBlobs(payload, state), MemoryBlobs()
    served.reveals = wanted.reveals = {digest(state)}
    alice, bob = await world.pair(served, wanted)
    for blob in (payload, state):
        await bob.fetch_blob(digest(blob), len(blob), sources=[alice.me])
    assert alice.traffic().audit_bytes_sent == bob.traffic().audit_bytes_received == 70_000
    assert alice.traffic().blobs_sent == bob.traffic().blobs_received == 71_000
    assert alice.traffic().audit_bytes_received == bob.traffic().audit_bytes_sent == 0


async def test_a_vote_overtakes_a_large_blob(world: World) -> None:
    blob, store = blob_of(16_000_000), MemoryBlobs()
    alice, bob = await world.pair(MemoryBlobs(blob), store)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bob.fetch_blob, digest(blob), len(blob))
        await until(lambda: bob.traffic().blobs_received > 1_000_000)
        alice.send(bob.me, b"vote", Priority.VOTE)
        assert await next_event(bob, DataReceived) == DataReceived(alice.me, b"vote")
        assert bob.traffic().blobs_received < 12_000_000
        assert digest(blob) not in store.blobs
    assert store.blobs[digest(blob)] == blob


async def test_concurrent_fetches_of_one_blob_share_a_transfer(world: World) -> None:
    blob, store = blob_of(3_000_000), MemoryBlobs()
    _, bob = await world.pair(MemoryBlobs(blob), store)
    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(bob.fetch_blob, digest(blob), len(blob))
    assert bob.traffic().blobs_received == len(blob)


async def test_many_blobs_at_once(world: World) -> None:
    blobs, store = [blob_of(200_000, seed) for seed in range(40)], MemoryBlobs()
    alice, bob = await world.pair(MemoryBlobs(*blobs), store)
    async with trio.open_nursery() as nursery:
        for blob in blobs:
            nursery.start_soon(bob.fetch_blob, digest(blob), len(blob))
    assert set(store.blobs) == {digest(blob) for blob in blobs}
    assert not alice.refusal_counts()


async def between(
    world: World, alices: MemoryBlobs, carols: MemoryBlobs, bobs: MemoryBlobs
) -> tuple[ConnectionManager, ConnectionManager]:
    """Return Alice and Bob, who is linked with Carol too."""
    alice, _ = await world.start(ALICE, alices), await world.start(CAROL, carols)
    bob = await world.start(BOB, bobs)
    await until(lambda: len(bob.connected_peers()) == 2)
    return alice, bob


async def test_a_holder_whose_bytes_are_wrong_is_dropped_and_another_one_asked(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    # otherwise the other one would be asked before the liar has answered
    monkeypatch.setattr(blob_exchange, "FIRST_ANSWER_SECONDS", 1_000.0)
    blob, store = blob_of(1_000_000), MemoryBlobs()
    lie = bytes(500_000) + blob[500_000:]
    _, bob = await between(world, LyingBlobs(digest(blob), lie), MemoryBlobs(blob), store)
    await bob.fetch_blob(digest(blob), len(blob), sources=[ALICE.public])
    assert store.blobs[digest(blob)] == blob
    assert bob.refusal_counts()["bad-blob"] == 1
    assert bob.connected_peers() == {CAROL.public}


class Stalling(LyingBlobs):
    """A store that serves nothing behind `end` while it `is_silent`."""

    def __init__(self, digest: bytes, content: bytes, end: int) -> None:
        super().__init__(digest, content)
        self.end, self.stuck_at = end, -1

    def is_silent(self) -> bool:
        return True

    def read_piece(self, digest: bytes, offset: int, length: int) -> bytes:
        if offset <= self.end or not self.is_silent():
            return super().read_piece(digest, offset, length)
        self.stuck_at = offset if self.stuck_at < 0 else min(offset, self.stuck_at)
        return b""


async def give_up(asker: Any, holders: dict[bytes, Stalling]) -> None:
    """Give up these holders at once while they are silent, and no others. By the clock a busy machine would be silent, too."""
    while True:
        for transfer in asker._exchange._transfers.values():
            if transfer.pull is not None and transfer.holder in holders and transfer.offset == holders[transfer.holder].stuck_at:
                holders[transfer.holder].stuck_at = -1
                transfer.pull.cancel()
        await trio.sleep(0.001)


async def test_of_two_contributors_nobody_is_blamed_for_the_sum(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A liar serves the first part and falls silent, and an honest holder serves the rest. The hash is wrong, and either may be
    the cause."""
    monkeypatch.setattr(blob_exchange, "STALL_SECONDS", 1_000.0)
    monkeypatch.setattr(blob_exchange, "FIRST_ANSWER_SECONDS", 1_000.0)
    blob, store = blob_of(3_000_000), MemoryBlobs()
    liar = Stalling(digest(blob), bytes(len(blob)), 1_000_000)
    _, bob = await between(world, liar, MemoryBlobs(blob), store)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(give_up, bob, {ALICE.public: liar})
        await bob.fetch_blob(digest(blob), len(blob), sources=[ALICE.public])
        nursery.cancel_scope.cancel()
    assert store.blobs[digest(blob)] == blob
    assert store.finished == 2, "the mixture, the truth"
    assert not bob.refusal_counts()


async def test_after_a_wrong_sum_holders_are_not_mixed_and_the_liar_is_found(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above, and then the honest holder stalls in the middle too: the liar must start over, and is convicted."""
    monkeypatch.setattr(blob_exchange, "STALL_SECONDS", 1_000.0)
    monkeypatch.setattr(blob_exchange, "FIRST_ANSWER_SECONDS", 1_000.0)
    blob, store = blob_of(3_000_000), MemoryBlobs()
    starts: list[str] = []  # the holders that were asked for the first byte

    class Starting(Stalling):
        def __init__(self, name: str, content: bytes, starts_until_well: int) -> None:
            super().__init__(digest(blob), content, 1_500_000)
            self.name, self.starts_until_well = name, starts_until_well

        def is_silent(self) -> bool:
            return len(starts) == self.starts_until_well

        def read_piece(self, digest: bytes, offset: int, length: int) -> bytes:
            if offset == 0:
                starts.append(self.name)
            return super().read_piece(digest, offset, length)

    liar, honest = Starting("liar", bytes(len(blob)), 1), Starting("honest", blob, 2)
    _, bob = await between(world, liar, honest, store)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(give_up, bob, {ALICE.public: liar, CAROL.public: honest})
        await bob.fetch_blob(digest(blob), len(blob), sources=[ALICE.public])
        nursery.cancel_scope.cancel()
    assert starts == ["liar", "honest", "liar", "honest"]
    assert store.finished == 3, "the mixture, the lie, the truth"
    assert store.blobs[digest(blob)] == blob
    assert bob.refusal_counts()["bad-blob"] == 1
    assert bob.connected_peers() == {CAROL.public}


async def test_a_transfer_goes_on_with_another_holder_where_it_stands(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blob_exchange, "STALL_SECONDS", 1000.0)  # the end of the link is detected, without the deadline
    blob, store = blob_of(16_000_000), MemoryBlobs()
    alice, bob = await between(world, MemoryBlobs(blob), MemoryBlobs(blob), store)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bob.fetch_blob, digest(blob), len(blob), [ALICE.public])
        await until(lambda: bob.traffic().blobs_received > 5_000_000)
        world.stop(alice)
    assert store.blobs[digest(blob)] == blob
    assert bob.traffic().blobs_received < 16_000_000 + 5_000_000, "nothing that was received is asked for again"


async def test_a_holder_without_the_blob_is_asked_again(world: World) -> None:
    blob, late = blob_of(100_000), MemoryBlobs()
    _, bob = await world.pair(late)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bob.fetch_blob, digest(blob), len(blob))
        await until(lambda: bob.traffic().received[Priority.CONTROL] > 40)
        late.blobs[digest(blob)] = blob


async def test_a_blob_that_nobody_has_holds_up_no_other(nursery: trio.Nursery, world: World) -> None:
    blob, store = blob_of(100_000), MemoryBlobs()
    _, bob = await world.pair(MemoryBlobs(blob), store)
    for n in range(2 * blob_exchange.TRANSFERS_MAX):
        nursery.start_soon(bob.fetch_blob, digest(b"nobody's %d" % n), 10)
    await bob.fetch_blob(digest(blob), len(blob))


async def test_a_blob_larger_than_asked_for_is_not_taken_and_nobody_is_blamed(world: World) -> None:
    blob, store = blob_of(100_000), MemoryBlobs()
    _, bob = await world.pair(MemoryBlobs(blob), store)
    with trio.move_on_after(0.3):
        await bob.fetch_blob(digest(blob), len(blob) - 1)
    assert not store.blobs
    assert not bob.refusal_counts()
    await bob.fetch_blob(digest(blob), len(blob))


async def test_a_cancelled_fetch_leaves_nothing_behind_and_can_be_repeated(world: World) -> None:
    blob, store = blob_of(16_000_000), MemoryBlobs()
    alice, bob = await world.pair(MemoryBlobs(blob), store)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bob.fetch_blob, digest(blob), len(blob))
        await until(lambda: bob.traffic().blobs_received > 1_000_000)
        nursery.cancel_scope.cancel()
    await until(lambda: store.aborted == 1)
    assert not store.blobs
    await bob.fetch_blob(digest(blob), len(blob))
    assert store.blobs[digest(blob)] == blob
    assert bob.connected_peers() == {alice.me}


async def test_one_cancelled_waiter_does_not_cancel_the_others(world: World) -> None:
    blob, store = blob_of(16_000_000), MemoryBlobs()
    _, bob = await world.pair(MemoryBlobs(blob), store)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bob.fetch_blob, digest(blob), len(blob))
        async with trio.open_nursery() as impatient:
            impatient.start_soon(bob.fetch_blob, digest(blob), len(blob))
            await until(lambda: bob.traffic().blobs_received > 1_000_000)
            impatient.cancel_scope.cancel()
    assert bob.traffic().blobs_received == len(blob)


@pytest.mark.real("processes")
async def test_a_holder_that_cannot_read_its_store_says_that_it_has_nothing(world: World) -> None:
    class BadDisk(MemoryBlobs):
        def read_piece(self, digest: bytes, offset: int, length: int) -> bytes:
            raise OSError("input/output error")

    blob, store = blob_of(100_000), MemoryBlobs()
    alice, carol = await world.start(ALICE, BadDisk(blob)), await world.start(CAROL, MemoryBlobs(blob))
    bob = await world.start(BOB, store)
    await linked(alice, bob, carol)
    await bob.fetch_blob(digest(blob), len(blob), sources=[alice.me])
    assert bob.connected_peers() == {alice.me, carol.me}


async def test_a_store_that_fails_is_reported_to_whoever_fetches(world: World) -> None:
    class FullDisk(MemoryBlobs):
        def open_writer(self, digest: bytes, total: int, of: bytes | None = None) -> None:  # type: ignore[override]
            raise StorageError("no space left")

    blob = blob_of(100_000)
    alice, bob = await world.pair(MemoryBlobs(blob), FullDisk())
    with pytest.raises(StorageError):
        await bob.fetch_blob(digest(blob), len(blob))
    assert bob.connected_peers() == {alice.me}
