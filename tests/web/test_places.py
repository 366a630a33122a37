"""Connections of the web port give way where there are too many, and end where they are too late."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from web.connection_limits import FILE_SECONDS, HEADER_SECONDS, REQUEST_SECONDS, ConnectionSlot, ConnectionSlots


@dataclass
class Port:
    """Places with a clock that the test sets."""

    most: int = 8
    proxies: tuple[str, ...] = ()
    now: float = 0.0
    open: dict[int, ConnectionSlot] = field(default_factory=dict)
    closed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.places = ConnectionSlots(self.most, self.proxies, lambda: self.now)

    def come(self, host: str, number: int) -> ConnectionSlot:
        self.open[number] = place = self.places.acquire_slot(host, lambda: self.closed.append(number))
        return place


def test_a_host_at_its_bound_loses_its_own_oldest_connection() -> None:
    port = Port(most=8)
    for number, host in enumerate(("a", "b", "a", "a")):
        port.come(host, number)
    assert port.closed == [0] and len(port.places._open) == 3


def test_a_connection_that_waits_goes_before_one_that_has_a_request() -> None:
    port = Port(most=8)
    port.come("a", 0).begin_request(REQUEST_SECONDS)
    port.come("a", 1)
    port.come("a", 2)
    assert port.closed == [1]
    port.open[2].begin_request(REQUEST_SECONDS)
    port.come("a", 3)
    assert port.closed == [1, 0], "where all have requests the oldest goes"


def test_where_all_places_are_taken_the_host_with_most_loses_one() -> None:
    port = Port(most=8)
    for number, host in enumerate("aabbccdd"):
        port.come(host, number)
    port.come("visitor", 8)
    assert port.closed == [0]
    port.come("visitor", 9)
    assert port.closed == [0, 2], "not the visitor, and not the host that has lost one"


def test_a_proxy_may_have_all_places() -> None:
    port = Port(most=8, proxies=("proxy",))
    for number in range(8):
        port.come("proxy", number)
    assert port.closed == []
    port.come("proxy", 8)
    assert port.closed == [0]


def test_a_proxy_with_three_quarters_of_all_places_or_less_gives_way_to_nobody() -> None:
    port = Port(most=8, proxies=("proxy",))
    for number in range(6):
        port.come("proxy", number)
    for number in range(6, 12):
        port.come(f"stranger {number}", number)
    assert port.closed == [6, 7, 8, 9], "strangers give way to one another"
    for number in range(12, 14):
        port.come("proxy", number)
    assert port.closed == [6, 7, 8, 9, 10, 0], "a proxy with more is like any other host"


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


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.sampled_from(("come", "begin", "leave"))), max_size=60))
def test_places_are_bounded_whatever_comes(steps: list[tuple[str, str]]) -> None:
    port = Port(most=6)
    for number, (host, what) in enumerate(steps):
        place = port.come(host, number)
        if what == "begin":
            place.begin_request(REQUEST_SECONDS)
        elif what == "leave":
            port.places.release_slot(place)
        there = Counter(place.host for place in port.places._open)
        assert there.total() <= 6 and max(there.values(), default=0) <= 1
