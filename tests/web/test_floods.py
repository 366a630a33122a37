"""Strangers that fill the web port or send arbitrary data. `python -m tests.fuzz.http --seconds 120` searches longer."""

from __future__ import annotations

import gzip
import logging
import re
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from curation.rpc import CurationRpc
from peer.features import FEATURES
from tests.fuzz import http
from tests.peer.processes import Daemon, command, daemons, poll
from tests.waiting import in_time
from tests.web.client import Person, Site
from tests.web.half_requests import connected, strangers
from tests.web.room import Room, said
from web import asyncio_bridge, connection_limits
from web.app import _read
from web.asyncio_bridge import _is_ours
from web.routes import Route
from web.site import load_site

SERVING = ("--role", "annotator", "--web-listen", "127.0.0.1:0", "--sign-up", "open", "--listen", "127.0.0.1:0")


@asynccontextmanager
async def served(folder: Path, descriptors_max: int | None = None, *more: str) -> AsyncIterator[tuple[Daemon, Site]]:
    """Run a peer in its own process, alone in its network, that serves annotators."""
    directory = folder / "peer"
    status, _, complaint = command("init", "--network", "flood", "--listen", "127.0.0.1:0", "--data-dir", str(directory))
    assert status == 0, complaint
    with daemons([directory]) as (daemon,):
        daemon.start("run", *SERVING, *more, descriptors_max=descriptors_max)
        await daemon.answers()
        address = directory / "services" / "serve" / "address"

        async def is_served() -> bool:
            return address.is_file() and bool(address.read_text())

        await poll(is_served)
        host, _, port = address.read_text().partition("://")[2].rpartition(":")
        yield daemon, Site(host, int(port))


async def decides(daemon: Daemon, site: Site, name: str) -> None:
    """Assert that a page answers, a person enrols, and a block is decided for the enrolment."""
    before = (await daemon.client.status()).height
    assert (await said(site.get, "/annotate")).status == 200
    reply = await said(Person(name).enrol, site)
    assert reply.status == 201, reply
    assert (await daemon.client.status()).height > before


@pytest.mark.real("descriptors of a daemon's process run out, by real sockets")
@pytest.mark.parametrize(("descriptors", "half_requests", "hosts"), [(1_024, 5_000, 1), (1_024, 2_000, 300), (256, 1_000, 40)])
async def test_half_requests_end_no_peer_and_shut_out_no_visitor(
    tmp_path: Path, descriptors: int, half_requests: int, hosts: int
) -> None:
    async with served(tmp_path, descriptors) as (daemon, site):
        await decides(daemon, site, "before")
        with strangers(site.port, half_requests, hosts) as processes:
            await decides(daemon, site, "meanwhile")
            assert await trio.to_thread.run_sync(connected, processes) == half_requests
            await decides(daemon, site, "then")
            assert descriptors_open(daemon) < descriptors * 3 // 4, "descriptors are left for the ledger"
        await decides(daemon, site, "after")
        assert (await daemon.client.status()).halted == ""
        assert "Too many open files" not in daemon.log


@pytest.mark.real("descriptors of a daemon's process run out, by real sockets")
async def test_silent_connections_to_any_port_leave_descriptors_for_the_ledger(tmp_path: Path) -> None:
    """Each port (peers, monitors, annotators) has its own share of descriptors."""
    async with served(tmp_path, 256, "--metrics", "127.0.0.1:0") as (daemon, site):
        listening = (await daemon.client.status()).listen_addresses[0]
        monitors = (daemon.directory / "services" / "metrics" / "address").read_text()
        ports = [int(address.rpartition(":")[2]) for address in (listening, monitors)]
        with (
            strangers(ports[0], 300, 30, "silent") as peers,
            strangers(ports[1], 300, 30, "silent") as askers,
            strangers(site.port, 300, 30, "silent") as visitors,
        ):
            for processes in (peers, askers, visitors):
                assert await trio.to_thread.run_sync(connected, processes) == 300
            await decides(daemon, site, "meanwhile")
            assert descriptors_open(daemon) < 192
        assert "Too many open files" not in daemon.log


def descriptors_open(daemon: Daemon) -> int:
    return len(list(Path(f"/proc/{daemon.pid}/fd").iterdir()))


@pytest.mark.real("descriptors of a daemon's process run out, by real sockets")
@pytest.mark.parametrize(
    ("half", "bound"),
    [
        (b"", "HEADER_SECONDS"),
        (b"GET /api/v1/network HTTP/1.1\r\nHost: localhost\r\nX-Half: ", "HEADER_SECONDS"),
        (b"POST /api/v1/challenges HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{", "REQUEST_SECONDS"),
        (b"GET /api/v1/network HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n", "HEADER_SECONDS"),
        (b"GET /api/v1/network HTTP/1.1\r\nHost: localhost\r\n\r\n", "HEADER_SECONDS"),
    ],
    ids=["nothing", "header", "body", "body that nobody reads", "keep-alive"],
)
async def test_a_connection_that_waits_too_long_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, half: bytes, bound: str
) -> None:
    for name in ("HEADER_SECONDS", "REQUEST_SECONDS"):
        monkeypatch.setattr(connection_limits, name, 0.5 if name == bound else 3_600.0)
    monkeypatch.setattr(asyncio_bridge, "SWEEP_SECONDS", 0.1)
    async with Room(tmp_path).serving() as (_, site):
        assert await said(ends, site, half)
        assert (await said(site.get, "/annotate")).status == 200


@pytest.mark.real("descriptors of a daemon's process run out, by real sockets")
async def test_a_connection_that_is_gone_leaves_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[connection_limits.ConnectionSlots]()

    class Places(connection_limits.ConnectionSlots):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(asyncio_bridge, "ConnectionSlots", Places)
    monkeypatch.setattr(asyncio_bridge, "SWEEP_SECONDS", 3_600.0)
    async with Room(tmp_path).serving() as (_, site):
        for _ in range(3):
            assert (await said(site.get, "/annotate")).status == 200

        async def is_left() -> bool:
            return not made[0]._open

        await poll(is_left)


class ClosedBody:
    """The body of a request whose connection was closed before it was read, as aiohttp has it."""

    def iter_chunked(self, size: int) -> ClosedBody:
        return self

    def __aiter__(self) -> ClosedBody:
        return self

    async def __anext__(self) -> bytes:
        raise RuntimeError("Connection closed.")


async def test_a_body_of_a_closed_connection_is_no_error_in_the_log() -> None:
    request: Any = SimpleNamespace(content=ClosedBody(), transport=None)
    with pytest.raises(ConnectionError) as caught:
        await _read(request, 9, "")
    failure = (ConnectionError, caught.value, None)
    assert not _is_ours(logging.LogRecord("site", logging.ERROR, "", 0, "Error handling request", (), failure))
    request.transport = object()
    with pytest.raises(RuntimeError, match="Connection closed"):
        await _read(request, 9, "")


def ends(site: Site, half: bytes) -> bool:
    """Return True once the peer has closed the connection."""
    with in_time(), socket.create_connection((site.host, site.port), site.seconds) as connection:
        connection.sendall(half)
        try:
            while connection.recv(1 << 16):
                pass
        except ConnectionResetError:
            pass
        return True


@pytest.mark.real("descriptors of a daemon's process run out, by real sockets")
async def test_a_peer_without_any_descriptor_left_goes_on(tmp_path: Path) -> None:
    async with served(tmp_path, None, "--metrics", "127.0.0.1:0") as (daemon, site):
        before = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (3, before[1]))  # each open() and accept() fails from now on
        with strangers(site.port, 40, 1):

            async def has_failed() -> bool:
                assert daemon.process is not None and daemon.process.poll() is None, daemon.log
                return "Too many open files" in daemon.log

            await poll(has_failed)
            resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, before)
            await decides(daemon, site, "then")


SITE = load_site(FEATURES)

SECONDS = 2.0


@pytest.mark.real("sockets")
async def test_no_request_is_the_peer_s_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    room = Room(tmp_path)
    async with room.serving() as (daemon, site):
        api: CurationRpc = daemon.api  # type: ignore[assignment]
        known = await said(http.known_at, site, (await room.project(daemon, tasks=200)).project, await api.create_web_token())
        seen = await http.hammer(known, SECONDS, seed=1)
        if seen.requests <= 50:  # a busy machine makes fewer
            seen = await http.hammer(known, 10 * SECONDS, seed=1)
        assert not seen.problems and seen.requests > 50 and {200, 400} <= seen.statuses.keys()
        assert (await said(site.get, "/healthz")).status == 200
    assert not [record for record in caplog.records if record.exc_info and record.levelno >= logging.ERROR]


@pytest.mark.real("sockets")
async def test_a_body_that_is_not_encoded_as_it_says_is_malformed(tmp_path: Path) -> None:
    async with Room(tmp_path).serving() as (_, site):
        for data, code in ((b"no gzip", "malformed"), (gzip.compress(bytes(1 << 20)), "too-large")):
            assert await said(_encoded, site, data) == code


def _encoded(site: Site, data: bytes) -> str:
    return site.ask("POST", "/api/v1/challenges", data, headers={"Content-Encoding": "gzip"}).code


@pytest.mark.real("sockets")
async def test_an_expectation_that_is_no_text_is_refused(tmp_path: Path) -> None:
    async with Room(tmp_path).serving() as (_, site):
        for method, path in (("GET", "/api/stats"), ("GET", "/nothing"), ("CONNECT", "elsewhere")):
            for expectation in (b"\xff\xfe", b"everything"):
                assert (await said(site.ask, method, path, None, "", {"Expect": expectation})).status == 417, path
        assert (await said(site.ask, "GET", "/api/stats", None, "", {"Expect": "100-continue"})).status == 200
        assert (await said(site.get, "/nothing")).code == "not-found"
        assert (await said(site.ask, "DELETE", "/api/stats")).code == "method"


def test_every_call_is_among_what_strangers_send() -> None:
    """Each new call is fuzzed from its first day."""
    person, site = Person("ann"), Site("127.0.0.1", 1)
    site._network = {"chain_id": "00" * 32, "peer_key": "00" * 32}
    known = http.Known(site, person, "token", "operator", "00" * 32, ("11" * 32,))
    random = Random(1)
    sent = {(method, path.partition("?")[0]) for method, path, _ in (http.requests_of(known, random) for _ in range(20_000))}

    def is_sent(route: Route) -> bool:
        pattern = re.compile(re.sub(r"\{\w+\}", "[^/]+", route.path))
        return any(method == route.method and pattern.fullmatch(path) for method, path in sent)

    pages = {page.path for page in SITE.pages}
    assert [
        route.path for route in SITE.routes if not is_sent(route) and route.path not in pages and route.operation != "vendor"
    ] == []
