"""Budgets of processor time, in virtual time: what somebody spends is paid back before it is read again."""

from __future__ import annotations

import pytest
import trio
import trio.lowlevel
import trio.testing

from transport import effort
from transport.effort import HANDSHAKES, HANDSHAKES_OF_HOST, LINK, STRANGERS, Bucket, Effort, Share
from transport.events import AT_WORK_MAX, EventQueue
from transport.framing import Inbox, Outbox
from transport.hub import Link
from transport.network import Received
from transport.standing import Standing


def test_a_bucket_is_paid_back_at_its_share() -> None:
    bucket = Bucket(Share(0.1, 0.5))
    bucket.spend(0.5, now=10.0)
    assert bucket.wait(10.0) == 0
    bucket.spend(0.2, now=10.0)
    assert bucket.wait(10.0) == pytest.approx(2.0)
    assert bucket.wait(11.0) == pytest.approx(1.0)
    bucket.spend(0.0, now=1000.0)
    bucket.spend(0.6, now=1000.0)
    assert bucket.wait(1000.0) == pytest.approx(1.0), "what was not spent for long is not saved up"


async def test_all_strangers_together_get_their_share_and_the_modest_one_is_not_behind_the_others(
    autojump_clock: trio.testing.MockClock,
) -> None:
    budget, spent = Effort(), dict.fromkeys(range(10), 0.0)
    started = trio.current_time()
    payers = [budget.link(Standing.STRANGER) for _ in spent]

    async def spend(number: int, seconds: float) -> None:
        while True:
            await budget.turn(payers[number], Standing.STRANGER)
            payers[number].spend(seconds)
            spent[number] += seconds
            await trio.lowlevel.checkpoint()

    with trio.move_on_after(20):
        async with trio.open_nursery() as nursery:
            for number in spent:
                nursery.start_soon(spend, number, 0.001 if number == 0 else 0.02)
    took = trio.current_time() - started
    most = STRANGERS.at_once + STRANGERS.processor * took
    assert 0.9 * most <= sum(spent.values()) <= most + 0.02
    assert spent[0] >= 0.001 * max(spent.values()) / 0.02 * 0.9, "as many turns as the others"
    assert max(spent.values()) <= LINK[Standing.STRANGER].at_once + LINK[Standing.STRANGER].processor * took + 0.02


async def test_a_stranger_that_is_alone_gets_the_share_of_its_link(autojump_clock: trio.testing.MockClock) -> None:
    budget, spent, started = Effort(), 0.0, trio.current_time()
    payer = budget.link(Standing.STRANGER)
    while trio.current_time() < started + 20:
        await budget.turn(payer, Standing.STRANGER)
        payer.spend(0.01)
        spent += 0.01
    share = LINK[Standing.STRANGER]
    assert spent <= share.at_once + share.processor * (trio.current_time() - started) + 0.02


async def test_handshakes_of_a_busy_host_wait_and_those_of_another_do_not(autojump_clock: trio.testing.MockClock) -> None:
    budget = Effort()
    busy, quiet, members = budget.host("busy", False), budget.host("quiet", False), budget.host("busy", True)
    assert budget.host("busy", False) is busy
    busy.spend(HANDSHAKES.at_once + 0.1)
    started = trio.current_time()
    await budget.turn_of_handshake(quiet)
    await budget.turn_of_handshake(members)
    assert trio.current_time() == started
    await budget.turn_of_handshake(busy)
    owed = HANDSHAKES.at_once + 0.1
    waits = (owed - HANDSHAKES_OF_HOST.at_once) / HANDSHAKES_OF_HOST.processor, (owed - HANDSHAKES.at_once) / HANDSHAKES.processor
    assert trio.current_time() - started == pytest.approx(min(waits), rel=0.01)


async def test_of_thousands_of_hosts_none_gets_more_than_is_there(autojump_clock: trio.testing.MockClock) -> None:
    budget, spent, started = Effort(), 0.0, trio.current_time()
    for number in range(2_000):
        payer = budget.host(str(number), False)
        await budget.turn_of_handshake(payer)
        payer.spend(0.001)
        spent += 0.001
    debt = effort.MANY_HOSTS_SECONDS * HANDSHAKES.processor
    assert spent <= HANDSHAKES.at_once + debt + HANDSHAKES.processor * (trio.current_time() - started) + 0.002
    assert len(budget._hosts) <= effort.HOSTS_MAX


# What was received and waits ------------------------------------------------------------------------------------------


def link_of(peer: bytes, standing: Standing) -> Link:
    link = Link(peer, "peer.example:1", True, Outbox(), Inbox())
    link.standing, link.account.owner = standing, peer
    return link


async def test_a_members_message_goes_before_all_of_strangers_and_peers_take_turns() -> None:
    queue = EventQueue(lambda: 0.0)
    flood, other = link_of(b"f", Standing.STRANGER), link_of(b"o", Standing.STRANGER)
    for number in range(4):
        queue.put(Received(b"f", bytes([number])), flood)
    queue.put(Received(b"o", b"o"), other)
    queue.put(Received(b"m", b"m"), link_of(b"m", Standing.MEMBER))
    got = [await queue.receive() for _ in range(6)]
    assert [event.data for event in got if isinstance(event, Received)] == [b"m", b"\0", b"o", b"\1", b"\2", b"\3"]


async def test_few_of_strangers_are_at_work_at_once_and_none_while_they_have_spent_too_much(
    autojump_clock: trio.testing.MockClock,
) -> None:
    until = trio.current_time() + 3.0
    queue = EventQueue(lambda: until - trio.current_time())
    flood, started = link_of(b"f", Standing.STRANGER), trio.current_time()
    for number in range(AT_WORK_MAX + 2):
        queue.put(Received(b"f", bytes([number])), flood)
    for _ in range(AT_WORK_MAX):
        await queue.receive()
    assert trio.current_time() - started == pytest.approx(3.0, rel=0.01)
    with trio.move_on_after(60.0) as patience:
        await queue.receive()
    assert patience.cancelled_caught, "none of them is dealt with yet"
    queue.put(Received(b"m", b"m"), link_of(b"m", Standing.MEMBER))
    assert await queue.receive() == Received(b"m", b"m")
    queue.worked(b"f")
    assert await queue.receive() == Received(b"f", bytes([AT_WORK_MAX]))
