"""Annotators are served over https where the peer has a certificate: browsers keep keys of their own there alone."""

from __future__ import annotations

import http.client
import json
import ssl
from pathlib import Path

import pytest

from peer.daemon.daemon import Daemon
from tests.web.room import SECONDS_MAX, Room, said

TLS = Path(__file__).with_name("tls")
CERTIFICATE, KEY = str(TLS / "cert.pem"), str(TLS / "key.pem")  # made for these tests, valid for a hundred years


async def told(daemon: Daemon) -> str:
    seen = 0
    while True:
        for event in await daemon.api.events(seen, SECONDS_MAX):
            seen = event.number
            if event.kind == "serve":
                return event.text


def signed_up(address: str) -> tuple[int, str]:
    context = ssl.create_default_context(cafile=CERTIFICATE)
    connection = http.client.HTTPSConnection(address, timeout=SECONDS_MAX, context=context)
    try:
        connection.request("POST", "/api/v1/sign-up", json.dumps({"name": "ann", "passphrase": "correct horse"}))
        reply = connection.getresponse()
        return reply.status, reply.headers["Set-Cookie"]
    finally:
        connection.close()


async def test_annotators_come_by_https_and_their_cookie_by_nothing_else(tmp_path: Path) -> None:
    async with Room(tmp_path).running(web_tls_cert=CERTIFICATE, web_tls_key=KEY) as daemon:
        scheme, _, address = (await told(daemon)).removeprefix("annotators are served at ").rstrip("/").partition("://")
        assert scheme == "https"
        status, cookie = await said(signed_up, address)
        assert status == 201 and "secure" in cookie.lower()


@pytest.mark.parametrize(
    ("certificate", "key", "what"),
    [(CERTIFICATE, "", "there is no file ''"), ("/nowhere", KEY, "there is no file '/nowhere'"), (KEY, KEY, "no certificate")],
)
async def test_what_is_no_certificate_is_named_and_the_peer_goes_on(
    tmp_path: Path, certificate: str, key: str, what: str
) -> None:
    async with Room(tmp_path).running(web_tls_cert=certificate, web_tls_key=key) as daemon:
        said_so = await told(daemon)
        assert said_so.startswith("annotators are not served: ") and what in said_so and "web_tls_cert" in said_so
        assert (await daemon.api.status()).height >= 0
