"""Features of TCP alone: dialing, listening, handshakes that hang, floods, addresses that spread."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from itertools import count
from typing import Any

import pytest
import trio

from protocol.addresses import NO_LISTEN_ADDRESS, format_address
from protocol.errors import RemoteProtocolError, UserError
from protocol.identity import WIRE_VERSION, Identity, peer_id
from protocol.messages import ObservedAddress
from tests.transport.conftest import SwarmWorld
from tests.transport.helpers import (
    ALICE,
    BOB,
    CAROL,
    CHAIN,
    DAVE,
    DEADLINE_SECONDS,
    MemoryBlobs,
    digest,
    linked,
    make_session,
    next_event,
    until,
)
from transport import session_links, swarm
from transport.connections import connection_manager
from transport.discovery import address_book
from transport.discovery.reachability import ReachabilityState
from transport.network import DataReceived, DuplicateIdentity, PeerConnected, PeerDisconnected, Priority
from transport.quotas import accept_limiter
from transport.swarm import Swarm
from transport.wire.failure_detector import KeepaliveConfig
from transport.wire.noise_session import MAGIC, chain_tag

# No parallel test takes a port of this host meanwhile.
OWN_HOST = str(ipaddress.ip_address("127.0.0.0") + os.getpid() % (1 << 24))


# Below the range from which the system takes the ports of outgoing connections, which also have `OWN_HOST`.
PORTS = count(20_000)


def free_address() -> str:
    """Return an address where nobody listens, and that no outgoing connection takes until somebody does."""
    while True:
        port = next(PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((OWN_HOST, port))
            return f"{OWN_HOST}:{port}"


async def connect_as_bob(tcp: SwarmWorld, network: Swarm) -> trio.SocketStream:
    return (await tcp.confirm(network, BOB))[0]


@pytest.mark.real("sockets")
async def test_two_that_dial_each_other_at_once_keep_one_connection(tcp: SwarmWorld) -> None:
    for _ in range(20):
        await dial_each_other(tcp)


async def dial_each_other(tcp: SwarmWorld) -> None:
    addresses = free_address(), free_address()
    alice = tcp.make(ALICE, MemoryBlobs(), listen=addresses[0], bootstrap=[addresses[1]])
    bob = tcp.make(BOB, MemoryBlobs(), listen=addresses[1], bootstrap=[addresses[0]])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(alice.run)
        nursery.start_soon(bob.run)
        await linked(alice, bob)
        await until(lambda: len(alice._half_open._places) == len(bob._half_open._places) == 0)
        await until(lambda: alice._open.total() + bob._open.total() == 1)
        assert alice.send(bob.me, b"ping")
        assert bob.send(alice.me, b"pong")
        assert [await bob.events.receive() for _ in range(2)] == [PeerConnected(alice.me), DataReceived(alice.me, b"ping")]
        assert [await alice.events.receive() for _ in range(2)] == [PeerConnected(bob.me), DataReceived(bob.me, b"pong")]
        assert alice.links()[0].dialed != bob.links()[0].dialed
        assert not alice.refusal_counts() and not bob.refusal_counts()
        nursery.cancel_scope.cancel()


@pytest.mark.real("sockets")
async def test_a_peer_of_another_wire_version_reads_which_one_is_spoken_here_and_a_person_reads_both(tcp: SwarmWorld) -> None:
    preamble = MAGIC + (WIRE_VERSION + 1).to_bytes(2, "big") + chain_tag(CHAIN)
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    address = format_address(*listener.socket.getsockname())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, lambda stream: stream.send_all(preamble), [listener])
        alice = await tcp.start(ALICE, bootstrap=[address])
        await until(lambda: bool(alice.unreached_addresses()))
        nursery.cancel_scope.cancel()
    versions = f"the peer speaks wire version {WIRE_VERSION + 1}, this peer {WIRE_VERSION}: update the older one"
    assert alice.unreached_addresses()[0].reason == versions
    before = alice.refusal_counts()["wrong-version"]
    stream = await tcp.connect(alice)
    await stream.send_all(preamble)
    assert b"".join([bytes(data) async for data in stream]) == MAGIC + WIRE_VERSION.to_bytes(2, "big") + chain_tag(CHAIN)
    assert alice.refusal_counts()["wrong-version"] > before and not alice.connected_peers()


# Dials that fail ------------------------------------------------------------------------------------------------------


@pytest.mark.real("sockets")
async def test_an_address_that_cannot_be_reached_is_told_with_reason_tries_and_the_time_of_the_next(
    tcp: SwarmWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, told = socket.getaddrinfo, list[str]()

    def getaddrinfo(host: str | bytes, *rest: Any) -> Any:  # a real resolver may take longer than the timeout of a dial
        if host == b"nobody.invalid":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return look(host, *rest)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    address = free_address()
    alice = await tcp.start(ALICE, bootstrap=[address, "nobody.invalid:7700"], tell=told.append)
    await until(lambda: len(alice.unreached_addresses()) == 2 and all(dial.failures >= 2 for dial in alice.unreached_addresses()))
    reasons = {dial.address: dial.reason for dial in alice.unreached_addresses()}
    assert reasons == {address: "connection refused", "nobody.invalid:7700": "unknown host name"}
    assert any(line.startswith(f"cannot reach {address}: connection refused (1 try), next try in ") for line in told)
    await tcp.start(BOB, listen=address, bootstrap=[])
    await until(lambda: f"reached {address}" in told)
    assert [dial.address for dial in alice.unreached_addresses()] == ["nobody.invalid:7700"]


@pytest.mark.real("sockets")
async def test_where_something_else_answers_the_log_does_not_say_so_at_every_try(
    tcp: SwarmWorld, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(address_book, "BACKOFF_SECONDS", 0.01)

    async def greet(stream: trio.SocketStream) -> None:
        await stream.send_all(b"220 mail.example ESMTP" + bytes(64))
        await stream.receive_some()

    told: list[str] = []
    caplog.set_level("INFO", "transport.swarm")
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    address = format_address(*listener.socket.getsockname())
    alice = tcp.make(ALICE, MemoryBlobs(), bootstrap=[address], tell=told.append)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, greet, [listener])
        await nursery.start(alice.run)
        await until(lambda: any(dial.failures >= 6 for dial in alice.unreached_addresses()))
        nursery.cancel_scope.cancel()
    assert [line.partition(",")[0] for line in told] == [
        f"cannot reach {address}: the program that answers there is not a Folkmoot peer ({tries})"
        for tries in ("1 try", "2 tries", "4 tries")
    ]
    assert [record.getMessage() for record in caplog.records] == []
    assert alice.refusal_counts()["not-folkmoot"] >= 6


@pytest.mark.real("sockets")
async def test_connect_dials_at_once_and_says_who_answers_or_why_nobody_does(tcp: SwarmWorld) -> None:
    bob, dead = await tcp.start(BOB, listen=free_address()), free_address()
    alice = await tcp.start(ALICE, listen=free_address(), bootstrap=[])
    assert await alice.connect(bob.address) == bob.me
    assert await alice.connect(f"{peer_id(bob.me)}@{bob.address}") == bob.me, "it is connected already"
    assert alice.peer_addresses() == {bob.me: bob.address}
    for address, why in (
        (dead, f"cannot reach {dead}: connection refused; this peer keeps trying"),
        (alice.address, f"cannot reach {alice.address}: this peer itself answers there"),
        ("nobody", "'nobody' is not an address"),
    ):
        with pytest.raises(UserError, match=why):
            await alice.connect(address)


@pytest.mark.real("sockets")
async def test_connect_does_not_wait_for_the_pause_after_failures(tcp: SwarmWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address_book, "BACKOFF_SECONDS", 10 * DEADLINE_SECONDS)
    monkeypatch.setattr(address_book, "BACKOFF_SECONDS_MAX", 10 * DEADLINE_SECONDS)
    address = free_address()
    alice = await tcp.start(ALICE, bootstrap=[address])
    await until(lambda: bool(alice.unreached_addresses()))
    bob = await tcp.start(BOB, listen=address, bootstrap=[])
    assert await alice.connect(address) == bob.me


@pytest.mark.real("sockets")
async def test_what_is_advertised_is_told_to_others_in_the_place_of_where_a_peer_listens(tcp: SwarmWorld) -> None:
    bob = await tcp.start(BOB, listen=free_address(), advertise=["bob.example.org:7700", "10.9.8.7:7700"])
    alice = await tcp.start(ALICE, listen=free_address(), bootstrap=[])
    await bob.connect(alice.address)
    await until(lambda: alice.peer_addresses() == {bob.me: "bob.example.org:7700"})
    await until(lambda: {"bob.example.org:7700", "10.9.8.7:7700"} <= {entry.address for entry in alice._book.entries()})


@pytest.mark.real("sockets")
async def test_where_a_peer_was_reached_counts_more_than_what_it_says(tcp: SwarmWorld) -> None:
    bob = await tcp.start(BOB, advertise=["bob.example.org:7700"])
    alice = await tcp.start(ALICE, bootstrap=[bob.address])
    await until(lambda: alice.records.addresses(bob.me) == ("bob.example.org:7700",))
    assert alice.peer_addresses() == {bob.me: bob.address}


@pytest.mark.real("sockets")
async def test_ten_that_all_dial_each_other_are_fully_linked_without_a_flap(nursery: trio.Nursery, tcp: SwarmWorld) -> None:
    identities = [Identity(bytes([n]) * 32) for n in range(10, 20)]
    addresses = [free_address() for _ in identities]
    networks = [
        tcp.make(identity, MemoryBlobs(), listen=address, bootstrap=addresses)
        for identity, address in zip(identities, addresses, strict=True)
    ]
    for network in networks:
        nursery.start_soon(network.run)
    await linked(*networks)
    for network in networks:
        events = [await network.events.receive() for _ in range(9)]
        assert {event.peer for event in events if isinstance(event, PeerConnected)} == network.connected_peers()


@pytest.mark.real("sockets")
async def test_a_peer_that_only_knows_one_other_finds_everybody(tcp: SwarmWorld) -> None:
    alice = await tcp.start(ALICE)
    await linked(alice, *[await tcp.start(identity, bootstrap=[alice.address]) for identity in (BOB, CAROL, DAVE)])


@pytest.mark.real("sockets")
async def test_a_peer_that_listens_everywhere_is_found_at_the_host_it_is_seen_at(tcp: SwarmWorld) -> None:
    alice = await tcp.start(ALICE)
    bob = await tcp.start(BOB, listen="0.0.0.0:0", bootstrap=[alice.address])
    await tcp.join(CAROL, alice, bob)


@pytest.mark.real("sockets")
async def test_whoever_is_found_where_another_peer_is_remembered_is_met(tcp: SwarmWorld) -> None:
    """A peer with a new key is at an old address, and nobody dials in the other direction."""
    alice = await tcp.start(ALICE)
    bob = await tcp.start(BOB, bootstrap=[], remembered=[f"{peer_id(CAROL.public)}@{alice.address}"])
    await linked(alice, bob)
    assert bob.refusal_counts()["wrong-peer"] == 1


@pytest.mark.real("sockets")
async def test_what_the_operator_says_of_an_address_goes_before_what_is_remembered(tcp: SwarmWorld) -> None:
    alice = await tcp.start(ALICE)
    bob = await tcp.join(BOB, alice, remembered=[f"{peer_id(CAROL.public)}@{alice.address}"])
    assert "wrong-peer" not in bob.refusal_counts()


@pytest.mark.real("sockets")
async def test_a_pinned_address_is_only_used_with_its_key(tcp: SwarmWorld) -> None:
    alice = await tcp.start(ALICE)
    bob = await tcp.start(BOB, bootstrap=[f"{peer_id(CAROL.public)}@{alice.address}"])
    await linked(alice, await tcp.start(CAROL, bootstrap=[f"{peer_id(ALICE.public)}@{alice.address}"]))
    await until(lambda: bob.refusal_counts().get("wrong-peer"))
    assert alice.me not in bob.connected_peers() or not bob._links[alice.me].dialed


@pytest.mark.real("sockets")
async def test_another_chain_is_refused_by_both_and_named(tcp: SwarmWorld) -> None:
    alice = await tcp.start(ALICE)
    stranger = Swarm(BOB, digest(b"another"), "127.0.0.1:0", [alice.address], MemoryBlobs())
    await tcp.serve(stranger)
    await until(lambda: alice.refusal_counts().get("wrong-chain") and stranger.refusal_counts().get("wrong-chain"))
    assert not alice.connected_peers()


@pytest.mark.real("sockets")
async def test_another_protocol_on_the_port_is_refused(tcp: SwarmWorld) -> None:
    alice = await tcp.start(ALICE)
    stream = await tcp.connect(alice)
    await stream.send_all(b"GET / HTTP/1.1\r\n\r\n")
    async for _ in stream:
        pass
    assert alice.refusal_counts() == {"not-folkmoot": 1}


@pytest.mark.real("sockets")
async def test_a_handshake_that_hangs_is_ended(tcp: SwarmWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swarm, "HANDSHAKE_SECONDS", 0.1)
    alice = await tcp.start(ALICE)
    stream = await tcp.connect(alice)
    async for _ in stream:
        pass
    await until(lambda: alice.refusal_counts() == {"handshake-timeout": 1})


@pytest.mark.real("sockets")
async def test_a_handshake_that_is_never_confirmed_is_ended(tcp: SwarmWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swarm, "HANDSHAKE_SECONDS", 0.2)
    alice = await tcp.start(ALICE)
    stream, session = await tcp.connect(alice), make_session(BOB, True)
    await stream.send_all(session.data_to_send())
    with contextlib.suppress(trio.BrokenResourceError):  # the time may end before our last message arrives
        async for data in stream:
            if session.receive(data):
                await stream.send_all(session.data_to_send())
    await until(lambda: alice.refusal_counts() == {"handshake-timeout": 1})
    assert not alice._links


@pytest.mark.real("sockets")
async def test_open_links_are_bounded(tcp: SwarmWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swarm, "LINKS_PER_HOST_MAX", 1)
    alice, bob = await tcp.pair()
    await tcp.start(CAROL, bootstrap=[alice.address])
    await until(lambda: alice.refusal_counts().get("too-many-links"))
    assert alice.connected_peers() == {bob.me}


@pytest.mark.real("sockets")
async def test_a_silent_link_is_ended(tcp: SwarmWorld) -> None:
    alice = await tcp.start(ALICE, pace=KeepaliveConfig(suspect_seconds=0.08))
    await connect_as_bob(tcp, alice)
    await next_event(alice, PeerConnected)
    await next_event(alice, PeerDisconnected)
    await until(lambda: alice.refusal_counts() == {"idle": 1})


@pytest.mark.real("sockets")
async def test_pings_keep_an_idle_link(tcp: SwarmWorld) -> None:
    pace = KeepaliveConfig(0.1, 0.8)  # a link ends after twenty silent pings, since a busy machine delays some of them
    alice, bob = [await tcp.start(identity, pace=pace) for identity in (ALICE, BOB)]
    await linked(alice, bob)
    with trio.move_on_after(1.2 * pace.idle_seconds):
        await next_event(alice, PeerDisconnected)
        raise AssertionError("the link ended")


@pytest.mark.real("sockets")
async def test_a_peer_that_starts_again_replaces_its_stale_link_at_once(tcp: SwarmWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a power cut, nothing shows Alice that the old connection is dead."""
    monkeypatch.setattr(session_links, "PROBE_SECONDS", 1000.0)
    alice = await tcp.start(ALICE)
    await connect_as_bob(tcp, alice)
    await next_event(alice, PeerConnected)
    bob = await tcp.start(BOB, bootstrap=[alice.address])
    assert await next_event(alice, PeerDisconnected) == PeerDisconnected(bob.me)
    assert await next_event(alice, PeerConnected) == PeerConnected(bob.me)
    assert await next_event(bob, PeerConnected) == PeerConnected(alice.me)


@pytest.mark.real("sockets")
async def test_a_flipped_byte_on_the_wire_ends_the_connection_but_bans_nobody(
    nursery: trio.Nursery, tcp: SwarmWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_manager, "BAN_SECONDS", 1000.0)
    alice = await tcp.start(ALICE)
    middle = await trio.open_tcp_listeners(0, host="127.0.0.1")
    to_flip = 0

    async def relay(source: trio.SocketStream, sink: trio.SocketStream, from_bob: bool) -> None:
        nonlocal to_flip
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            async for data in source:
                changed = bytearray(data)
                if from_bob and to_flip:
                    to_flip -= 1
                    changed[-1] ^= 1
                await sink.send_all(changed)
        await trio.aclose_forcefully(sink)
        await trio.aclose_forcefully(source)

    async def between(stream: trio.SocketStream) -> None:
        onward = await tcp.connect(alice)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(relay, stream, onward, True)
            await relay(onward, stream, False)

    nursery.start_soon(trio.serve_listeners, between, middle)
    address = format_address(*middle[0].socket.getsockname())
    bob = await tcp.start(BOB, listen="127.0.0.1:0", bootstrap=[address])
    await linked(alice, bob)
    to_flip = 1
    bob.send(alice.me, b"a vote")
    await next_event(alice, PeerDisconnected)
    await until(lambda: alice.refusal_counts().get("bad-tag") == 1)
    await linked(alice, bob)


@pytest.mark.real("sockets")
async def test_my_own_address_in_the_list_is_forgotten(tcp: SwarmWorld) -> None:
    address = free_address()
    alice = await tcp.start(ALICE, listen=address, bootstrap=[address])
    await until(lambda: address not in alice._book._entries)
    assert not alice.refusal_counts()


@pytest.mark.real("sockets")
async def test_two_machines_with_one_key_meet_through_a_peer_that_knows_both(tcp: SwarmWorld) -> None:
    """Bob sends each of them an address of its own key. The peer at that address proves the key and is another process."""
    bob = await tcp.start(BOB, bootstrap=[])
    original = await tcp.join(ALICE, bob)
    copy = await tcp.start(ALICE, bootstrap=[bob.address])
    dialed = {await next_event(original, DuplicateIdentity), await next_event(copy, DuplicateIdentity)}
    assert dialed & {DuplicateIdentity(original.address), DuplicateIdentity(copy.address)}
    assert not {*original.refusal_counts(), *copy.refusal_counts()} - {"truncated"}


@pytest.mark.real("sockets")
async def test_a_busy_port_is_one_clear_line(tcp: SwarmWorld) -> None:
    alice = await tcp.start(ALICE)
    with pytest.raises(UserError) as caught:
        await tcp.make(BOB, MemoryBlobs(), listen=alice.address).run()
    assert alice.address in str(caught.value)
    assert "in use" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.real("sockets")
async def test_several_addresses_are_listened_on_or_none_if_one_is_taken(tcp: SwarmWorld) -> None:
    alice = await tcp.start(ALICE, listen="127.0.0.1:0,127.0.0.2:0", bootstrap=[])
    first, second = alice.addresses
    assert first.startswith("127.0.0.1:") and second.startswith("127.0.0.2:")
    bob = await tcp.start(BOB, bootstrap=[second])
    await linked(alice, bob)
    await until(lambda: bob.records.addresses(alice.me) == (first, second))
    free = free_address()
    with pytest.raises(UserError, match=f"cannot listen on {first}"):
        await tcp.make(CAROL, MemoryBlobs(), listen=f"{free},{first}").run()
    await linked(alice, bob, await tcp.start(CAROL, listen=free))


@pytest.mark.real("sockets")
async def test_a_peer_that_accepts_nothing_dials_everybody_and_is_dialed_by_nobody(tcp: SwarmWorld) -> None:
    alice = await tcp.start(ALICE, bootstrap=[])
    bob = await tcp.start(BOB, bootstrap=[alice.address])
    carol = await tcp.start(CAROL, listen=NO_LISTEN_ADDRESS, bootstrap=[alice.address])
    await linked(alice, bob, carol)
    assert carol.address == NO_LISTEN_ADDRESS and carol.reachability is ReachabilityState.RELAYED
    assert not alice.records.has_records_of(carol.me)
    assert all(link.dialed for link in carol.links())


@pytest.mark.real("sockets")
async def test_a_host_that_is_not_ours_is_one_clear_line() -> None:
    with pytest.raises(UserError, match=r"cannot listen on 192\.0\.2\.1:7400"):
        await Swarm(ALICE, CHAIN, "192.0.2.1:7400", [], MemoryBlobs()).run()


@pytest.mark.real("sockets")
async def test_addresses_that_are_none_cost_the_connection(tcp: SwarmWorld) -> None:
    alice, bob = await tcp.pair()
    alice._links[bob.me].queue_message(ObservedAddress("nowhere"), Priority.CONTROL)
    await next_event(bob, PeerDisconnected)
    assert bob.refusal_counts() == {"bad-address": 1}


@pytest.mark.real("sockets")
async def test_dropping_a_stranger_is_counted_and_keeps_it_out(tcp: SwarmWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_manager, "BAN_SECONDS", 1000.0)
    alice = await tcp.start(ALICE)
    alice.ban_peer(BOB.public, RemoteProtocolError("hearsay"))
    bob = await tcp.start(BOB)
    await until(lambda: alice.refusal_counts().get("banned"))
    assert alice.refusal_counts()["hearsay"] == 1
    assert bob.me not in alice.connected_peers()


@pytest.mark.real("sockets")
async def test_connect_meets_whoever_is_at_the_address_now_not_whom_it_was_heard_to_be(tcp: SwarmWorld) -> None:
    """A record names Dave at the present address of Bob, and Alice has no link with Dave."""
    alice, bob = await tcp.start(ALICE, bootstrap=[]), await tcp.start(BOB, bootstrap=[])
    await tcp.join(CAROL, alice)
    alice._book.add_signed(bob.address, DAVE.public)
    assert await alice.connect(bob.address) == bob.me
    assert bob.me in alice.connected_peers()


@pytest.mark.real("sockets")
async def test_connect_dials_although_whom_it_knew_there_is_linked_from_elsewhere(tcp: SwarmWorld) -> None:
    """Two peers may have exchanged their addresses like this."""
    alice, bob = await tcp.start(ALICE, bootstrap=[]), await tcp.start(BOB, bootstrap=[])
    carol = await tcp.join(CAROL, alice)
    alice._book.add_signed(bob.address, carol.me)
    await trio.testing.wait_all_tasks_blocked()
    assert await alice.connect(bob.address) == bob.me
    assert alice.connected_peers() == {bob.me, carol.me}


@pytest.mark.real("sockets")
@pytest.mark.parametrize("error", [UnicodeError("label empty or too long"), ValueError("no such thing")])
async def test_what_a_resolver_cannot_read_is_a_dial_that_failed(
    tcp: SwarmWorld, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    real = trio.open_tcp_stream

    async def fails(host: str, port: int) -> trio.SocketStream:
        if host == "strange.example":
            await trio.lowlevel.checkpoint()
            raise error
        return await real(host, port)

    monkeypatch.setattr(trio, "open_tcp_stream", fails)
    alice = await tcp.start(ALICE, bootstrap=["strange.example:1"])
    await until(lambda: alice.unreached_addresses())
    assert alice.unreached_addresses()[0].reason == "unknown host name"
    await linked(alice, await tcp.start(BOB, bootstrap=[alice.address]))


@pytest.mark.real("sockets")
async def test_whoever_has_a_network_of_ipv6_pushes_out_its_own_half_open_connections(
    tcp: SwarmWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accept_limiter, "HALF_OPEN_PER_HOST_MAX", 3)
    monkeypatch.setattr(swarm, "remote_address", lambda stream: f"[2001:db8::{stream.socket.getpeername()[1]:x}]:1")
    alice = await tcp.start(ALICE)
    idle = [await tcp.connect(alice) for _ in range(4)]
    await until(lambda: alice.refusal_counts() == {"half-open": 1})
    assert await idle[0].receive_some() == b"" and len(alice._half_open._places) == 3
    bob = await tcp.start(BOB, bootstrap=[])
    await bob.connect(alice.address)
    await until(lambda: bob.me in alice.connected_peers())
    assert [link.host for link in alice._links.values()] == ["2001:db8::"]
