"""Streams of events, where looks at the peer end in an order that a real peer shows seldom."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import ClientSession, web

from web.event_stream import EventStreams
from web.routes import EventFeed


def look(height: int) -> dict[str, Any]:
    return {"height": height}


class Looks:
    """A feed whose looks end when the test says so."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[asyncio.Future[dict[str, Any]]] = asyncio.Queue()

    async def wait_for_look(self, last: dict[str, Any]) -> dict[str, Any]:
        answer = asyncio.get_running_loop().create_future()
        await self.asked.put(answer)
        found: dict[str, Any] = await answer
        return found


@pytest.mark.real("aiohttp's event loop")
def test_whoever_listens_already_misses_nothing_that_comes_with_the_look_of_another() -> None:
    async def listen() -> None:
        looks = Looks()

        async def call(do: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
            return await do(*arguments)

        feed = EventFeed(looks.wait_for_look, "height", lambda before, now: iter([("block", now)]))
        listening = EventStreams([feed], call, {})
        app = web.Application()

        async def stream(request: web.Request) -> web.StreamResponse:
            return await listening.stream_events(request, False)

        app.router.add_get("/", stream)
        app.on_shutdown.append(listening.close_streams)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        try:
            async with ClientSession() as session, asyncio.timeout(90):
                ann, ben = (asyncio.create_task(session.get(f"http://{host}:{port}/")) for _ in range(2))
                first, second = await looks.asked.get(), await looks.asked.get()
                first.set_result(look(1))
                follows = await looks.asked.get()  # one of them listens now
                second.set_result(look(2))
                await asyncio.wait((ann, ben))
                follows.set_result(look(2))
                for reply in (await ann, await ben):
                    heard = b""
                    while b'"height": 2' not in heard:
                        heard += await reply.content.readline()
                    reply.close()
        finally:
            await runner.cleanup()

    asyncio.run(listen())
