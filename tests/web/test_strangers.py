"""What strangers may send, for a short while; `python -m tests.fuzz.http --seconds 120` looks further."""

from __future__ import annotations

import gzip
import logging
from pathlib import Path

import pytest

from curation.calls import CurationCalls
from tests.fuzz import http
from tests.web.client import Site
from tests.web.room import Room, said

SECONDS = 2.0


async def test_no_request_is_the_peer_s_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    room = Room(tmp_path)
    async with room.serving() as (daemon, site):
        api: CurationCalls = daemon.api  # type: ignore[assignment]
        view = await room.project(daemon, tasks=200)
        known = await said(http.known_at, site, view.project, await api.web_token())
        seen = await http.hammer(known, SECONDS, seed=1)
        assert not seen.problems and seen.requests > 50 and {200, 400} <= seen.statuses.keys()
        assert (await said(site.get, "/healthz")).status == 200
    assert not [record for record in caplog.records if record.exc_info and record.levelno >= logging.ERROR]


async def test_a_body_that_is_not_encoded_as_it_says_is_malformed(tmp_path: Path) -> None:
    async with Room(tmp_path).serving() as (_, site):
        for data, code in ((b"no gzip", "malformed"), (gzip.compress(bytes(1 << 20)), "too-large")):
            assert await said(_encoded, site, data) == code


def _encoded(site: Site, data: bytes) -> str:
    return site.ask("POST", "/api/v1/challenges", data, headers={"Content-Encoding": "gzip"}).code


async def test_an_expectation_that_is_no_text_is_refused(tmp_path: Path) -> None:
    async with Room(tmp_path).serving() as (_, site):
        for method, path in (("GET", "/api/stats"), ("GET", "/nothing"), ("CONNECT", "elsewhere")):
            for expectation in (b"\xff\xfe", b"everything"):
                reply = await said(site.ask, method, path, None, "", {"Expect": expectation})
                assert reply.status == 417, path
        assert (await said(site.ask, "GET", "/api/stats", None, "", {"Expect": "100-continue"})).status == 200
        assert (await said(site.get, "/nothing")).code == "not-found"
        assert (await said(site.ask, "DELETE", "/api/stats")).code == "method"
