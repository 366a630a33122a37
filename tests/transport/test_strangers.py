"""Limits of the memory and the slots that strangers take, over real sockets. Members lose nothing to them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import trio
import trio.testing

from protocol.codec import decode_message
from protocol.errors import RemoteProtocolError
from protocol.identity import Identity, Signed
from protocol.limits import MESSAGE_BYTES_MAX
from protocol.messages import GuestInvitation, LinkClosing
from tests.transport.conftest import SwarmWorld
from tests.transport.helpers import ALICE, BOB, CAROL, DAVE, linked, make_session, next_event, until
from transport.connections import connection_manager
from transport.connections.peer_link import LinkClosedByPeer, choose_link_to_evict
from transport.network import DataReceived, PeerDisconnected
from transport.peer_policy import PeerClass
from transport.quotas import accept_limiter, cpu_quota
from transport.quotas.accept_limiter import (
    CONNECTION_SECONDS,
    CONNECTIONS_SHARE,
    HOST_CONNECTIONS_SHARE,
    RESERVED_SECONDS,
    AcceptLimiter,
)
from transport.quotas.memory_quota import MemoryQuota
from transport.swarm import READ_BYTES, Swarm
from transport.wire.framing import Channel, Inbox, Message, Outbox, Priority
from transport.wire.noise_session import NoiseSession

KIB = 1 << 10


def standing(**of: PeerClass) -> Callable[[bytes], PeerClass]:
    keys = {identity.public: name for name, identity in {"alice": ALICE, "bob": BOB, "carol": CAROL, "dave": DAVE}.items()}
    return lambda peer: of.get(keys.get(peer, ""), PeerClass.STRANGER)


async def connected(tcp: SwarmWorld, network: Swarm, identity: Identity = BOB) -> tuple[trio.SocketStream, NoiseSession]:
    """Open a stranger's raw link, which reads and sends nothing more by itself."""
    stream, session = await tcp.confirm(network, identity)
    await until(lambda: identity.public in network.connected_peers())
    return stream, session


@pytest.mark.real("sockets")
async def test_strangers_that_take_nothing_hold_no_more_than_their_budget_and_members_have_their_own(tcp: SwarmWorld) -> None:
    alice = await tcp.start(ALICE, standing_of=standing(dave=PeerClass.MEMBER))
    alice.memory_quota = MemoryQuota(members=1024 * KIB, strangers=256 * KIB)
    for identity in (BOB, CAROL):
        await connected(tcp, alice, identity)
    await connected(tcp, alice, DAVE)
    message = bytes(16 * KIB)
    for _ in range(300):  # far more than sockets and budget hold together
        alice.send(BOB.public, message, Priority.BULK)
        alice.send(CAROL.public, message, Priority.CONTROL)
        await trio.lowlevel.checkpoint()
        assert alice.memory_quota.held <= 256 * KIB
    assert alice.refusal_counts()["queue-full"] > 0
    assert all(alice.send(DAVE.public, message, Priority.BULK) for _ in range(32))


@pytest.mark.real("sockets")
async def test_of_strangers_the_one_that_holds_most_gives_way_and_not_the_one_with_little(tcp: SwarmWorld) -> None:
    alice = await tcp.start(ALICE, standing_of=standing())
    alice.memory_quota = MemoryQuota(members=1024 * KIB, strangers=256 * KIB)
    for identity in (BOB, CAROL):
        await connected(tcp, alice, identity)
    while alice.send(BOB.public, bytes(16 * KIB), Priority.BULK):
        pass
    for _ in range(7):
        assert alice.send(CAROL.public, bytes(16 * KIB), Priority.BULK)
    assert alice.connected_peers() == {CAROL.public}
    assert alice.refusal_counts() == {"queue-full": 1, "memory-full": 1}


@pytest.mark.real("sockets")
async def test_messages_that_come_in_part_are_counted_and_cost_the_stranger_its_link(tcp: SwarmWorld) -> None:
    alice = await tcp.start(ALICE, standing_of=standing())
    alice.memory_quota = MemoryQuota(members=1024 * KIB, strangers=256 * KIB)
    stream, session = await connected(tcp, alice)
    session.outbox.push(Channel.APPLICATION, bytes(512 * KIB), Priority.BULK)
    with contextlib.suppress(trio.BrokenResourceError):
        while sum(session.outbox.sent) < 448 * KIB:  # the end is never sent
            await stream.send_all(session.data_to_send())
            assert alice.memory_quota.held <= 256 * KIB + READ_BYTES
    await next_event(alice, PeerDisconnected)
    assert alice.refusal_counts() == {"memory-full": 1}
    assert alice.memory_quota.held == 0


@pytest.mark.real("sockets")
async def test_what_a_stranger_said_and_nobody_has_taken_goes_with_its_link(tcp: SwarmWorld) -> None:
    """Otherwise one key after the other would fill the memory."""
    alice = await tcp.start(ALICE, standing_of=standing(dave=PeerClass.MEMBER))
    for identity in (BOB, DAVE):
        stream, session = await connected(tcp, alice, identity)
        session.outbox.push(Channel.APPLICATION, bytes(100 * KIB), Priority.CONTROL)
        while data := session.data_to_send():
            await stream.send_all(data)
        await until(lambda: alice.memory_quota.held > 100 * KIB)
        await stream.aclose()
        await until(lambda key=identity.public: key not in alice.connected_peers())
        assert (alice.memory_quota.held > 100 * KIB) == (identity is DAVE)
    assert await next_event(alice, DataReceived) == DataReceived(DAVE.public, bytes(100 * KIB))
    assert alice.memory_quota.held == 0


@pytest.mark.real("sockets")
async def test_a_voter_gets_in_where_strangers_and_members_fill_all_links(
    tcp: SwarmWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_manager, "LINKS_MAX", 2)
    alice = await tcp.start(ALICE, standing_of=standing(carol=PeerClass.MEMBER, dave=PeerClass.VOTER))
    await connected(tcp, alice, BOB)
    await connected(tcp, alice, CAROL)
    await tcp.start(DAVE, bootstrap=[alice.address])
    await until(lambda: DAVE.public in alice.connected_peers())
    assert alice.connected_peers() == {CAROL.public, DAVE.public}, "the stranger gives way first"
    assert alice.refusal_counts() == {"gave-way": 1}


@pytest.mark.real("sockets")
async def test_a_stranger_takes_no_link_of_a_member(tcp: SwarmWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_manager, "LINKS_MAX", 1)
    alice = await tcp.start(ALICE, standing_of=standing(dave=PeerClass.MEMBER))
    await connected(tcp, alice, DAVE)
    await tcp.start(BOB, bootstrap=[alice.address])
    await until(lambda: alice.refusal_counts().get("too-many-links"))
    assert alice.connected_peers() == {DAVE.public}


async def test_of_all_links_the_lowest_standing_gives_way() -> None:
    """This holds also if it is the newest link."""
    links: list[connection_manager.PeerLink] = []
    for standing in reversed(PeerClass):
        links.append(link := connection_manager.PeerLink(b"", "peer.example:1", True, Outbox(), Inbox()))
        link.peer_class = standing
        assert choose_link_to_evict(links) is link


@pytest.mark.real("sockets")
async def test_strangers_have_slots_of_their_own_and_the_oldest_of_the_fullest_host_gives_way(
    tcp: SwarmWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_manager, "STRANGERS_MAX", 2)
    alice = await tcp.start(ALICE, standing_of=standing())
    for identity in (BOB, CAROL, DAVE):
        await connected(tcp, alice, identity)
    assert alice.connected_peers() == {CAROL.public, DAVE.public}


@pytest.mark.real("sockets")
async def test_half_open_connections_are_bounded_the_oldest_gives_way(tcp: SwarmWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accept_limiter, "HALF_OPEN_PER_HOST_MAX", 3)
    alice = await tcp.start(ALICE, standing_of=standing())
    idle = [await tcp.connect(alice) for _ in range(3)]
    await until(lambda: len(alice._half_open._places) == 3)
    bob = await tcp.start(BOB)
    assert await idle[0].receive_some() == b""
    await until(lambda: alice.refusal_counts() == {"half-open": 1})
    await linked(alice, bob)
    assert len(alice._half_open._places) == 2


@pytest.mark.real("sockets")
async def test_a_handshake_that_is_not_confirmed_is_half_open(tcp: SwarmWorld) -> None:
    alice = await tcp.start(ALICE, standing_of=standing())
    stream, session = await tcp.connect(alice), make_session(BOB, True)
    await stream.send_all(session.data_to_send())
    while session.peer is None:
        session.receive(await stream.receive_some())
    await stream.send_all(session.data_to_send())
    await trio.testing.wait_all_tasks_blocked(0.05)
    assert len(alice._half_open._places) == 1


@pytest.mark.real("sockets")
async def test_whoever_says_nothing_takes_nobodys_turn_for_a_handshake(tcp: SwarmWorld) -> None:
    alice = await tcp.start(ALICE, standing_of=standing())
    alice.cpu_quota.host_account("127.0.0.1", False).spend(10.0)  # so that all wait, for minutes
    idle, speaking = await tcp.connect(alice), await tcp.connect(alice)
    await speaking.send_all(make_session(BOB, True).data_to_send())
    await until(lambda: len(alice._half_open._places) == 2 and alice.cpu_quota._handshakes._waiting)
    await trio.testing.wait_all_tasks_blocked(0.05)
    assert len(alice.cpu_quota._handshakes._waiting) == 1
    await idle.aclose()


@pytest.mark.real("sockets")
async def test_a_link_that_begins_with_a_large_message_of_a_stranger_is_none(tcp: SwarmWorld) -> None:
    """No budget contains the data that come before the link is in use."""
    alice = await tcp.start(ALICE, standing_of=standing(dave=PeerClass.MEMBER))
    for identity in (DAVE, BOB):
        stream, session = await tcp.connect(alice), make_session(identity, True)
        await stream.send_all(session.data_to_send())
        while session.peer is None:
            session.receive(await stream.receive_some())
        session.outbox.push(Channel.APPLICATION, bytes(512 * KIB), Priority.BULK)
        with contextlib.suppress(trio.BrokenResourceError):
            while data := session.data_to_send():
                await stream.send_all(data)
    await until(lambda: alice.refusal_counts() == {"oversized": 1})
    await until(lambda: alice.connected_peers() == {DAVE.public})


@pytest.mark.real("sockets")
async def test_a_message_without_an_end_costs_a_member_its_link(tcp: SwarmWorld) -> None:
    """A stranger is dropped earlier."""
    piece = b"\x08" + (60_000).to_bytes(2, "big") + bytes(60_000)  # to be continued
    alice = await tcp.start(ALICE, standing_of=standing(dave=PeerClass.MEMBER))
    stream, session = await connected(tcp, alice, DAVE)
    assert session._ciphers is not None
    with contextlib.suppress(trio.BrokenResourceError):
        for _ in range(MESSAGE_BYTES_MAX // 60_000 + 1):
            frame = session._ciphers[0].encrypt(piece)
            await stream.send_all(len(frame).to_bytes(2, "big") + frame)
    await until(lambda: alice.refusal_counts() == {"oversized": 1})
    await until(lambda: alice.connected_peers() == set())


@pytest.mark.real("sockets")
async def test_a_broadcast_is_not_for_strangers_but_for_whoever_is_one_no_more(tcp: SwarmWorld) -> None:
    admitted: set[bytes] = set()
    alice = await tcp.start(ALICE, standing_of=lambda peer: PeerClass.MEMBER if peer in admitted else PeerClass.STRANGER)
    await connected(tcp, alice, BOB)
    assert alice.broadcast(b"a vote", Priority.VOTE) == 0
    admitted.add(BOB.public)
    assert alice.broadcast(b"a vote", Priority.VOTE) == 1


async def test_hosts_of_members_are_spared_while_others_are_half_open(nursery: trio.Nursery) -> None:
    half_open, ended = accept_limiter.HalfOpenTable(), []

    async def hold(host: str, *, task_status: trio.TaskStatus[None]) -> None:
        try:
            with half_open.hold_slot(host, {"member"}):
                task_status.started()
                await trio.sleep_forever()
        except RemoteProtocolError as error:
            ended.append((host, error.reason))

    for number in range(accept_limiter.HALF_OPEN_MAX):
        await nursery.start(hold, "member" if number < accept_limiter.HALF_OPEN_PER_HOST_MAX else f"host {number % 16}")
    await nursery.start(hold, "newcomer")
    await trio.testing.wait_all_tasks_blocked()
    assert ended == [("host 0", "half-open")]


# Reasons of closed links ----------------------------------------------------------------------------------------------


@pytest.mark.real("sockets")
async def test_whoever_is_refused_reads_why_where_it_dials(tcp: SwarmWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_manager, "BAN_SECONDS", 1000.0)
    told: list[str] = []
    alice = await tcp.start(ALICE)
    alice.ban_peer(BOB.public, RemoteProtocolError("flood"))
    bob = await tcp.start(BOB, bootstrap=[alice.address], tell=told.append)
    await until(lambda: bob.unreached_addresses())
    refused = "it refuses this peer's key for some time, because this peer violated the protocol"
    assert bob.unreached_addresses()[0].reason == f"the peer closed the link: {refused}"
    assert not bob.connected_peers() and not bob.refusal_counts() and not bob.events._members, "there was no link"
    await until(lambda: told)
    assert refused in told[0]


@pytest.mark.real("sockets")
async def test_whoever_is_dropped_reads_why(tcp: SwarmWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_manager, "BAN_SECONDS", 1000.0)
    alice, bob = await tcp.pair()
    bob.send(alice.me, bytes(1000 * KIB), Priority.BULK)
    alice.ban_peer(bob.me, RemoteProtocolError("flood"))
    why = {
        "the peer closed the link: flood",
        "the peer closed the link: it refuses this peer's key for some time, because this peer violated the protocol",
    }
    await until(lambda: why & {dial.reason for dial in bob.unreached_addresses()})
    assert not bob.refusal_counts()


@pytest.mark.real("sockets")
async def test_a_stranger_reads_that_it_gave_way(tcp: SwarmWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_manager, "LINKS_MAX", 1)
    alice = await tcp.start(ALICE, standing_of=standing(dave=PeerClass.VOTER))
    stream, session = await connected(tcp, alice)
    await tcp.start(DAVE, bootstrap=[alice.address])
    last = None
    async for data in stream:
        for event in session.receive(bytes(data)):
            assert isinstance(event, Message)
            last = event
    assert last is not None
    assert decode_message(last.data, (LinkClosing,)) == LinkClosing("gave-way")


def test_of_a_reason_that_a_stranger_made_up_nothing_is_shown_but_a_word() -> None:
    assert LinkClosedByPeer("some-new-reason").detail == "the peer closed the link: some-new-reason"
    assert LinkClosedByPeer("\x1b[2J").detail == "the peer closed the link: it gave no valid reason"


def test_the_last_message_is_whole_where_another_was_begun() -> None:
    outbox, inbox = Outbox(), Inbox()
    outbox.push(Channel.APPLICATION, bytes(100 * KIB), Priority.VOTE)
    outbox.push(Channel.APPLICATION, b"not sent any more", Priority.BULK)
    assert inbox.receive_frame(outbox.next_frame()) == []
    outbox.finish_with(Channel.LINK, b"why")
    assert not outbox.push(Channel.APPLICATION, b"too late", Priority.VOTE)
    assert inbox.receive_frame(outbox.next_frame()) == [Message(Channel.LINK, Priority.CONTROL, b"why")]
    assert not outbox and outbox.held == 0


@pytest.mark.real("sockets")
@pytest.mark.parametrize("newcomer", ["larger key", "smaller key"])
async def test_an_invitation_is_shown_before_strangers_are_waited_for(tcp: SwarmWorld, newcomer: str) -> None:
    smaller, larger = sorted((ALICE, BOB), key=lambda identity: identity.public)
    guests: set[bytes] = set()
    shown = GuestInvitation(Signed(b"invitation", ALICE.public, bytes(64)), bytes(64))
    member = await tcp.start(
        smaller if newcomer == "larger key" else larger,
        standing_of=lambda peer: PeerClass.GUEST if peer in guests else PeerClass.STRANGER,
        welcome=lambda peer, what: guests.add(peer),
    )
    member.cpu_quota.strangers.spend(1_000.0, trio.current_time())
    guest = await tcp.start(larger if newcomer == "larger key" else smaller, bootstrap=[member.address], guest=lambda: shown)
    await until(lambda: guests == {guest.me})


@pytest.mark.real("sockets")
async def test_whoever_shows_an_invitation_is_a_guest_and_takes_no_slot_of_strangers(
    tcp: SwarmWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_manager, "STRANGERS_MAX", 1)
    guests: set[bytes] = set()
    shown = GuestInvitation(Signed(b"invitation", ALICE.public, bytes(64)), bytes(64))
    alice = await tcp.start(
        ALICE,
        standing_of=lambda peer: PeerClass.GUEST if peer in guests else PeerClass.STRANGER,
        welcome=lambda peer, what: guests.add(peer) if what == shown else None,
    )
    bob = await tcp.start(BOB, bootstrap=[alice.address], guest=lambda: shown)
    await until(lambda: guests == {bob.me})
    await connected(tcp, alice, CAROL)
    await connected(tcp, alice, DAVE)
    assert alice.connected_peers() == {bob.me, DAVE.public}


# Doors ----------------------------------------------------------------------------------------------------------------


ATTACK_SECONDS = 60


async def attacked(entrance: AcceptLimiter, hosts: int, each_second: int) -> int:
    """Return the number of accepted connections of these hosts."""
    came = 0
    for _ in range(ATTACK_SECONDS * each_second):
        came += sum(entrance.admit_connection(f"attacker {number}") for number in range(hosts))
        await trio.sleep(1 / each_second)
    return came


def most(seconds: float) -> float:
    return (CONNECTIONS_SHARE.burst_seconds + RESERVED_SECONDS + CONNECTIONS_SHARE.cpu_fraction * seconds) / CONNECTION_SECONDS


async def test_a_newcomer_and_members_come_in_though_a_dozen_hosts_connect_all_the_time(
    autojump_clock: trio.testing.MockClock,
) -> None:
    entrance = AcceptLimiter(lambda host: host == "members", lambda: 0.0)
    assert await attacked(entrance, hosts=12, each_second=20) <= most(ATTACK_SECONDS) + 1
    assert not entrance.admit_connection("attacker 0")
    assert all(entrance.admit_connection("newcomer") for _ in range(8)), "it dials again where a link broke"
    assert all(entrance.admit_connection("members") for _ in range(200)), "all of them, after a cut"


async def test_thousands_of_hosts_get_no_more_than_is_there_and_are_forgotten(autojump_clock: trio.testing.MockClock) -> None:
    entrance = AcceptLimiter(lambda host: host == "members", lambda: 0.0)
    assert await attacked(entrance, hosts=2 * cpu_quota.HOSTS_MAX, each_second=1) <= most(ATTACK_SECONDS) + 1
    assert len(entrance._hosts) == cpu_quota.HOSTS_MAX
    assert entrance.admit_connection("members")


async def test_a_host_of_members_that_attacks_takes_only_its_own(autojump_clock: trio.testing.MockClock) -> None:
    entrance = AcceptLimiter(lambda host: host.startswith("attacker"), lambda: 0.0)
    await attacked(entrance, hosts=1, each_second=100)
    assert not entrance.admit_connection("attacker 0")
    assert entrance.admit_connection("newcomer")


@pytest.mark.real("sockets")
async def test_whoever_is_turned_away_is_counted_and_comes_in_later(tcp: SwarmWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        accept_limiter,
        "HOST_CONNECTIONS_SHARE",
        HOST_CONNECTIONS_SHARE._replace(burst_seconds=0.0, cpu_fraction=CONNECTION_SECONDS),
    )
    alice = await tcp.start(ALICE)
    for _ in range(4):
        stream = await tcp.connect(alice)
    with pytest.raises(trio.BrokenResourceError):
        assert await stream.receive_some() == b""
        raise trio.BrokenResourceError("closed in order")
    await until(lambda: alice.refusal_counts().get("half-open", 0) >= 1)
    assert alice._doors._taking._spent > 0, "what taking them cost is charged"
    await linked(alice, await tcp.start(BOB))


@pytest.mark.real("sockets")
async def test_connections_wait_in_the_kernel_while_taking_them_costs_too_much(
    tcp: SwarmWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice = await tcp.start(ALICE)
    alice._doors._taking.spend(1_000.0, trio.current_time())
    stream = await tcp.connect(alice)
    await stream.send_all(b"nobody reads this yet")
    with trio.move_on_after(0.2) as unread:
        await stream.receive_some()
    assert unread.cancelled_caught and not alice.refusal_counts()
    alice._doors._taking.spend(-1_000.0, trio.current_time())
    await until(lambda: alice.refusal_counts().get("not-folkmoot") == 1)
