"""Attacks by a foreign page or host name on the browser of a signed-in person. None of them succeeds."""

from __future__ import annotations

import platform
import re
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import web
from clients.gateway.http_routes import PROGRAM
from curation import service
from curation.service.access_control import ANNOTATOR
from peer.features import FEATURES
from tests.notes.http_routes import READER
from tests.notes.listing import listed
from tests.web.client import Site
from tests.web.room import Room, enrolled, said
from tests.web.test_custody import browser, signed
from tests.web.test_routes import operator
from web.calls import REQUIRED
from web.routes import OPERATOR, ClientClass, Route
from web.site import load_site

PATH = "/api/v1/sign-out"  # a call that changes state
WEB, SERVICE = Path(web.__file__).parent, Path(service.__file__).parent
LISTENER = WEB / "asyncio_bridge.py"
NO_FILES = (
    *("../app.py", "..%2fapp.py", "%2e%2e/app.py", "%2e%2e%2fapp.py", "..%5capp.py", f"{WEB}/app.py", "%2fetc%2fpasswd"),
    *("", ".", "..", "%00", "site.css%00.js", "site.css/"),
)
ODD_HOSTS = (
    *("[::1", "", "a@127.0.0.1b", "a@127.0.0.1", "127.0.0.1/", "127.0.0.1?x", "localhost#x", "localhost:", "localhost:x"),
    *("localhost:99999", "localhost:1:2", "::1", "[localhost]", "[::1]x", "local host", "localhost,evil.example", "127.1"),
    *("0x7f.0.0.1", "2130706433", "localhost..", "[fe80::1%25eth0]", "127.0.0.1%00"),
)
MARKUP = re.compile(
    r"(inner|outer)HTML|insertAdjacent|document\.write|\beval\(|new Function|dangerouslySet|srcdoc|createContextual|DOMParser"
)
ADDRESS = re.compile(r"""["'`](https?:|wss?:)?//\w""")
CLIENT = re.compile(r"\b(ClientSession|urllib\.request|http\.client|urlopen|open_tcp_stream|open_connection|import socket)\b")


@pytest.mark.real("sockets")
async def test_defence_the_cookie_is_hidden_from_scripts_and_from_other_sites(tmp_path: Path) -> None:
    async with Room(tmp_path).serving() as (_, site):
        parts = {part.strip() for part in (await signed(site, "up")).headers["set-cookie"].lower().split(";")[1:]}
        assert {"httponly", "samesite=strict", "path=/", "max-age=86400"} == parts


@pytest.mark.real("sockets")
async def test_defence_a_session_is_new_at_each_sign_in(tmp_path: Path) -> None:
    async with Room(tmp_path).serving() as (_, site):
        first = await signed(site, "up")
        ann = browser(site, first)
        second = await said(site.ask, "POST", "/api/v1/sign-in", {"name": "ann", "passphrase": "correct horse battery"}, "", ann)
        assert second.headers["set-cookie"] != first.headers["set-cookie"]
        assert (await said(site.ask, "GET", "/api/v1/session", None, "", ann)).code == "unauthorized"
        assert (await said(site.ask, "GET", "/api/v1/session", None, "", browser(site, second))).status == 200


@pytest.mark.real("sockets")
@pytest.mark.parametrize(
    "changed", [{"X-Folkmoot": ""}, {"Origin": ""}, {"Origin": "http://evil.example"}, {"Origin": "null"}, {"Origin": "http://["}]
)
async def test_defence_a_foreign_page_changes_nothing_with_the_cookie(tmp_path: Path, changed: dict[str, str]) -> None:
    async with Room(tmp_path).serving() as (_, site):
        own = browser(site, await signed(site, "up"))
        assert (
            await said(site.ask, "POST", PATH, None, "", {name: value for name, value in (own | changed).items() if value})
        ).code == "forbidden"
        assert (await said(site.ask, "GET", "/api/v1/session", None, "", own)).status == 200
        assert (await said(site.ask, "POST", PATH, None, "", own)).status == 200


@pytest.mark.real("sockets")
async def test_defence_a_foreign_page_signs_nobody_in(tmp_path: Path) -> None:
    async with Room(tmp_path).serving() as (_, site):
        body = {"name": "ann", "passphrase": "correct horse battery"}
        for way in ("up", "in"):
            reply = await said(site.ask, "POST", f"/api/v1/sign-{way}", body, "", {"Origin": "http://evil.example"})
            assert reply.code == "forbidden" and "set-cookie" not in reply.headers


@pytest.mark.real("sockets")
async def test_defence_a_name_that_is_not_this_host_s_leads_nowhere(tmp_path: Path) -> None:
    async with Room(tmp_path).serving(web_host_names=("label.example",)) as (_, site):
        for host in ("127.0.0.1", f"localhost:{site.port}", "[::1]:80", "label.example", "LABEL.example.:443", "192.168.7.7"):
            assert (await status(site, host)) == 200, host
        for host in ("evil.example", "label.example.evil.example", "127.0.0.1.evil.example", *ODD_HOSTS):
            assert (await status(site, host)) == 421, host
        for lines in (b"", b"Host: localhost\r\nHost: localhost\r\n", b"Host: localhost\r\nHost: evil.example\r\n"):
            first = await said(raw, site, b"GET /api/v1/network HTTP/1.1\r\nConnection: close\r\n" + lines + b"\r\n")
            assert first.split()[1] in (b"400", b"421"), lines
        absolute = b"GET http://evil.example/api/v1/network HTTP/1.1\r\nConnection: close\r\nHost: localhost\r\n\r\n"
        assert (await said(raw, site, absolute)).split()[1] == b"421"


def raw(site: Site, data: bytes) -> bytes:
    with socket.create_connection((site.host, site.port), site.seconds) as connection:
        connection.sendall(data)
        answer = b""
        while more := connection.recv(1 << 16):
            answer += more
        return answer


@pytest.mark.real("sockets")
async def test_defence_no_reply_names_a_version(tmp_path: Path) -> None:
    version = platform.python_version().encode()
    async with Room(tmp_path).serving() as (_, site):
        for path in ("/annotate", "/static/site.css", "/nothing", "/api/v1/network", "/api/v1/tasks"):
            assert (await said(site.get, path)).headers["server"] == "folkmoot"
        for data in (b"no request\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET /api/v1/events HTTP/1.0\r\nHost: evil\r\n\r\n"):
            head = (await said(raw, site, data)).partition(b"\r\n\r\n")[0].lower()
            assert b"server: folkmoot" in head and b"aiohttp" not in head and version not in head, data


async def status(site: Site, host: str) -> int:
    return (await said(site.ask, "GET", "/api/v1/network", None, "", {"Host": host})).status


@pytest.mark.real("sockets")
async def test_defence_no_request_names_a_path_of_the_disk(tmp_path: Path) -> None:
    async with Room(tmp_path).serving() as (_, site):
        assert (await said(site.get, "/static/site.css")).status == 200
        for folder in ("static", "vendor"):
            for name in NO_FILES:
                reply = await said(site.get, f"/{folder}/{name}")
                assert reply.status in (400, 404), (folder, name, reply.status)


@pytest.fixture
def notes() -> Iterator[None]:
    """A third-party feature, defended like the built-in ones."""
    with listed():
        yield


@pytest.mark.real("sockets")
async def test_defence_no_route_of_any_feature_takes_what_it_does_not_declare(notes: None, tmp_path: Path) -> None:
    """Each route of all features, with other hosts, other methods, no token, others' tokens, foreign pages and bad bodies."""
    async with Room(tmp_path).serving() as (daemon, site):
        (ann,) = await enrolled(site, "ann")
        tokens = {OPERATOR: await operator(daemon), ANNOTATOR: await said(ann.token, site), READER: "hello"}
        # Any key of a program is valid while a peer has none. `tests.clients.test_gateway` uses others' keys.
        routes = [route for route in load_site(FEATURES).routes if route.client != PROGRAM]
        assert {route.client for route in routes} == {None, *tokens}
        for route in routes:
            for refusal in refusals(route, tokens):
                body, token, headers, replies, method, is_file = refusal
                reply = await said(site.ask, method or route.method, path_of(route, is_file), body, token, headers)
                assert (reply.status, reply.code) in replies, (route.path, refusal, reply)


def path_of(route: Route, is_file: bool) -> str:
    digits = {field.name: min(64, field.kind.schema.get("maxLength", 64)) for field in route.path_fields}
    path = route.path.format(**{name: count * "0" if name != "height" else "1" for name, count in digits.items()})
    return f"{path}?format=jsonl&kind=label" if is_file else path


class Refusal(NamedTuple):
    """A request, and its expected refusal."""

    body: Any
    token: str
    headers: dict[str, str]
    replies: tuple[tuple[int, str], ...]
    method: str = ""  # empty: the route's own method
    is_file: bool = False  # the body is a file


def refusals(route: Route, tokens: Mapping[ClientClass, str]) -> Iterator[Refusal]:
    """Return the requests that this route refuses."""
    token = tokens[route.client] if route.client else ""
    yield Refusal({}, token, {"Host": "evil.example"}, ((421, "misdirected"),))
    yield Refusal(None, token, {}, ((405, "method"),), "DELETE")
    if route.body_fields:
        yield Refusal(b" " * route.body_bytes_max + b"{}", token, {}, ((413, "too-large"),))
        for bad in (b"{", b"[]", b"\xff", b"null"):
            yield Refusal(bad, token, {}, ((400, "malformed"),))
    if route.sets_cookie:
        yield Refusal(complete_body(route), token, {"Origin": "http://evil.example"}, ((403, "forbidden"),))
    if route.client is None:
        return
    body = b"{}\n" if route.upload else complete_body(route)
    yield Refusal(body, "", {}, ((401, "unauthorized"),), is_file=route.upload)
    for wrong in ("x" * 32, *(other for client, other in tokens.items() if client != route.client)):
        yield Refusal(body, wrong, {}, ((401, "unauthorized"), (403, "forbidden")), is_file=route.upload)
    if route.method != "GET":
        cookie, ours = f"{route.client.cookie_name}={token}", {"X-Folkmoot": "1", "Origin": "http://localhost"}
        for changed in ({"X-Folkmoot": ""}, {"Origin": ""}, {"Origin": "http://evil.example"}, {"Origin": "null"}):
            headers = {"Host": "localhost", "Cookie": cookie, **ours, **changed}
            yield Refusal(
                body, "", {name: value for name, value in headers.items() if value}, ((403, "forbidden"),), is_file=route.upload
            )


def complete_body(route: Route) -> dict[str, Any] | None:
    """Return a well-formed body, so that only the sender is wrong."""
    required = {field.name: value_of(field.kind.schema) for field in route.body_fields if field.default is REQUIRED}
    return required if route.body_fields else None


def value_of(schema: dict[str, Any]) -> Any:
    if "enum" in schema:
        return schema["enum"][-1]
    if pattern := re.fullmatch(r"\^\[0-9a-f\]\{(\d+)\}\$", schema.get("pattern", "")):
        return int(pattern[1]) * "0"
    return {"integer": schema.get("minimum", 0), "array": [], "object": {}, "boolean": False, "string": "x"}[
        schema.get("type", "string")
    ]


def test_defence_text_never_becomes_markup_and_no_script_asks_another_address() -> None:
    scripts = [file for file in load_site(FEATURES).static_files.values() if file.suffix == ".js"]
    assert scripts
    for script in scripts:
        assert not MARKUP.search(script.read_text()) and not ADDRESS.search(script.read_text()), script.name


def test_defence_the_peer_fetches_no_address_that_people_name() -> None:
    for file in (*WEB.rglob("*.py"), *SERVICE.rglob("*.py")):
        assert set(CLIENT.findall(file.read_text())) == ({"import socket"} if file == LISTENER else set()), file
