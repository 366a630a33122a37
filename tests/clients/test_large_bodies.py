"""Bodies of some megabytes, as requests for gradients have them. Only programs with a key may send them, up to a bound."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from clients.gateway.http_routes import BODY_BYTES_MAX
from storage.api_key_store import ApiKey, ApiKeyStore
from tests.peer.processes import poll
from tests.waiting import in_time
from tests.web.client import Site
from tests.web.room import Room, said
from web import app
from web.calls import HttpProblem
from web.large_bodies import LargeBodies

ANNA = ApiKey("anna", 1, 2, 1 << 30, 1 << 30)
LENGTHS = (
    f"Content-Length: {BODY_BYTES_MAX}",
    "Transfer-Encoding: chunked",
    "Content-Length: 100\r\nContent-Encoding: gzip",
)


def begin_call(site: Site, call: str, key: str, length: str) -> socket.socket:
    """Send the header of a call. Its body is not sent."""
    connection = socket.create_connection((site.host, site.port), site.seconds)
    header = f"POST /tinker/api/v1/{call} HTTP/1.1\r\nHost: localhost\r\nX-API-Key: {key}\r\n{length}\r\n\r\n"
    connection.sendall(header.encode())
    return connection


def reply_without_body(site: Site, call: str, key: str, length: str) -> str:
    with in_time(), begin_call(site, call, key, length) as connection:
        return connection.recv(1 << 16).decode()


@pytest.mark.real("sockets")
@pytest.mark.parametrize("call", ["forward_backward", "asample"])
async def test_a_key_is_checked_before_a_large_body_is_read(tmp_path: Path, call: str) -> None:
    async with Room(tmp_path).serving() as (daemon, site):
        ApiKeyStore(daemon.directory.api_keys).create_key(ANNA)
        for length in LENGTHS:
            reply = await said(reply_without_body, site, call, "tml-wrong", length)
            assert reply.startswith("HTTP/1.1 401 ") and "unknown API key" in reply, length


@pytest.mark.real("sockets")
async def test_large_bodies_in_flight_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[LargeBodies]()

    class FewBodies(LargeBodies):
        def __init__(self) -> None:
            super().__init__(4 * BODY_BYTES_MAX)
            made.append(self)

    monkeypatch.setattr(app, "LargeBodies", FewBodies)
    with ExitStack() as begun:
        async with Room(tmp_path).serving() as (daemon, site):
            keys = ApiKeyStore(daemon.directory.api_keys)
            anna, ben = keys.create_key(ANNA), keys.create_key(replace(ANNA, name="ben"))
            for length in LENGTHS[:2]:
                begun.enter_context(await said(begin_call, site, "forward_backward", anna, length))

            async def are_reserved() -> bool:
                return made[0]._reserved == {anna: 2 * BODY_BYTES_MAX}

            await poll(are_reserved)
            refused = await said(reply_without_body, site, "forward_backward", anna, LENGTHS[0])
            assert refused.startswith("HTTP/1.1 429 ") and "send this one again" in refused and "Retry-After: 1" in refused
            path = "/tinker/api/v1/forward_backward"
            assert (await said(site.ask, "POST", path, b"small", anna)).status == 400, "small bodies need no reservation"
            assert (await said(site.ask, "POST", path, bytes(BODY_BYTES_MAX), ben)).status == 400, "half of the rest is for ben"
            begun.close()

            async def are_free() -> bool:
                return not made[0]._reserved

            await poll(are_free)


def test_a_client_has_half_of_the_bytes_that_others_leave() -> None:
    bodies = LargeBodies(100)

    def most(token: str) -> int:
        """Return the largest body that the client may send."""

        def fits(count: int) -> bool:
            try:
                with bodies.reserve_bytes(token, count):
                    return True
            except HttpProblem as problem:
                assert (problem.code, problem.retry_after) == ("too-many", 1)
                return False

        return max(filter(fits, range(101)), default=0)

    with bodies.reserve_bytes("a", 30):
        assert (most("a"), most("b")) == (20, 35)
        with bodies.reserve_bytes("b", 35), bodies.reserve_bytes("c", 17):
            assert (most("a"), most("b"), most("c"), most("d")) == (0, 0, 0, 9)
    assert most("a") == 50 and not bodies._reserved
