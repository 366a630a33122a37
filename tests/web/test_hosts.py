"""Limits per host at a serving peer: sign-up, sign-in, streams, and the identity of a host behind a proxy."""

from __future__ import annotations

import http.client
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from curation.service.annotators import session_api
from peer.api.running_peer import RunningPeer
from tests.waiting import patience
from tests.web.client import Person, Reply, Site
from tests.web.room import Room, enrolled, said
from tests.web.test_routes import operator
from web import event_stream

pytestmark = pytest.mark.real("hosts are addresses of sockets")

HERE = "127.0.0.1"
WORDS = "correct horse battery"


def at(site: Site, source: str) -> Site:
    return replace(site, source=source)


@asynccontextmanager
async def served(folder: Path, sign_up: str = "open", **more: Any) -> AsyncIterator[tuple[RunningPeer, Site]]:
    async with Room(folder).serving(sign_up, **more) as (daemon, site):
        await said(lambda: site.network)  # fetched once, then cached
        yield daemon, site


async def signed(site: Site, way: str, name: str, passphrase: str = WORDS) -> Reply:
    return await said(site.ask, "POST", f"/api/v1/sign-{way}", {"name": name, "passphrase": passphrase})


def enrolment(site: Site, name: str, custodial: bool) -> dict[str, Any]:
    person = Person(name)
    signature = person.sign(site.network["chain_id"], "enrol", name, site.peer_key, custodial)
    return {"key": person.key.hex(), "name": name, "custodial": custodial, "signature": signature.hex()}


async def test_a_host_enrols_so_many_and_others_still_come_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_api, "ENROLMENT_BURST", 6)
    async with served(tmp_path) as (_, site):
        statuses, stranger = Counter[int](), at(site, "127.0.0.66")
        for number in range(4):
            for custodial in (False, True):
                body = enrolment(stranger, f"s{number}", custodial)
                statuses[(await said(stranger.ask, "POST", "/api/v1/annotators", body)).status] += 1
        assert statuses == {201: 6, 429: 2}
        refused = await signed(stranger, "up", "sue")
        assert (refused.status, refused.code) == (429, "too-many") and int(refused.headers["retry-after"]) > 0
        assert (await signed(site, "up", "ann")).status == 201
        again = enrolment(site, "ben", False)
        for _ in range(9):  # a decided enrolment costs nothing
            assert (await said(site.ask, "POST", "/api/v1/annotators", again)).status == 201


async def test_where_sign_up_is_invited_the_invitation_is_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_api, "ENROLMENT_BURST", 1)
    async with served(tmp_path, "invited", sign_up_invitations=("a", "b", "c")) as (_, site):
        for code in "abc":
            assert (await said(Person(code).enrol, site, code)).status == 201


async def test_a_proxy_of_the_settings_says_for_whom_it_asks_and_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_api, "ENROLMENT_BURST", 1)
    async with served(tmp_path, web_trusted_proxies=(HERE,)) as (_, site):

        async def enrol(source: str, forwarded: str) -> int:
            headers = {"X-Forwarded-For": forwarded} if forwarded else {}
            return (
                await said(at(site, source).ask, "POST", "/api/v1/annotators", enrolment(site, "ann", False), "", headers)
            ).status

        cases = [
            (HERE, "198.51.100.1", 201), (HERE, "198.51.100.1", 429), (HERE, "203.0.113.9, 198.51.100.1", 429),
            (HERE, "198.51.100.2:4711", 201), (HERE, "2001:db8::1", 201), (HERE, "[2001:db8::2]:80", 429),
            (HERE, "2001:db8:0:1::1", 201), (HERE, f"198.51.100.3, {HERE}", 201), (HERE, "198.51.100.3", 429),
            (HERE, "unknown", 201), (HERE, "", 429),
            ("127.0.0.9", "198.51.100.4", 201), ("127.0.0.9", "198.51.100.5", 429),
        ]  # fmt: skip
        for source, forwarded, status in cases:
            assert await enrol(source, forwarded) == status, (source, forwarded)
        for source, is_secure in ((HERE, True), ("127.0.0.9", False)):
            reply = await said(at(site, source).ask, "GET", "/annotate", None, "", {"X-Forwarded-Proto": "https"})
            assert ("strict-transport-security" in reply.headers) is is_secure, source


async def test_a_proxy_that_the_settings_do_not_name_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with served(tmp_path) as (_, site):
        for _ in range(3):
            await said(site.ask, "GET", "/annotate", None, "", {"X-Forwarded-For": "198.51.100.1"})
        assert caplog.text.count("add it to `web_trusted_proxies`") == 1


async def test_strangers_that_guess_do_not_keep_the_owner_of_an_account_out(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, site):
        assert (await signed(site, "up", "ann")).status == 201
        stranger, statuses = at(site, "127.0.0.66"), Counter[int]()
        while not statuses[429]:  # on a slow machine the delay after the fifth attempt is over before the next one
            assert statuses.total() < 4 * session_api.WRONG_PASSPHRASES_FREE, statuses
            statuses[(await signed(stranger, "in", "ann", "wrong horse battery")).status] += 1
        assert statuses[401] >= session_api.WRONG_PASSPHRASES_FREE
        assert (await signed(site, "in", "ann")).status == 201
        assert (await signed(stranger, "in", "ann")).status == 429


async def test_challenges_of_a_host_and_sessions_of_a_person_push_out_their_own_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_api, "CHALLENGES_OF_HOST_MAX", 2)
    monkeypatch.setattr(session_api, "SESSIONS_OF_ANNOTATOR_MAX", 2)
    async with served(tmp_path) as (_, site):
        ann, bob = await enrolled(site, "ann", "bob")
        stranger = at(site, "127.0.0.66")
        mine = (await said(ann.challenge, site)).body
        old, *others = [(await said(person.challenge, stranger)).body for person in (bob, ann, ann)]
        begun = [await said(ann.begin, site, each["nonce"], each["expires_ms"]) for each in (mine, *others)]
        assert [reply.status for reply in begun] == [201, 201, 201]
        assert (await said(bob.begin, site, old["nonce"], old["expires_ms"])).code == "unauthorized"
        statuses = [(await said(site.get, "/api/v1/session", reply.body["token"])).status for reply in begun]
        assert (
            statuses == [401, 200, 200] and (await said(site.get, "/api/v1/session", await said(bob.token, site))).status == 200
        )


async def test_a_host_has_so_many_streams_and_loses_the_oldest_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "LISTENERS_OF_HOST_MAX", 3)
    monkeypatch.setattr(event_stream, "LISTENERS_MAX", 4)
    async with served(tmp_path) as (_, site):
        strangers = [await said(stream, site, "127.0.0.66") for _ in range(4)]
        assert [reply.status for reply in strangers] == [200, 200, 200, 429]
        others = [await said(stream, site, source) for source in ("127.0.0.5", "127.0.0.6", "127.0.0.7")]
        assert [reply.status for reply in others] == 3 * [200]
        assert (await said(stream, site, "127.0.0.8")).status == 429, "four hosts have one each"
        await said(read_all, strangers[0])  # the stream ends
        await said(read_all, strangers[1])
        assert await said(others[2].readline)
        for reply in (*strangers, *others):
            reply.close()


def stream(site: Site, source: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(site.host, site.port, timeout=site.seconds, source_address=(source, 0))
    connection.request("GET", "/api/v1/events", headers={"Connection": "close"})
    response = connection.getresponse()
    if response.status == 200:
        response.readline()
    return response


def read_all(response: http.client.HTTPResponse) -> None:
    try:
        response.read()
    except http.client.IncompleteRead:
        pass


async def test_metrics_are_of_this_machine_and_of_operators(tmp_path: Path) -> None:
    async with served(tmp_path) as (daemon, site):
        assert (await said(site.get, "/metrics")).status == 200
        for name, value in (("X-Forwarded-For", "198.51.100.1"), ("Forwarded", "for=198.51.100.1"), ("Via", "1.1 proxy")):
            refused = await said(site.ask, "GET", "/metrics", None, "", {name: value})
            assert (refused.status, refused.code) == (401, "unauthorized")
            assert (await said(site.ask, "GET", "/metrics", None, await operator(daemon), {name: value})).status == 200
        assert (await said(by_http_1_0, site)).startswith(b"HTTP/1.0 401")


def by_http_1_0(site: Site) -> bytes:
    """Send a request as nginx does in its default configuration, and return the answer."""
    with socket.create_connection((site.host, site.port), site.seconds) as connection:
        connection.sendall(b"GET /metrics HTTP/1.0\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        answer = b""
        while data := connection.recv(1 << 16):
            answer += data
        return answer


async def test_a_host_reads_in_one_file_at_a_time_and_others_one_beside_it(tmp_path: Path) -> None:
    async with served(tmp_path) as (daemon, site):
        token = await operator(daemon)
        path = "/api/v1/projects/check?format=jsonl&kind=label&options=glad%0Asad"
        with socket.create_connection((site.host, site.port), site.seconds, ("127.0.0.66", 0)) as slow:
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\nContent-Length: 100\r\n\r\n{{"
            await said(slow.sendall, head.encode())
            with patience():
                reply = await said(at(site, "127.0.0.66").ask, "POST", path, b'{"text": "a"}', token)
                while reply.status == 200:  # the slow client has not read yet
                    reply = await said(at(site, "127.0.0.66").ask, "POST", path, b'{"text": "a"}', token)
            assert (reply.status, reply.code) == (429, "too-many")
            assert (await said(site.ask, "POST", path, b'{"text": "a"}', token)).status == 200
