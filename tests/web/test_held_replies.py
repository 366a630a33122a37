"""Replies that wait for their results."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from web.calls import HeldReply
from web.held_replies import HeldReplies

pytestmark = pytest.mark.real("an asyncio loop and a thread")
PENDING = HeldReply("model:3", {"type": "try_again"})


class Results:
    """Results that another thread announces."""

    def __init__(self) -> None:
        self.held, self.there, self.asked = HeldReplies(), dict[str, str](), 0

    async def ask(self) -> Any:
        self.asked += 1
        return self.there.get("result", PENDING)

    def set(self, name: str = PENDING.name) -> None:
        self.there["result"] = "loss"
        self.held.announce(name)


def run(main: Callable[[], Awaitable[Any]]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(20):
            return await main()

    return asyncio.run(bounded())


def test_a_result_that_is_there_is_returned_at_once() -> None:
    results = Results()
    results.set()
    assert run(lambda: results.held.hold(PENDING.name, results.ask)) == "loss" and results.asked == 1


def test_a_result_of_another_thread_ends_the_wait() -> None:
    results = Results()

    async def main() -> Any:
        waiting = asyncio.create_task(results.held.hold(PENDING.name, results.ask, 1_000.0))
        while not results.asked:  # noqa: ASYNC110
            await asyncio.sleep(0)
        threading.Thread(target=results.set).start()
        return await waiting

    assert run(main) == "loss" and results.asked == 2
    assert not results.held._waiting


def test_another_result_does_not_end_the_wait_and_time_does() -> None:
    results = Results()

    async def main() -> Any:
        waiting = asyncio.create_task(results.held.hold(PENDING.name, results.ask, 0.2))
        while not results.asked:  # noqa: ASYNC110
            await asyncio.sleep(0)
        results.held.announce("model:4")
        return await waiting

    assert run(main) == PENDING and not results.held._waiting


def test_each_of_several_waits_gets_the_result() -> None:
    results = Results()

    async def main() -> list[Any]:
        waiting = [asyncio.create_task(results.held.hold(PENDING.name, results.ask, 1_000.0)) for _ in range(300)]
        while results.asked < 300:  # noqa: ASYNC110
            await asyncio.sleep(0)
        results.set()
        return await asyncio.gather(*waiting)

    assert run(main) == ["loss"] * 300


def test_a_result_between_the_first_question_and_the_wait_is_not_lost() -> None:
    results = Results()

    async def ask() -> Any:
        reply = await results.ask()
        if results.asked == 1:
            results.set()
        return reply

    assert run(lambda: results.held.hold(PENDING.name, ask, 1_000.0)) == "loss"
