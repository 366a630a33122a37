"""What a foreign page, or a foreign name of this host, must not do with the browser of somebody who is signed in here."""

from __future__ import annotations

from collections.abc import Collection
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

from aiohttp import web

from web.problems import Problem

COOKIES: Final = {"annotator": "folkmoot", "operator": "folkmoot-operator"}  # one browser may be both
HEADER: Final = "X-Folkmoot"  # that no form sends, and no foreign script without asking first
SAFE: Final = ("GET", "HEAD", "OPTIONS")


def require_host(request: web.Request, names: Collection[str]) -> None:
    """Against DNS rebinding: a name that leads to this address for a moment, so that its page speaks to this peer as its own.

    An address cannot be made to lead elsewhere. Of names, this machine's own counts, and those of the settings.
    """
    host = _host_of(f"//{request.headers.get('Host', '')}")
    if host != "localhost" and host not in names and not _is_address(host):
        raise Problem("misdirected", "this peer does not have the name in the Host header: add it to `web_names`")


def _host_of(url: str) -> str:
    try:
        return (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return ""


def _is_address(host: str) -> bool:
    try:
        ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def token_of(request: web.Request, who: str) -> str:
    """Of a header that a program sets; or of the cookie, which a browser sends with whatever page asks.

    An annotator who asks what is an operator's is told so: it comes with the annotator's cookie.
    """
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token:
        return token
    token = request.cookies.get(COOKIES[who]) or request.cookies.get(COOKIES["annotator"], "")
    if not token:
        raise Problem("unauthorized", "say `Authorization: Bearer` and a token, or sign in")
    if request.method not in SAFE:
        if request.headers.get(HEADER) != "1":
            raise Problem("forbidden", f"a call with the cookie that changes something says `{HEADER}: 1`")
        if "Origin" not in request.headers:
            raise Problem("forbidden", "a call with the cookie that changes something says its Origin")
        require_own_origin(request)
    return token


def require_own_origin(request: web.Request) -> None:
    """Where a browser says which page asks, it is one of this peer's. The scheme may be another behind a proxy that ends TLS."""
    origin = request.headers.get("Origin")
    if origin is not None and origin.partition("://")[2] != request.headers.get("Host"):
        raise Problem("forbidden", "this call comes from a page of another site")


def keep(request: web.Request, response: web.StreamResponse, who: str, token: str, seconds: int) -> None:
    response.set_cookie(COOKIES[who], token, max_age=seconds, path="/", httponly=True, samesite="Strict", secure=request.secure)


def drop(request: web.Request, response: web.StreamResponse, who: str) -> None:
    response.del_cookie(COOKIES[who], path="/", httponly=True, samesite="Strict", secure=request.secure)
