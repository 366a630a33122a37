"""The programs that a gateway serves, by the headers and the addresses of their requests."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import HttpVersion10, HttpVersion11, web
from aiohttp.test_utils import make_mocked_request

from clients.gateway.http_routes import PROGRAM
from clients.gateway.tinker_api import LOCAL_PROGRAMS
from storage.api_key_store import ApiKeyStore
from tests.clients.test_tinker_api import ANNA, gateway, refusal
from web import header_trust
from web.calls import Credentials

HERE, STRANGER, PROXY = "127.0.0.1", "192.0.2.7", "127.0.0.8"


def credentials(remote: str, key: str = "tml-any", version: Any = HttpVersion11, **headers: str) -> Credentials:
    """Return the credentials that the server reads from a request of this address."""
    application = web.Application()
    application[header_trust.PROXIES] = (PROXY,)
    transport: Any = SimpleNamespace(get_extra_info=lambda name, default=None: (remote, 1) if name == "peername" else default)
    named = {"X-API-Key": key} | {name.replace("_", "-"): value for name, value in headers.items()}
    request = make_mocked_request("POST", "/", named, version=version, app=application, transport=transport)
    return header_trust.read_credentials(request, PROGRAM, ())


@pytest.mark.parametrize("remote", [HERE, "127.9.9.9", "::1", "::ffff:127.0.0.1"])
async def test_a_peer_without_keys_serves_programs_on_its_machine(tmp_path: Path, remote: str) -> None:
    async with gateway(tmp_path) as program:
        assert await program.api.authorize(credentials(remote)) is LOCAL_PROGRAMS


@pytest.mark.parametrize(
    "stranger",
    [
        credentials(STRANGER),
        credentials("2001:db8::1"),
        credentials("::"),
        credentials(""),
        credentials(HERE, X_Forwarded_For=STRANGER),
        credentials("::1", X_Forwarded_For=STRANGER),
        credentials(HERE, X_Forwarded_For=HERE),
        credentials(PROXY, X_Forwarded_For=HERE),
        credentials(PROXY, X_Forwarded_For=STRANGER),
        credentials(STRANGER, X_Forwarded_For=HERE),
        credentials(HERE, Forwarded=f"for={STRANGER}"),
        credentials(HERE, Via="1.1 proxy"),
        credentials(HERE, X_Real_IP=STRANGER),
        credentials(HERE, version=HttpVersion10),  # nginx without settings
    ],
)
async def test_a_peer_without_keys_serves_no_other_machine_nor_a_proxy(tmp_path: Path, stranger: Credentials) -> None:
    async with gateway(tmp_path) as program:
        problem = await refusal(program.api.authorize(stranger))
        assert problem.code == "unauthorized" and "has no API keys" in problem.detail and "proxy" in problem.detail


async def test_a_peer_with_keys_serves_their_programs_alone(tmp_path: Path) -> None:
    async with gateway(tmp_path) as program:
        store = ApiKeyStore(tmp_path / "keys.sqlite")
        secret = store.create_key(ANNA)
        for remote in (HERE, "::1", STRANGER, PROXY):
            assert (await program.api.authorize(credentials(remote, secret))).name == "anna"
            assert (await program.api.authorize(credentials(remote, secret, X_Forwarded_For=STRANGER))).name == "anna"
        for wrong in ("tml-any", secret + "x"):
            assert "unknown API key" in (await refusal(program.api.authorize(credentials(HERE, wrong)))).detail
        assert "unknown API key" in (await refusal(program.api.authorize(Credentials("", HERE, True)))).detail
        store.revoke_key("anna")
        assert "unknown API key" in (await refusal(program.api.authorize(credentials(HERE, secret)))).detail
