"""What strangers may send, for a short while; `python -m tests.fuzz.http --seconds 120` looks further."""

from __future__ import annotations

import gzip
import logging
import re
from pathlib import Path
from random import Random

import pytest

from curation.rpc import CurationRpc
from peer.features import FEATURES
from tests.fuzz import http
from tests.web.client import Person, Site
from tests.web.room import Room, said
from web.routes import Route
from web.site import load_site

SITE = load_site(FEATURES)

SECONDS = 2.0


@pytest.mark.real("sockets")
async def test_no_request_is_the_peer_s_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    room = Room(tmp_path)
    async with room.serving() as (daemon, site):
        api: CurationRpc = daemon.api  # type: ignore[assignment]
        view = await room.project(daemon, tasks=200)
        known = await said(http.known_at, site, view.project, await api.create_web_token())
        seen = await http.hammer(known, SECONDS, seed=1)
        if seen.requests <= 50:  # a busy machine
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
    """A new call is fuzzed from its first day."""
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
