"""A lock that is passed on by lot: nobody is left behind, and nobody knows when its turn is."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from peer.runtime.auditor import LotteryLock


async def order_of(waiting: list[bool], cancelled: frozenset[int] = frozenset()) -> list[int]:
    """In which order those that wait get their turn. `waiting`: whether each goes first."""
    lottery, served, held = LotteryLock(), list[int](), 0
    scopes = [trio.CancelScope() for _ in waiting]

    async def wait(number: int, is_first: bool) -> None:
        nonlocal held
        with scopes[number]:
            async with lottery.hold(lambda: is_first):
                held += 1
                assert held == 1, "one at a time"
                served.append(number)
                await trio.testing.wait_all_tasks_blocked()
                held -= 1

    async with trio.open_nursery() as nursery:
        async with lottery.hold(lambda: False):
            for number, is_first in enumerate(waiting):
                nursery.start_soon(wait, number, is_first)
                await trio.testing.wait_all_tasks_blocked()  # so that they wait in this order
            for number in cancelled:
                scopes[number].cancel()
        async with lottery.hold(lambda: False):  # a newcomer does not come between
            assert not held
            held += 1
            await trio.testing.wait_all_tasks_blocked()
            held -= 1
    return served


async def test_each_gets_its_turn_and_the_order_is_chance() -> None:
    orders = [await order_of([False] * 4) for _ in range(50)]
    assert {tuple(sorted(order)) for order in orders} == {(0, 1, 2, 3)}
    assert {order[0] for order in orders} == {order[-1] for order in orders} == {0, 1, 2, 3}


async def test_those_that_go_first_go_first() -> None:
    for _ in range(20):
        assert set((await order_of([False, True, False, True]))[:2]) == {1, 3}


@pytest.mark.parametrize("cancelled", [frozenset({0}), frozenset({0, 1, 2}), frozenset({0, 1, 2, 3})], ids=str)
async def test_who_gives_up_holds_up_nobody(cancelled: frozenset[int]) -> None:
    for _ in range(20):
        assert set(await order_of([False] * 4, cancelled)) == {0, 1, 2, 3} - cancelled


async def test_who_fails_passes_its_turn_on() -> None:
    lottery = LotteryLock()
    with pytest.raises(ValueError, match="bad"):
        async with lottery.hold(lambda: False):
            raise ValueError("bad")
    with trio.fail_after(1):
        async with lottery.hold(lambda: False):
            pass
