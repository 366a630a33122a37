"""HTTPS, without which browsers create no keys: at a peer with a certificate, and behind nginx with `proxy_pass`."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

from peer.api.running_peer import RunningPeer
from tests.fuzz.http import free_port
from tests.peer.processes import Daemon as Process
from tests.peer.processes import poll
from tests.waiting import PATIENCE_SECONDS, in_time, patience_seconds
from tests.web.client import Site
from tests.web.room import Room, said
from tests.web.test_floods import served
from tests.web.test_watching import until

TLS = Path(__file__).with_name("tls")
CERTIFICATE, KEY = str(TLS / "cert.pem"), str(TLS / "key.pem")  # made for these tests, valid for a hundred years


async def told(daemon: RunningPeer) -> str:
    seen = 0
    while True:
        for event in await daemon.api.events(seen, PATIENCE_SECONDS):
            seen = event.number
            if event.kind == "serve":
                return event.text


def asked(address: str, method: str, path: str, body: Any = None, cookie: str = "") -> tuple[int, Message]:
    """Send a request and return its status and headers."""
    connection = http.client.HTTPSConnection(
        address, timeout=patience_seconds(), context=ssl.create_default_context(cafile=CERTIFICATE)
    )
    with closing(connection), in_time():
        connection.request(method, path, json.dumps(body) if body else None, {"Cookie": cookie} if cookie else {})
        reply = connection.getresponse()
        return reply.status, reply.headers


def address_in(text: str) -> str:
    scheme, _, address = text.removeprefix("web pages are served at ").rstrip("/").partition("://")
    assert scheme == "https"
    return address


@pytest.mark.real("sockets")
async def test_annotators_come_by_https_and_their_cookie_by_nothing_else(tmp_path: Path) -> None:
    async with Room(tmp_path).running(web_tls_cert=CERTIFICATE, web_tls_key=KEY) as daemon:
        address = address_in(await told(daemon))
        status, headers = await said(asked, address, "POST", "/api/v1/sign-up", {"name": "ann", "passphrase": "correct horse"})
        cookie = headers["Set-Cookie"]
        assert status == 201 and cookie.startswith("__Host-folkmoot=")
        assert {"secure", "path=/", "httponly"} <= {part.strip().lower() for part in cookie.split(";")} and "Domain" not in cookie
        assert (await said(asked, address, "GET", "/api/v1/session", None, cookie.split(";")[0]))[0] == 200
        assert (await said(asked, address, "GET", "/api/v1/session", None, cookie.split(";")[0].removeprefix("__Host-")))[
            0
        ] == 401, "one that plain HTTP could have set"


@pytest.mark.real("sockets")
async def test_a_browser_that_came_by_tls_comes_by_nothing_else(tmp_path: Path) -> None:
    async with Room(tmp_path).running(web_tls_cert=CERTIFICATE, web_tls_key=KEY) as daemon:
        address = address_in(await told(daemon))
        for path in ("/annotate", "/static/site.css", "/nothing", "/api/v1/network"):
            _, headers = await said(asked, address, "GET", path)
            assert int(headers["Strict-Transport-Security"].removeprefix("max-age=")) >= 15_768_000, path


def certificate_at(address: str) -> str:
    host, _, port = address.rpartition(":")
    with in_time():
        return ssl.get_server_certificate((host, int(port)), timeout=patience_seconds()).strip()


@pytest.mark.real("sockets")
async def test_the_certificate_is_read_again_on_sighup(tmp_path: Path) -> None:
    """The process receives a signal. Files that do not match each other leave the certificate unchanged."""
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    shutil.copy(CERTIFICATE, certificate)
    shutil.copy(KEY, key)
    async with served(tmp_path, None, "--web-tls-cert", str(certificate), "--web-tls-key", str(key)) as (daemon, site):
        address = f"{site.host}:{site.port}"
        assert await said(certificate_at, address) == certificate.read_text().strip()
        shutil.copy(TLS / "other-cert.pem", certificate)
        await hang_up(daemon, "kept the old certificate")
        assert await said(certificate_at, address) == Path(CERTIFICATE).read_text().strip()
        shutil.copy(TLS / "other-key.pem", key)
        await hang_up(daemon, "reloaded the certificate")
        assert await said(certificate_at, address) == certificate.read_text().strip()


async def hang_up(daemon: Process, follows: str) -> None:
    os.kill(daemon.pid, signal.SIGHUP)

    async def is_logged() -> bool:
        return follows in daemon.log

    await poll(is_logged)


@pytest.mark.real("sockets")
@pytest.mark.parametrize(
    ("certificate", "key", "what"),
    [
        (CERTIFICATE, "", "file '' does not exist"),
        ("/nowhere", KEY, "file '/nowhere' does not exist"),
        (KEY, KEY, "not a certificate"),
    ],
)
async def test_what_is_no_certificate_is_named_and_the_peer_goes_on(
    tmp_path: Path, certificate: str, key: str, what: str
) -> None:
    async with Room(tmp_path).running(web_tls_cert=certificate, web_tls_key=key) as daemon:
        said_so = await told(daemon)
        assert said_so.startswith("web pages are not served: ") and what in said_so and "web_tls_cert" in said_so
        assert (await daemon.api.status()).height >= 0


NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
FIRST_SECONDS = 30.0  # nginx that buffers the stream takes 60 s or more; unbuffered it takes 0.1 s


CONFIGURATION = """
daemon off; pid t/nginx.pid; error_log t/error.log; worker_processes 1;
events {{ worker_connections 64; }}
http {{ access_log off; client_body_temp_path t/b; proxy_temp_path t/p; fastcgi_temp_path t/f; uwsgi_temp_path t/u;
  scgi_temp_path t/s;
  server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://127.0.0.1:{behind}; }} }}
}}
"""


@contextmanager
def nginx(folder: Path, port: int, behind: int) -> Iterator[subprocess.Popen[bytes]]:
    (folder / "t").mkdir()
    configuration = folder / "nginx.conf"
    configuration.write_text(CONFIGURATION.format(folder=folder, port=port, behind=behind))
    assert NGINX is not None
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen([NGINX, "-p", str(folder), "-c", str(configuration)], stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def streamed(site: Site) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(site.host, site.port, timeout=FIRST_SECONDS)
    connection.request("GET", "/api/v1/events?live=1", headers={"Connection": "close"})
    return connection.getresponse()


@pytest.mark.real("nginx is a process")
@pytest.mark.skipif(NGINX is None, reason="nginx is not installed")
async def test_live_shows_its_first_figures_at_once_behind_nginx(tmp_path: Path) -> None:
    folder, port = tmp_path / "nginx", free_port()
    folder.mkdir()
    async with Room(tmp_path).serving() as (_, site):
        with nginx(folder, port, site.port) as process:
            before = Site("127.0.0.1", port)

            async def answers() -> bool:
                assert process.poll() is None, (folder / "output").read_text()
                try:
                    return (await said(before.get, "/live")).status == 200
                except OSError:
                    return False

            await poll(answers)
            stream = await said(streamed, before)
            assert (await said(until, stream, "live"))[2]["status"]["network"] == "lab"
            stream.close()
            assert (await said(before.get, "/metrics")).code == "unauthorized", "nginx asks for others"
