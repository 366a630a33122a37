"""Rates, tables, turns and connections that hosts share. Connections are evicted when there are too many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.lowlevel
from hypothesis import given
from hypothesis import strategies as st

from curation.service import rate_limits
from curation.service.annotators.session_api import SessionApi
from curation.service.rate_limits import FairHostQueue, FairTable, HostRateLimiter
from protocol.identity import Identity
from web.calls import HttpProblem
from web.connection_limits import FILE_SECONDS, HEADER_SECONDS, REQUEST_SECONDS, YOUNG_SECONDS, ConnectionSlot, ConnectionSlots

IDENTITY = Identity(bytes(32))


def test_a_host_takes_some_at_once_and_then_one_after_the_other() -> None:
    now = [0.0]
    rate = HostRateLimiter(3, 10.0, lambda: now[0])
    for _ in range(3):
        rate.acquire("a", "sign-ups")
    with pytest.raises(HttpProblem) as problem:
        rate.acquire("a", "sign-ups")
    assert problem.value.retry_after == 11
    rate.acquire("b", "sign-ups")
    now[0] = 10.0
    rate.acquire("a", "sign-ups")
    with pytest.raises(HttpProblem):
        rate.acquire("a", "sign-ups")
    now[0] = 1_000.0
    for _ in range(3):
        rate.acquire("a", "sign-ups")
    with pytest.raises(HttpProblem):
        rate.acquire("a", "sign-ups")


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.0, 5.0)), max_size=60))
def test_no_host_takes_more_than_its_rate(takes: list[tuple[str, float]]) -> None:
    now, taken = [0.0], {"a": 0, "b": 0, "c": 0}
    rate = HostRateLimiter(4, 10.0, lambda: now[0])
    for host, later in takes:
        now[0] += later
        try:
            rate.acquire(host, "sign-ups")
        except HttpProblem:
            continue
        taken[host] += 1
    assert all(count <= 4 + now[0] / 10.0 for count in taken.values())


def test_the_host_that_was_here_longest_ago_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_limits, "HOSTS_MAX", 2)
    rate, turns = HostRateLimiter(1, 10.0, lambda: 0.0), FairHostQueue(64, 8)
    for host in "abc":
        rate.acquire(host, "sign-ups")
        turns.trust_host(host)
    rate.acquire("a", "sign-ups")
    with pytest.raises(HttpProblem):
        rate.acquire("c", "sign-ups")
    assert list(turns._known) == ["b", "c"]


def test_the_owner_with_most_entries_loses_its_oldest() -> None:
    table = FairTable[int, str](6, 4)
    for number in range(6):
        table.put(number, "stranger" if number else "owner", str(number))
    assert len(table._values) == 5 and table.get(1) is None, "a stranger has four at most"
    table.put(6, "other", "6")
    table.put(7, "owner", "7")
    assert table.get(0) == "0" and table.get(2) is None and len(table._values) == 6
    table.pop(0)
    table.pop(0)
    assert table.get(0) is None and table.get(7) == "7"


@given(st.lists(st.tuples(st.integers(0, 20), st.sampled_from("abcd"), st.booleans()), max_size=80))
def test_a_table_is_bounded_for_all_and_for_each_owner(steps: list[tuple[int, str, bool]]) -> None:
    table = FairTable[tuple[int, str], int](8, 3)
    for number, owner, puts in steps:
        if puts and table.get((number, owner)) is None:
            table.put((number, owner), owner, number)
        else:
            table.pop((number, owner))
        assert len(table._values) <= 8 and all(len(own) <= 3 for own in table._owned.values())
        assert sum(map(len, table._owned.values())) == len(table._values) and all(table._owned.values())


async def take_turn(turns: FairHostQueue, host: str, order: list[str]) -> None:
    try:
        async with turns.hold_turn(host):
            order.append(host)
            await trio.sleep(0.1)
    except HttpProblem:
        order.append(f"{host} refused")


async def test_hosts_take_turns() -> None:
    turns, order = FairHostQueue(64, 8), list[str]()
    async with trio.open_nursery() as nursery:
        for number in range(12):
            nursery.start_soon(take_turn, turns, "stranger", order)
            if number == 9:
                await trio.testing.wait_all_tasks_blocked()
                nursery.start_soon(take_turn, turns, "owner", order)
                await trio.lowlevel.checkpoint()
    assert order.index("owner") <= 4 + order.count("stranger refused"), order
    assert order.count("stranger") + order.count("stranger refused") == 12 and order.count("stranger") == 9


async def test_strangers_of_many_hosts_do_not_keep_a_known_host_out() -> None:
    turns, order = FairHostQueue(16, 4), list[str]()
    turns.trust_host("owner")
    async with trio.open_nursery() as nursery:
        for number in range(40):
            nursery.start_soon(take_turn, turns, f"stranger {number}", order)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(take_turn, turns, "owner", order)
    served = [who for who in order if not who.endswith("refused")]
    assert served.index("owner") == 1, "it is next, though the queue was full"
    assert len(served) == 17


async def test_a_turn_that_is_cancelled_goes_on_to_the_next() -> None:
    turns, order = FairHostQueue(16, 4), list[str]()
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(take_turn, turns, "a", order)
            await trio.testing.wait_all_tasks_blocked()
            with trio.move_on_after(0.05):
                await take_turn(turns, "b", order)
            nursery.start_soon(take_turn, turns, "c", order)
        await take_turn(turns, "d", order)
    assert order == ["a", "c", "d"]


async def test_a_waiter_that_is_called_after_its_cancellation_hands_its_turn_on() -> None:
    turns, order, scope = FairHostQueue(16, 4), list[str](), trio.CancelScope()

    async def give_up() -> None:
        with scope:
            await take_turn(turns, "b", order)

    with trio.fail_after(10):
        async with trio.open_nursery() as nursery, turns.hold_turn("a"):
            nursery.start_soon(give_up)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(take_turn, turns, "c", order)
            await trio.testing.wait_all_tasks_blocked()
            scope.cancel()  # the turn of "a" ends without a checkpoint
    assert order == ["c"]


async def test_of_the_host_with_most_waiters_the_newest_is_sent_away() -> None:
    turns, served, refused = FairHostQueue(4, 3), list[str](), list[str]()

    async def come(host: str, name: str) -> None:
        try:
            async with turns.hold_turn(host):
                served.append(name)
        except HttpProblem:
            refused.append(name)

    async with trio.open_nursery() as nursery, turns.hold_turn("first"):
        for name in ("a1", "a2", "a3", "b1", "c1"):
            nursery.start_soon(come, name[0], name)
            await trio.testing.wait_all_tasks_blocked()
    assert refused == ["a3"] and served == ["a1", "b1", "c1", "a2"]


def sessions_at(folder: Path) -> SessionApi:
    desk: Any = SimpleNamespace(folder=folder)
    none: Any = None
    return SessionApi(desk, none, none)


def wrong(name: str, passphrase: str) -> None:
    return None


def right(name: str, passphrase: str) -> Identity:
    return IDENTITY


async def test_each_wrong_passphrase_after_the_fifth_doubles_the_wait_for_this_name_at_this_host(tmp_path: Path) -> None:
    sessions = sessions_at(tmp_path)
    for wait in (0, 0, 0, 0, 1, 2, 4, 8, 16, 32, 64, 64):
        assert await sessions._opened(wrong, "ann", "wrong", "stranger") is None
        if wait:
            with pytest.raises(HttpProblem) as problem:
                await sessions._opened(wrong, "ann", "wrong", "stranger")
            assert problem.value.retry_after == 1 + wait
        assert await sessions._opened(right, "ann", "right", "owner") is IDENTITY
        assert await sessions._opened(right, "bob", "right", "stranger") is IDENTITY
        await trio.sleep(wait)


async def test_a_host_where_a_passphrase_was_right_goes_first_from_then_on(tmp_path: Path) -> None:
    sessions = sessions_at(tmp_path)
    assert await sessions._opened(wrong, "ann", "wrong", "stranger") is None
    assert await sessions._opened(right, "ann", "right", "owner") is IDENTITY
    assert list(sessions._turns._known) == ["owner"]


@dataclass
class Port:
    """Connection slots with a clock that the test sets."""

    most: int = 8
    proxies: tuple[str, ...] = ()
    now: float = 0.0
    open: dict[int, ConnectionSlot] = field(default_factory=dict)
    closed: list[int] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)  # tokens of held connections that gave way

    def __post_init__(self) -> None:
        self.places = ConnectionSlots(self.most, self.proxies, lambda: self.now)

    def come(self, host: str, number: int) -> ConnectionSlot:
        self.open[number] = place = self.places.acquire_slot(host, lambda: self.closed.append(number))
        return place

    def hold(self, place: ConnectionSlot, token: str = "key") -> AbstractContextManager[None]:
        return self.places.hold_slot(place, token, lambda: self.ended.append(token))


@pytest.mark.parametrize(
    ("proxies", "steps"),
    [
        pytest.param((), [("abaa", [0])], id="a host at its bound loses its own oldest connection"),
        pytest.param(
            (),
            [("aabbccdd", []), (["visitor"], [0]), (["visitor"], [0, 2])],  # other hosts follow in turn
            id="where all places are taken, the host with most loses one",
        ),
        pytest.param(("proxy",), [(["proxy"] * 8, []), (["proxy"], [0])], id="a proxy may have all places"),
        pytest.param(
            ("proxy",),
            [
                (["proxy"] * 6, []),
                ([f"stranger {number}" for number in range(6)], [6, 7, 8, 9]),  # strangers evict one another
                (["proxy"] * 2, [6, 7, 8, 9, 10, 0]),  # a proxy with more connections counts as any other host
            ],
            id="a proxy with three quarters of all places, or less, gives way to nobody",
        ),
    ],
)
def test_connections_give_way(proxies: tuple[str, ...], steps: list[tuple[Sequence[str], list[int]]]) -> None:
    port = Port(most=8, proxies=proxies)
    for hosts, closed in steps:
        for host in hosts:
            port.now += YOUNG_SECONDS
            port.come(host, len(port.open))
        assert port.closed == closed
        assert len(port.places._open) == len(port.open) - len(closed)


def test_a_connection_that_waits_goes_before_one_that_has_a_request() -> None:
    port = Port(most=8)
    port.come("a", 0).begin_request(REQUEST_SECONDS)
    port.come("a", 1)
    port.now += YOUNG_SECONDS
    port.come("a", 2)
    assert port.closed == [1]
    port.open[2].begin_request(REQUEST_SECONDS)
    port.now += YOUNG_SECONDS
    port.come("a", 3)
    assert port.closed == [1, 0], "where all have requests the oldest goes"


def test_connections_and_requests_that_begin_together_count_for_their_host_after_some_seconds() -> None:
    port = Port(most=16)
    for number in range(8):
        port.come("a", number)
    port.now += YOUNG_SECONDS - 1
    port.open[0].begin_request(REQUEST_SECONDS)
    port.open[1].begin_request(REQUEST_SECONDS)
    port.open[1].finish_request()
    port.come("a", 8)
    assert port.closed == [], "one is idle, the others are young"
    port.now += 1
    port.come("a", 9)
    assert port.closed == [1]
    port.now += YOUNG_SECONDS
    for number in range(10, 16):
        port.come("a", number)
    assert port.closed == [1, 2, 3, 4, 5, 6, 7], "the oldest first, until the others are as many as allowed"


def test_a_connection_ends_where_header_or_request_take_too_long() -> None:
    port = Port()
    port.come("a", 0)
    port.come("b", 1).begin_request(REQUEST_SECONDS)
    port.come("c", 2).begin_request(FILE_SECONDS)
    port.come("d", 3).begin_request(float("inf"))
    for now, closed in ((HEADER_SECONDS, []), (HEADER_SECONDS + 1, [0]), (REQUEST_SECONDS + 1, [0, 1])):
        port.now = now
        port.places.close_overdue()
        assert port.closed == closed
    port.open[2].finish_request()
    port.now += HEADER_SECONDS + 1
    port.places.close_overdue()
    assert port.closed == [0, 1, 2] and len(port.places._open) == 1


def test_a_held_connection_gives_way_to_nobody_and_counts_for_no_host() -> None:
    port = Port(most=16)
    with ExitStack() as held:
        for number in range(14):
            held.enter_context(port.hold(port.come("a", number)))
        last = port.come("a", 14)
        with pytest.raises(HttpProblem, match="too many calls wait") as refusal, port.hold(last):
            raise AssertionError("two connections are for visitors")
        assert (refusal.value.code, refusal.value.retry_after) == ("too-many", 1)
        for number, host in enumerate("abcabc", 15):
            port.come(host, number)
        assert port.closed == [14, 15, 16, 17, 18], "of those without a held reply, one of the largest host goes"
    assert len(port.places._open) == 16
    port.now += YOUNG_SECONDS
    port.come("a", 21)
    assert port.closed[5:] == [0], "the host has more connections than its share"


def test_held_connections_of_the_token_with_the_most_give_way_to_others() -> None:
    port = Port(most=16)
    with ExitStack() as held:

        def ask(token: str, count: int) -> int:
            """Return how many of these calls may wait."""
            for number in range(count):
                try:
                    held.enter_context(port.hold(port.come("a", len(port.open)), token))
                except HttpProblem:
                    return number
            return count

        def waiting() -> Counter[str]:
            return Counter(place.token for place in port.places._open if place.is_held)

        assert (ask("a", 20), ask("b", 20), port.ended) == (14, 7, ["a"] * 7)
        assert (ask("a", 1), ask("b", 1)) == (0, 0), "equal ones do not change places for ever"
        assert ask("c", 20) == 4 and waiting() == {"a": 5, "b": 5, "c": 4}
        assert len(port.ended) == 7 + 4
    assert not waiting()


@pytest.mark.parametrize("proxies", [(), ("a",)])
@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.sampled_from(("come", "begin", "leave", "hold", "end"))), max_size=60))
def test_places_are_bounded_whatever_comes(proxies: tuple[str, ...], steps: list[tuple[str, str]]) -> None:
    port, held = Port(most=6, proxies=proxies), dict[int, ExitStack]()
    for number, (host, what) in enumerate(steps):
        port.now += YOUNG_SECONDS
        place = port.come(host, number)
        if what == "begin":
            place.begin_request(REQUEST_SECONDS)
        elif what == "leave":
            port.places.release_slot(place)
        elif what == "hold" and len(held) < 5:
            place.begin_request(float("inf"))
            held[number] = ExitStack()
            held[number].enter_context(port.hold(place))
        elif what == "end" and held:
            ended = next(iter(held))
            held.pop(ended).close()
            port.open[ended].finish_request()
            port.now += HEADER_SECONDS + 1
            port.places.close_overdue()
        there = Counter(place.host for place in port.places._open if not place.is_held)
        assert len(port.places._open) <= 6 and len(held) <= 5
        assert max((count for host, count in there.items() if host not in proxies), default=0) <= 1
        assert not held.keys() & set(port.closed)
