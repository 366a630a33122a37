"""Budgets of processor time, in virtual time. A peer that has spent its budget is read again after it is paid back."""

from __future__ import annotations

import itertools
from collections import Counter
from itertools import pairwise

import pytest
import trio
import trio.lowlevel
import trio.testing

from protocol.codec import encode
from protocol.identity import Signed
from protocol.messages import GetBlob, GuestInvitation, Ping
from scenarios.emulation.memory_network import Mesh
from tests.transport.helpers import MemoryBlobs, PolicyDouble, digest
from transport.connections.inbound_queue import STRANGER_MESSAGES_IN_PROGRESS_MAX, InboundQueue
from transport.connections.peer_link import PeerLink
from transport.dialer import HANDSHAKE_SECONDS
from transport.network import DataReceived, PeerConnected, PeerDisconnected
from transport.peer_policy import PeerClass
from transport.quotas import cpu_quota
from transport.quotas.accept_limiter import HALF_OPEN_MAX
from transport.quotas.cpu_quota import (
    HANDSHAKES_SHARE,
    LINK_SHARES,
    MEMBER_HOST_HANDSHAKES_SHARE,
    STEP_SECONDS,
    STRANGERS_SHARE,
    CpuAccount,
    CpuBucket,
    CpuQuota,
    CpuShare,
)
from transport.quotas.memory_quota import STRANGERS_MAX
from transport.wire.framing import Channel, Inbox, Message, Outbox, Priority

STEPS = 3  # in a handshake
SHOWN = GuestInvitation(Signed(b"invitation", b"i" * 32, bytes(64)), bytes(64))


def test_a_bucket_is_paid_back_at_its_share() -> None:
    bucket = CpuBucket(CpuShare(0.1, 0.5))
    bucket.spend(0.5, now=10.0)
    assert bucket.wait_seconds(10.0) == 0
    bucket.spend(0.2, now=10.0)
    assert bucket.wait_seconds(10.0) == pytest.approx(2.0)
    assert bucket.wait_seconds(11.0) == pytest.approx(1.0)
    bucket.spend(0.0, now=1000.0)
    bucket.spend(0.6, now=1000.0)
    assert bucket.wait_seconds(1000.0) == pytest.approx(1.0), "what was not spent for long is not saved up"


async def test_all_strangers_together_get_their_share_and_the_modest_one_is_not_behind_the_others(
    autojump_clock: trio.testing.MockClock,
) -> None:
    budget, spent, turns = CpuQuota(), dict.fromkeys(range(10), 0.0), Counter[int]()
    started = trio.current_time()
    payers = [budget.link_account(PeerClass.STRANGER) for _ in spent]

    async def spend(number: int, seconds: float) -> None:
        while True:
            await budget.wait_for_link(payers[number], PeerClass.STRANGER)
            payers[number].spend(seconds)
            spent[number] += STEP_SECONDS + seconds
            turns[number] += 1
            await trio.lowlevel.checkpoint()

    with trio.move_on_after(20):
        async with trio.open_nursery() as nursery:
            for number in spent:
                nursery.start_soon(spend, number, 0.001 if number == 0 else 0.02)
    took = trio.current_time() - started
    most = STRANGERS_SHARE.burst_seconds + STRANGERS_SHARE.cpu_fraction * took
    assert 0.9 * most <= sum(spent.values()) <= most + 0.02
    assert turns[0] >= max(turns.values()) - 1, "as many turns as the others"
    assert (
        max(spent.values())
        <= LINK_SHARES[PeerClass.STRANGER].burst_seconds + LINK_SHARES[PeerClass.STRANGER].cpu_fraction * took + 0.02
    )


async def test_a_stranger_that_is_alone_gets_the_share_of_its_link(autojump_clock: trio.testing.MockClock) -> None:
    budget, spent, started = CpuQuota(), 0.0, trio.current_time()
    payer = budget.link_account(PeerClass.STRANGER)
    while trio.current_time() < started + 20:
        await budget.wait_for_link(payer, PeerClass.STRANGER)
        payer.spend(0.01)
        spent += STEP_SECONDS + 0.01
    share = LINK_SHARES[PeerClass.STRANGER]
    assert spent <= share.burst_seconds + share.cpu_fraction * (trio.current_time() - started) + 0.02


async def test_of_hosts_that_wait_for_a_handshake_the_one_that_spent_least_is_next(
    autojump_clock: trio.testing.MockClock,
) -> None:
    budget, started = CpuQuota(), trio.current_time()
    busy, quiet, members = (
        budget.host_account("busy", False),
        budget.host_account("quiet", False),
        budget.host_account("busy", True),
    )
    assert budget.host_account("busy", False) is busy
    busy.spend(HANDSHAKES_SHARE.burst_seconds + 0.1)
    passed: list[tuple[str, float]] = []

    async def step(name: str, payer: CpuAccount) -> None:
        await budget.wait_for_handshake(payer, trio.current_time())
        passed.append((name, round(trio.current_time() - started, 2)))

    async with trio.open_nursery() as nursery:
        for name, payer in [*3 * [("busy", busy)], ("quiet", quiet), ("members", members)]:
            nursery.start_soon(step, name, payer)
            await trio.testing.wait_all_tasks_blocked()
            await trio.sleep(0.01)
    assert passed[0] == ("members", 0.04), "they wait for nobody else"
    assert [name for name, _ in passed[1:]] == ["busy", "quiet", "busy", "busy"], "the first was called when it was alone"
    assert passed[1][1] == pytest.approx(0.1 / HANDSHAKES_SHARE.cpu_fraction, rel=0.01)


async def test_of_many_newcomers_at_once_some_end_their_handshakes_in_time(autojump_clock: trio.testing.MockClock) -> None:
    """On a slow computer, newcomers would all stop after their first step if each new host went first."""
    budget, ended = CpuQuota(), 0
    budget.host_account("others", False).spend(HANDSHAKES_SHARE.burst_seconds)

    async def shake(number: int) -> None:
        nonlocal ended
        with trio.move_on_after(120):
            while True:
                host, came = budget.host_account(str(number), False), trio.current_time() + number / 1_000
                with trio.move_on_after(HANDSHAKE_SECONDS):
                    for _ in range(STEPS):
                        await budget.wait_for_handshake(host, came)
                        host.spend(0.01)
                    ended += 1
                    return

    async with trio.open_nursery() as nursery:
        for number in range(40):
            nursery.start_soon(shake, number)
    most = HANDSHAKES_SHARE.cpu_fraction * 120 / (STEPS * (0.01 + STEP_SECONDS))
    assert 0.7 * most <= ended <= most + 1


async def test_of_those_that_wait_for_a_handshake_each_pays_before_the_next_one_looks(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Otherwise all of them would be handled when the budget is paid back, and a vote would wait for that."""
    budget, passed = CpuQuota(), list[float]()
    budget.host_account("first", False).spend(HANDSHAKES_SHARE.burst_seconds)

    async def step(number: int) -> None:
        await budget.wait_for_handshake(budget.host_account(str(number), False), 0.0)
        passed.append(trio.current_time())

    async with trio.open_nursery() as nursery:
        for number in range(HALF_OPEN_MAX):
            nursery.start_soon(step, number)
    assert all(after - before >= 0.99 * STEP_SECONDS / HANDSHAKES_SHARE.cpu_fraction for before, after in pairwise(passed))


async def test_of_one_host_a_handshake_is_ended_before_later_ones(autojump_clock: trio.testing.MockClock) -> None:
    """A newcomer beside strangers of its own host waits once for the earlier ones, not once for each step."""
    budget, order = CpuQuota(), list[int]()
    host = budget.host_account("host", True)
    host.spend(MEMBER_HOST_HANDSHAKES_SHARE.burst_seconds)

    async def shake(number: int) -> None:
        for _ in range(3):
            await budget.wait_for_handshake(host, came=float(number))
            order.append(number)

    async with trio.open_nursery() as nursery:
        for number in range(10):
            nursery.start_soon(shake, number)
            await trio.testing.wait_all_tasks_blocked()
    ended = [len(order) - order[::-1].index(number) for number in range(10)]
    assert ended == sorted(ended) and all(end <= 3 * number + 5 for number, end in enumerate(ended)), order


async def test_whoever_stops_waiting_for_a_handshake_holds_up_nobody(autojump_clock: trio.testing.MockClock) -> None:
    budget = CpuQuota()
    host = budget.host_account("host", False)
    host.spend(HANDSHAKES_SHARE.burst_seconds + 1.0)
    with trio.move_on_after(1.0):
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(budget.wait_for_handshake, host, 0.0)
    with trio.fail_after(1.1 / HANDSHAKES_SHARE.cpu_fraction):
        await budget.wait_for_handshake(host, 0.0)


async def test_of_thousands_of_hosts_none_gets_more_than_is_there(autojump_clock: trio.testing.MockClock) -> None:
    budget, spent, started = CpuQuota(), 0.0, trio.current_time()
    for number in range(2_000):
        payer = budget.host_account(str(number), False)
        await budget.wait_for_handshake(payer, 0.0)
        payer.spend(0.001)
        spent += STEP_SECONDS + 0.001
    assert spent <= HANDSHAKES_SHARE.burst_seconds + HANDSHAKES_SHARE.cpu_fraction * (trio.current_time() - started) + 0.002
    assert len(budget._hosts) <= cpu_quota.HOSTS_MAX


async def test_what_a_message_costs_is_charged_to_its_link(autojump_clock: trio.testing.MockClock) -> None:
    network = Mesh(seed=1).network(b"a" * 32, MemoryBlobs())
    network._processor = map(float, itertools.count()).__next__  # one second more each time
    link = link_of(b"f", PeerClass.STRANGER)
    link.cpu_account = network.cpu_quota.link_account(link.peer_class)
    await network.deliver_message(link, Message(Channel.LINK, Priority.VOTE, encode(Ping(1))))
    share = LINK_SHARES[PeerClass.STRANGER]
    assert link.cpu_account.own.wait_seconds(trio.current_time()) == pytest.approx(
        (1.0 - share.burst_seconds) / share.cpu_fraction
    )
    assert network.cpu_quota.strangers.wait_seconds(trio.current_time()) > 0


async def test_what_a_question_for_a_blob_takes_of_the_disk_is_its_asker_s_and_the_next_one_waits_for_that(
    autojump_clock: trio.testing.MockClock,
) -> None:
    gone, reads = 0.0, Counter[bytes]()

    class SlowDisk(MemoryBlobs):
        def read_piece(self, digest: bytes, offset: int, length: int) -> bytes:
            nonlocal gone
            gone += 0.02
            return super().read_piece(digest, offset, length)

    blob = bytes(100_000)
    network = Mesh(seed=1).network(b"a" * 32, SlowDisk(blob), PolicyDouble(standing_of=lambda peer: PeerClass[peer.decode()]))
    network._clock = lambda: gone
    asked = Message(Channel.LINK, Priority.CONTROL, encode(GetBlob(digest(blob), 0)))

    async def ask(link: PeerLink) -> None:
        while True:
            await network.deliver_message(link, asked)
            reads[link.peer] += 1
            await trio.lowlevel.checkpoint()
            if reads[link.peer] >= 200:
                return

    with trio.move_on_after(10):
        async with trio.open_nursery() as nursery:
            for standing in (PeerClass.STRANGER, PeerClass.VOTER):
                link = link_of(standing.name.encode(), standing)
                link.cpu_account = network.cpu_quota.link_account(standing)
                nursery.start_soon(ask, link)
    share = LINK_SHARES[PeerClass.STRANGER]
    assert reads[b"VOTER"] == 200
    assert 1 <= reads[b"STRANGER"] <= 1 + (share.burst_seconds + share.cpu_fraction * 10) / 0.02


async def test_a_process_that_was_stopped_charges_nobody_for_that() -> None:
    network = Mesh(seed=1).network(b"a" * 32, MemoryBlobs())
    network._clock = itertools.count(0, 3600).__next__
    link = link_of(b"m", PeerClass.MEMBER)
    await network.deliver_message(link, Message(Channel.LINK, Priority.CONTROL, encode(GetBlob(bytes(32), 0))))
    assert link.cpu_account.wait_seconds() <= 0


# Received messages that wait ------------------------------------------------------------------------------------------


def link_of(peer: bytes, standing: PeerClass) -> PeerLink:
    link = PeerLink(peer, "peer.example:1", True, Outbox(), Inbox())
    link.peer_class, link.memory_account.owner = standing, peer
    return link


async def test_a_members_message_goes_before_all_of_strangers_and_peers_take_turns() -> None:
    queue = InboundQueue(lambda: 0.0)
    flood, other = link_of(b"f", PeerClass.STRANGER), link_of(b"o", PeerClass.STRANGER)
    for number in range(4):
        queue.put(DataReceived(b"f", bytes([number])), flood)
    queue.put(DataReceived(b"o", b"o"), other)
    queue.put(DataReceived(b"m", b"m"), link_of(b"m", PeerClass.MEMBER))
    got: list[bytes] = []
    while len(got) < 6:
        event = await queue.receive()
        assert isinstance(event, DataReceived)
        got.append(event.data)
        queue.finish_message(event.peer)
    assert got == [b"m", b"\0", b"o", b"\1", b"\2", b"\3"]


async def test_few_of_strangers_are_at_work_at_once_and_none_while_they_have_spent_too_much(
    autojump_clock: trio.testing.MockClock,
) -> None:
    until = trio.current_time() + 3.0
    queue = InboundQueue(lambda: until - trio.current_time())
    flood, started = link_of(b"f", PeerClass.STRANGER), trio.current_time()
    for number in range(STRANGER_MESSAGES_IN_PROGRESS_MAX + 2):
        queue.put(DataReceived(b"f", bytes([number])), flood)
    for _ in range(STRANGER_MESSAGES_IN_PROGRESS_MAX):
        await queue.receive()
    assert trio.current_time() - started == pytest.approx(3.0, rel=0.01)
    with trio.move_on_after(60.0) as patience:
        await queue.receive()
    assert patience.cancelled_caught, "none of them is dealt with yet"
    queue.put(DataReceived(b"m", b"m"), link_of(b"m", PeerClass.MEMBER))
    assert await queue.receive() == DataReceived(b"m", b"m")
    queue.finish_message(b"f")
    assert await queue.receive() == DataReceived(b"f", bytes([STRANGER_MESSAGES_IN_PROGRESS_MAX]))


async def test_what_a_newcomer_said_before_it_showed_its_invitation_waits_for_no_stranger(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """It sends without a pause, so that some of its data always wait. Otherwise it would stay among the strangers."""
    standing = PeerClass.STRANGER
    network = Mesh(seed=1).network(b"a" * 32, MemoryBlobs(), PolicyDouble(standing_of=lambda peer: standing))
    network.cpu_quota.strangers.spend(1_000.0, trio.current_time())
    newcomer = link_of(b"n", PeerClass.STRANGER)
    network.events.put(PeerConnected(b"n"), newcomer)
    network.events.put(DataReceived(b"n", b"before"), newcomer)
    standing = PeerClass.GUEST
    await network.deliver_message(newcomer, Message(Channel.LINK, Priority.CONTROL, encode(SHOWN)))
    await network.deliver_message(newcomer, Message(Channel.APPLICATION, Priority.CONTROL, b"after"))
    with trio.fail_after(1.0):
        got = [await network.events.receive() for _ in range(3)]
    assert got == [PeerConnected(b"n"), DataReceived(b"n", b"before"), DataReceived(b"n", b"after")]


async def test_what_was_read_of_strangers_is_dealt_with_before_more_is_read(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """Both wait for one budget. Strangers that are read send again at once, and would use all of it."""
    network = Mesh(seed=1).network(b"a" * 32, MemoryBlobs())
    effort, other, reads = network.cpu_quota, link_of(b"o", PeerClass.STRANGER), 0
    other.cpu_account = effort.link_account(PeerClass.STRANGER)

    async def read() -> None:
        nonlocal reads
        payer = effort.link_account(PeerClass.STRANGER)
        while True:
            await effort.wait_for_link(payer, PeerClass.STRANGER)
            payer.spend(0.005)
            reads += 1

    for _ in range(STRANGERS_MAX):
        nursery.start_soon(read)
    await trio.sleep(10.0)
    before = reads
    for _ in range(10):
        network.events.put(DataReceived(b"o", b"asks"), other)
        await network.events.receive()
        other.cpu_account.spend(0.005)
        network.events.finish_message(b"o")
    assert reads - before <= 1


async def test_a_vote_goes_before_the_bulk_that_its_peer_said_earlier_and_never_before_its_link() -> None:
    queue, link = InboundQueue(lambda: 0.0), link_of(b"m", PeerClass.MEMBER)

    def say(data: bytes, priority: Priority) -> None:
        queue.put(DataReceived(b"m", data), link, priority)

    queue.put(PeerConnected(b"m"), link)
    say(b"bulk 1", Priority.BULK)
    say(b"control 1", Priority.CONTROL)
    say(b"bulk 2", Priority.BULK)
    say(b"vote 1", Priority.VOTE)
    say(b"vote 2", Priority.VOTE)
    queue.put(PeerDisconnected(b"m"), link)
    queue.put(PeerConnected(b"m"), link)
    say(b"vote 3", Priority.VOTE)
    got = [await queue.receive() for _ in range(9)]
    assert [event.data.decode() if isinstance(event, DataReceived) else type(event).__name__ for event in got] == [
        *("PeerConnected", "vote 1", "vote 2", "control 1", "bulk 1", "bulk 2", "PeerDisconnected"),
        *("PeerConnected", "vote 3"),
    ]
    assert link.memory_account.held == 0


async def test_what_is_thrown_away_is_no_longer_held_and_the_links_stay_in_order() -> None:
    queue, link = InboundQueue(lambda: 0.0), link_of(b"m", PeerClass.MEMBER)
    queue.put(PeerConnected(b"m"), link)
    for priority in Priority:
        queue.put(DataReceived(b"m", bytes(9)), link, priority)
    queue.put(PeerDisconnected(b"m"), link)
    queue.discard_messages(b"m")
    assert link.memory_account.held == 0
    assert [await queue.receive() for _ in range(2)] == [PeerConnected(b"m"), PeerDisconnected(b"m")]
