"""The table of connected pairs of peers, over in-memory links in virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import trio
from trio.testing import MockClock

from consensus.voter_set import VoterSet
from features.peer_names import PeerNames
from ledger.ledger_state import CurrentState
from peer.runtime.membership.liveness_reports import LivenessMonitor, decode_heard, encode_heard
from protocol.identity import Identity, peer_id, short_id
from protocol.messages import LivenessReport
from scenarios.emulation.memory_network import MemoryNetwork, Mesh
from tests.transport.helpers import MemoryBlobs

KEYS = sorted(Identity(bytes([number]) * 32).public for number in range(1, 8))
CALLED = ("anna", "bert", "carl", "dora", "emil", "fred", "gina")
NAMES = PeerNames({peer_id(key): name for key, name in zip(KEYS, CALLED, strict=True)})
Peers = list[tuple[MemoryNetwork, LivenessMonitor]]


@asynccontextmanager
async def world(voters: int = 7, strangers: int = 0) -> AsyncIterator[tuple[Mesh, Peers]]:
    mesh, keys = Mesh(1), KEYS[: voters + strangers]
    members: Any = SimpleNamespace(voters=tuple(keys[:voters]), is_current_key=lambda key: key in keys[:voters])
    networks = [mesh.network(key, MemoryBlobs()) for key in keys]
    peers = [(network, LivenessMonitor(network, CurrentState(SimpleNamespace(members=members)))) for network in networks]
    async with trio.open_nursery() as nursery:
        for network, hearing in peers:
            await nursery.start(network.run)
            nursery.start_soon(hearing.run)
        await trio.sleep(3.5)  # between two observations
        yield mesh, peers
        nursery.cancel_scope.cancel()


async def test_all_matrices_say_whom_a_silent_peer_reaches_no_more(autojump_clock: MockClock) -> None:
    async with world() as (mesh, peers):
        assert all(
            seconds is not None and seconds < 5
            for _, h in peers
            for row in h.liveness_matrix().values()
            for seconds in row.values()
        )
        mesh.blackhole(silent := KEYS[3])
        await trio.sleep(20)
        for network, hearing in peers:
            for observer, row in hearing.liveness_matrix().items():
                for peer, seconds in row.items():
                    if observer == peer_id(silent) != peer_id(network.me):
                        assert seconds is None, "nobody can say whom it hears"
                    else:
                        assert seconds is not None and (seconds >= 15) == (peer == peer_id(silent))


async def test_silence_and_its_end_are_told_once(autojump_clock: MockClock) -> None:
    async with world(voters=2) as (mesh, ((anna, hearing), _)):
        told: list[str] = []
        hearing._tell = lambda text, peer: told.append(text)
        mesh.blackhole(KEYS[1])
        await trio.sleep(30)
        mesh.partition(KEYS[:1], KEYS[1:2])
        mesh.heal_partition()
        await trio.sleep(3)
        assert anna.connected_peers()
        name = short_id(KEYS[1])
        assert [text.replace("16", "15") for text in told] == [
            f"{name} is silent: nothing received for 15 s",
            f"{name} is heard again",
        ]


async def test_a_voter_with_too_few_names_both_sides(autojump_clock: MockClock) -> None:
    async with world() as (mesh, peers):
        assert [hearing.partition_text(NAMES) for _, hearing in peers] == [""] * 7
        mesh.partition(KEYS[:3], KEYS[3:])
        await trio.sleep(8)
        assert [hearing.partition_text(NAMES) for _, hearing in peers] == [""] * 7, "links come again within seconds, mostly"
        await trio.sleep(10)
        small = "partition: 3 of 7 voters are connected (anna, bert, carl), 5 are needed; "
        large = "partition: 4 of 7 voters are connected (dora, emil, fred, gina), 5 are needed; "
        sides = [small + "not heard: dora, emil, fred, gina"] * 3 + [large + "not heard: anna, bert, carl"] * 4
        assert [hearing.partition_text(NAMES) for _, hearing in peers] == sides
        mesh.partition(KEYS[:5], KEYS[5:])
        await trio.sleep(20)
        assert [bool(hearing.partition_text(NAMES)) for _, hearing in peers] == [False] * 5 + [True] * 2
        mesh.heal_partition()
        await trio.sleep(3)
        assert [hearing.partition_text(NAMES) for _, hearing in peers] == [""] * 7


async def test_who_was_never_there_is_no_other_side(autojump_clock: MockClock) -> None:
    async with world(voters=2) as (_, peers):
        late = LivenessMonitor(
            peers[0][0],
            CurrentState(SimpleNamespace(members=SimpleNamespace(voters=tuple(KEYS), is_current_key=lambda key: True))),
        )
        late.exchange_reports()
        await trio.sleep(60)
        assert late.partition_text(NAMES) == ""


async def test_a_voter_that_does_not_hear_another_is_named(autojump_clock: MockClock) -> None:
    async with world(voters=3) as (mesh, peers):
        mesh.partition([KEYS[0], KEYS[1]], [KEYS[0], KEYS[2]])
        await trio.sleep(20)
        assert peers[0][1].gaps_text(NAMES) == "bert does not hear carl; carl does not hear bert"
        assert peers[1][1].gaps_text(NAMES) == ""


async def test_many_gaps_are_one_short_line(autojump_clock: MockClock) -> None:
    async with world() as (mesh, peers):
        mesh.partition(*([KEYS[0], key] for key in KEYS[1:]))
        await trio.sleep(20)
        assert (
            peers[0][1]
            .gaps_text(NAMES)
            .endswith("emil does not hear bert, carl, dora, fred, gina; 2 others with gaps: see `peer reach`")
        )


async def test_what_the_others_say_changes_a_table_and_nothing_else(autojump_clock: MockClock) -> None:
    """The planted lie is that no peer is connected to any other."""
    async with world(voters=4) as (_, peers):
        anna, hearing = peers[0]
        nobody = LivenessReport(VoterSet(tuple(KEYS[:4])).hash, b"\0")
        for network, _ in peers[1:]:
            network.send_liveness_report(nobody, {anna.me})
        await trio.sleep(0.1)
        rows = hearing.liveness_matrix()
        assert all(seconds is not None and seconds >= 15 for seconds in rows[peer_id(KEYS[1])].values())
        assert all(seconds is not None and seconds < 5 for seconds in rows[peer_id(anna.me)].values())
        assert anna.live_peers() == set(KEYS[1:4]) and hearing.partition_text(NAMES) == ""


async def test_only_members_are_told_and_only_what_is_new(autojump_clock: MockClock) -> None:
    async with world(voters=2, strangers=1) as (_, ((_, hearing), _, (stranger, _))):
        assert all(link.liveness_report is None for link in stranger.links())
        sent = [link.outbox.sent for link in peers_links(hearing)]
        for _ in range(10):
            hearing.exchange_reports()
        assert [link.outbox.sent for link in peers_links(hearing)] == sent


def peers_links(hearing: LivenessMonitor) -> Any:
    return hearing._network.links()


async def test_a_report_about_other_voters_says_nothing(autojump_clock: MockClock) -> None:
    async with world(voters=2) as (_, ((anna, hearing), (bert, _))):
        bert.send_liveness_report(LivenessReport(bytes(32), b"\0"), {anna.me})
        await trio.sleep(0.1)
        assert hearing.liveness_matrix()[peer_id(bert.me)] == {peer_id(anna.me): None}


def test_bits_stand_for_voters_in_their_order() -> None:
    for count in (1, 7, 8, 9, 200):
        voters = VoterSet.from_keys(bytes([number]) * 32 for number in range(count))
        heard = frozenset(voters.keys[::3])
        assert decode_heard(voters, encode_heard(voters, heard)) == heard
        assert len(encode_heard(voters, heard)) == -(-count // 8)
    assert decode_heard(VoterSet((bytes(32),)), b"\xff\xff") == {bytes(32)}
