"""Connections, in virtual time: hosts that make too many are turned away, and nobody else is."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from tests.transport.conftest import SwarmWorld
from tests.transport.helpers import ALICE, BOB, linked, until
from transport.quotas import accept_limiter, cpu_quota
from transport.quotas.accept_limiter import (
    CONNECTION_SECONDS,
    CONNECTIONS_SHARE,
    HOST_CONNECTIONS_SHARE,
    RESERVED_SECONDS,
    AcceptLimiter,
)

ATTACK_SECONDS = 60


async def attacked(entrance: AcceptLimiter, hosts: int, each_second: int) -> int:
    """How many connections of these hosts came in."""
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
