"""Interfaces for machines: health, metrics, and the stream of events."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from aiohttp import ClientSession, web

from consensus.block import decode_header, header_digest
from consensus.voter_set import VoterSet, verify_certificate
from curation.service.event_feeds import LiveFeed
from peer.api import alerts
from peer.api.handlers.network_handler import BlockRpcHandler
from protocol import codec
from protocol.api import BlockView, StatusView
from protocol.codec import Key
from protocol.errors import StorageError
from protocol.identity import Ed25519Verifier
from protocol.messages import Certificate, Commit
from protocol.prometheus_metrics import why_unhealthy
from tests.web.client import Site
from tests.web.room import Room, assigned, enrolled, said, together
from web import asyncio_bridge
from web.event_stream import EventStreams
from web.routes import EventFeed

Event = tuple[str, str, Any]  # id, kind, data


class Over:
    """A proxy of another object that replaces some of its calls."""

    def __init__(self, of: Any, **calls: Any) -> None:
        self._of = of
        vars(self).update(calls)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)


def opened(site: Site, query: str = "", **headers: str) -> HTTPResponse:
    connection = HTTPConnection(site.host, site.port, timeout=60)
    connection.request("GET", f"/api/v1/events{query}", headers={"Connection": "close", **headers})
    return connection.getresponse()


@asynccontextmanager
async def listening(site: Site, query: str = "", **headers: str) -> AsyncIterator[HTTPResponse]:
    reply = await said(opened, site, query, **headers)
    try:
        yield reply
    finally:
        reply.close()


def block(stream: HTTPResponse) -> str:
    """Return the lines up to the next empty line, or an empty text at the end of the stream."""
    found = ""
    while (line := stream.readline().decode()) not in ("", "\n"):
        found += line
    return found


def event(stream: HTTPResponse) -> Event:
    fields = dict(line.split(": ", 1) for line in block(stream).splitlines())
    return fields["id"], fields["event"], json.loads(fields["data"])


def until(stream: HTTPResponse, kind: str) -> Event:
    while (found := event(stream))[1] != kind:
        pass
    return found


@pytest.fixture
def room(tmp_path: Path) -> Room:
    return Room(tmp_path)


@pytest.mark.real("sockets")
async def test_whoever_listens_sees_the_state_and_then_what_changes(room: Room) -> None:
    async with room.serving() as (daemon, site):
        view = await room.project(daemon, tasks=2)
        (ann,) = await enrolled(site, "ann")
        stats = await said(site.stats)
        async with listening(site) as stream, listening(site, **{"Last-Event-ID": "1"}) as another:
            assert stream.getheader("Content-Type") == "text/event-stream"
            for each in (stream, another):
                seen = [await said(event, each) for _ in range(3)]
                assert [kind for _, kind, _ in seen] == ["block", "project", "settled"]
                (_, _, head), (_, _, project), (_, _, settled) = seen
                assert head["state_root"] == stats["state_root"]
                assert (project["project"], project["tasks"], settled["settled"]) == (view.project, 2, 0)
            (task,) = await assigned(site, ann)
            assert (await said(ann.submit, site, task["assignment"], (1,))).status == 201
            for each in (stream, another):
                _, _, settled = await said(until, each, "settled")
                assert settled["settled"] == 1 and settled["height"] > stats["height"]


@pytest.mark.real("sockets")
async def test_whoever_comes_again_goes_on_where_it_stopped(room: Room) -> None:
    async with room.serving() as (daemon, site):
        view = await room.project(daemon, tasks=2)
        api: Any = daemon.api
        async with listening(site) as stream:
            first = [await said(event, stream) for _ in range(3)][-1]
            await api.set_project_phase(view.project, "paused")
            seen = await said(until, stream, "project")
        assert int(seen[0]) > int(first[0]) and seen[2]["state"] == "paused"
        await api.set_project_phase(view.project, "open")  # without a listener
        async with listening(site, **{"Last-Event-ID": first[0]}) as stream:
            assert await said(until, stream, "project") == seen, "what it had not seen, with the numbers that it had"
            assert (await said(until, stream, "project"))[2]["state"] == "open"
        async with listening(site, **{"Last-Event-ID": seen[0]}) as stream:
            number, _, missed = await said(until, stream, "project")
            assert int(number) > int(seen[0]) and missed["state"] == "open"
        for unknown in (str(2**53), "-1", "x", "9" * 40):
            async with listening(site, **{"Last-Event-ID": unknown}) as stream:
                kinds = [(await said(event, stream))[1] for _ in range(3)]
                assert kinds == ["block", "project", "settled"], "the newest state"


@pytest.mark.real("sockets")
async def test_live_events_come_to_those_who_ask_and_say_what_changed(room: Room) -> None:
    async with room.serving() as (daemon, site):
        async with listening(site, "?live=1") as stream, listening(site) as another:
            _, _, first = await said(until, stream, "live")
            assert first.keys() == (await said(site.get, "/api/v1/live")).body.keys() and first["labels"] is None
            assert (first["status"]["peer"], first["peers"][0]["me"]) == ((await daemon.api.status()).peer, True)
            assert not {"data_directory", "process", "address", "unreached"} & set(first["status"])
            view = await room.project(daemon, tasks=2)
            changed: dict[str, Any] = {}
            while changed.get("labels") is None:
                _, _, changed = await said(until, stream, "live")
                assert "rounds" not in changed, "no round was closed"
            known = {block["height"] for block in first["blocks"]}
            assert known.isdisjoint(block["height"] for block in changed.get("blocks", ()))
            api: Any = daemon.api
            await api.set_project_phase(view.project, "closed")
            kinds = [(await said(event, another))[1] for _ in range(5)]
            assert set(kinds) <= {"block", "project", "settled"}
        assert (await said(site.get, "/api/v1/events?live=2")).code == "malformed"


@pytest.mark.real("sockets")
async def test_all_who_watch_cost_one_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, look = 0, LiveFeed._look

    async def counted(live: LiveFeed) -> None:
        nonlocal looks
        looks += 1
        await look(live)

    monkeypatch.setattr(LiveFeed, "_look", counted)
    monkeypatch.setattr("curation.service.event_feeds.LOOK_INTERVAL_SECONDS", 1_000.0)  # no look by the clock
    async with Room(tmp_path).serving() as (_, site), AsyncExitStack() as stack:
        for stream in [await stack.enter_async_context(listening(site, "?live=1")) for _ in range(20)]:
            await said(until, stream, "live")
        assert looks <= 10, "one for each that came alone, and what the first ones saw change: a peer that starts tells much"


@pytest.mark.real("sockets")
async def test_a_look_that_fails_has_seen_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Room(tmp_path).serving() as (daemon, _):
        desk: Any = SimpleNamespace(api=daemon.api, height=1, state=daemon.api, time_ms=0)
        live, told = LiveFeed(desk), 0
        monkeypatch.setattr(LiveFeed, "_labels_a_minute", lambda live: None)
        await live._look()
        api: Any = daemon.api
        first, event = live._now, replace((await api.events(0, 1.0))[-1], kind="measured", number=10**6)

        async def events(after: int, seconds: float) -> Any:
            return (event,) if after < event.number else ()

        async def rounds(last: int) -> Any:
            nonlocal told
            told += 1
            if told == 1:
                raise StorageError("the disk is slow")
            return ()

        desk.api, desk.height = Over(api, events=events, rounds=rounds), 2
        with pytest.raises(StorageError):
            await live._look()
        assert live._now is first
        await live._look()
        assert told == 2, "the event that came is looked at again"


@pytest.mark.real("sockets")
async def test_strangers_hear_nothing_of_this_machine_s_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerts, "DISK_WARNING_BYTES", 1 << 60)
    async with Room(tmp_path).serving() as (daemon, site):
        assert [alert.cause for alert in await daemon.api.alerts()] == ["disk-low"]
        assert (await said(site.get, "/api/v1/live")).body["alerts"] == []


@pytest.mark.real("sockets")
async def test_a_block_comes_as_it_was_hashed_and_signed(room: Room) -> None:
    async with room.serving() as (daemon, site):
        await room.project(daemon)
        height = (await said(site.stats))["height"]
        body = (await said(site.get, f"/api/v1/blocks/{height}")).body
        certificate = codec.decode(Certificate, bytes.fromhex(body["certificate"]), 1 << 16)
        voters = VoterSet(codec.decode(tuple[Key, ...], bytes.fromhex(body["voters"]), 1 << 16))
        vote = verify_certificate(
            certificate,
            Commit,
            voters,
            bytes.fromhex((await said(site.get, "/api/v1/network")).body["chain_id"]),
            Ed25519Verifier(),
        )
        header = bytes.fromhex(body["header"])
        assert (vote.height, vote.block) == (height, header_digest(header)) == (body["height"], vote.block)
        assert decode_header(header).voters == voters.hash
        shown = await daemon.api.block(height)
        assert shown.digest == vote.block.hex() and shown.certified_root == shown.own_root != ""
        assert (await said(site.get, "/api/v1/blocks/999999")).code == "not-found"
        assert (await said(site.get, "/api/v1/blocks/0")).code == "malformed"


@pytest.mark.real("sockets")
async def test_strangers_who_ask_for_blocks_take_one_thread_of_the_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room, running, most, read = Room(tmp_path), 0, 0, BlockRpcHandler._block

    def counted(answers: BlockRpcHandler, *asked: Any) -> BlockView:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.02)
        running -= 1
        return read(answers, *asked)

    async with room.serving() as (daemon, site):
        await room.project(daemon)
        monkeypatch.setattr(BlockRpcHandler, "_block", counted)
        replies = await together(12, site.get, "/api/v1/blocks/1")
        assert ([reply.status for reply in replies], most) == (12 * [200], 1)


@pytest.mark.real("sockets")
async def test_listeners_are_counted_and_a_silent_stream_has_a_pulse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("web.event_stream.LISTENERS_MAX", 1)
    monkeypatch.setattr("web.event_stream.KEEPALIVE_SECONDS", 0.1)
    async with Room(tmp_path).serving() as (_, site):
        assert (await said(site.ask, "HEAD", "/api/v1/events")).status == 200
        async with listening(site) as stream:
            assert (await said(event, stream))[1] == "block"
            refused = await said(site.get, "/api/v1/events")
            assert (refused.status, refused.code) == (429, "too-many") and "retry-after" in refused.headers
            while not (await said(block, stream)).startswith(":"):
                pass
        status = 429
        while status == 429:  # until the peer has noticed that nobody listens
            async with listening(site) as stream:
                status = stream.status
        assert status == 200


@pytest.mark.real("sockets")
async def test_listeners_that_come_at_once_are_counted_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("web.event_stream.LISTENERS_MAX", 1)
    async with Room(tmp_path).serving() as (_, site):
        streams = await together(12, opened, site)
        assert sorted(stream.status for stream in streams) == [200] + 11 * [429]
        for stream in streams:
            stream.close()


@pytest.mark.real("sockets")
async def test_a_listener_that_does_not_read_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("web.event_stream.LISTENER_QUEUE_MAX", 2)
    monkeypatch.setattr("web.event_stream._Event.text", f"data: {'x' * (1 << 22)}\n\n")  # larger than socket buffers
    room, dropped, tell = Room(tmp_path), threading.Event(), EventStreams._tell

    def noted(listening: EventStreams, events: Any) -> None:
        if any(listener.queue.full() for listener in listening._listeners.values()):
            dropped.set()
        tell(listening, events)

    monkeypatch.setattr(EventStreams, "_tell", noted)
    async with room.serving() as (daemon, site):
        with socket.create_connection((site.host, site.port), timeout=60) as slow:
            slow.sendall(b"GET /api/v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            view = await room.project(daemon, tasks=1)
            api: Any = daemon.api
            states = itertools.cycle(("paused", "open"))
            while not dropped.is_set():  # one look may see the changes of several moves
                await api.set_project_phase(view.project, next(states))

            def drained() -> int:
                count = 0
                while part := slow.recv(1 << 20):
                    count += len(part)
                return count

            assert 0 < await said(drained) < 10 << 22, "the peer has closed the connection"


@pytest.mark.real("sockets")
async def test_a_peer_that_stops_ends_its_streams_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio_bridge, "SHUTDOWN_SECONDS", 30.0)  # after this time streams are cut off
    async with trio.open_nursery() as nursery:
        async with Room(tmp_path).serving() as (_, site):
            stream = await said(opened, site)
            assert (await said(event, stream))[1] == "block"
            nursery.start_soon(said, stream.read)  # reads to the end of the stream
            stopped = trio.current_time()
        assert trio.current_time() - stopped < asyncio_bridge.SHUTDOWN_SECONDS
    stream.close()


@pytest.mark.real("sockets")
async def test_health_and_metrics(monkeypatch: pytest.MonkeyPatch, room: Room) -> None:
    async with room.serving() as (daemon, site):
        await room.project(daemon, tasks=2)
        await enrolled(site, "ann")
        assert (await said(site.get, "/api/v2")).status == 404
        reply = await said(site.get, "/metrics")
        assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
        lines = reply.text.splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        assert {line.split()[2] for line in lines if line.startswith("# TYPE")} >= {name.partition("{")[0] for name in values}
        expected = {"healthy": 1, "members": 1, "voters": 1, "annotators": 1, "projects": 1, "statements_waiting": 0}
        assert {name: float(values[f"folkmoot_{name}"]) for name in expected} == expected
        assert 4 <= float(values["folkmoot_height"]) <= (await said(site.stats))["height"]
        assert values['folkmoot_http_calls_total{status="404"}'] == "1"
        status: StatusView = await daemon.api.status()
        assert (await said(site.get, "/healthz")).text == "ok\n" and not why_unhealthy(status)
        assert (
            why_unhealthy(replace(status, state="halted", halted="HALTED: the disk forgets"))
            == "halted: HALTED: the disk forgets"
        )
        assert "3 heights" in why_unhealthy(replace(status, state="behind", heights_behind=3))
        monkeypatch.setattr("peer.api.handlers.local_peer_handler.why_halted", lambda *given: "HALTED: another machine signs")
        while (ill := await said(site.get, "/healthz")).status == 200:  # noqa: ASYNC110
            await trio.sleep(0.05)  # the peer checks its health once a second
        assert (ill.status, ill.code) == (503, "unhealthy") and "another machine" in ill.body["detail"]


def look(height: int) -> dict[str, Any]:
    return {"height": height}


class Looks:
    """A feed whose looks end when the test ends them."""

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
                follows = await looks.asked.get()  # one of the two clients listens now
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
