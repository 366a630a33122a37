"""What a foreign page or a foreign name can do with the browser of somebody who is signed in here: nothing."""

from __future__ import annotations

import platform
import re
import socket
from pathlib import Path

import pytest

import web
from curation import service
from curation.service.http_routes import HTTP_ROUTES
from tests.web.client import Site
from tests.web.room import Room, said
from tests.web.test_custody import browser, signed
from tests.web.test_routes import operator
from web.app import BODY_BYTES_MAX
from web.routes import CORE_ROUTES

ROUTES = (*HTTP_ROUTES, *CORE_ROUTES)

PATH = "/api/v1/sign-out"  # a call that changes something
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
        cookie = (await signed(site, "up")).headers["set-cookie"].lower()
        parts = {part.strip() for part in cookie.split(";")[1:]}
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
        headers = {name: value for name, value in (own | changed).items() if value}
        assert (await said(site.ask, "POST", PATH, None, "", headers)).code == "forbidden"
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


@pytest.mark.real("sockets")
async def test_defence_a_large_body_is_not_read(tmp_path: Path) -> None:
    async with Room(tmp_path).serving() as (daemon, site):
        token = await operator(daemon)
        for route in ROUTES:
            if route.method == "POST" and route.body_fields:
                path = route.path.format(**{field.name: "00" * 32 for field in route.path_fields})
                reply = await said(site.ask, "POST", path, {"name": "x" * BODY_BYTES_MAX}, token)
                assert (reply.status, reply.code) == (413, "too-large"), path


def test_defence_text_never_becomes_markup_and_no_script_asks_another_address() -> None:
    scripts = list((WEB / "static").glob("*.js"))
    assert scripts
    for script in scripts:
        assert not MARKUP.search(script.read_text()) and not ADDRESS.search(script.read_text()), script.name


def test_defence_the_peer_fetches_no_address_that_people_name() -> None:
    for file in (*WEB.rglob("*.py"), *SERVICE.rglob("*.py")):
        found = set(CLIENT.findall(file.read_text()))
        assert found == ({"import socket"} if file == LISTENER else set()), file
