"""What the headers of a request are believed: which host asks, over TLS or not, for which name of this peer, from whose page.

A foreign page, or a foreign name of this host, must not use the browser of somebody who is signed in here.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from ipaddress import ip_address
from typing import Final

from aiohttp import web

from protocol.addresses import host_subnet, is_loopback
from web.calls import HttpProblem
from web.routes import ClientClass

CSRF_HEADER: Final = "X-Folkmoot"  # that no form sends, and no foreign script without asking first
HOST_PATTERN: Final = re.compile(r"(?:\[(?P<address>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9._-]+))(?::(?P<port>[0-9]{1,5}))?")
PORT_MAX: Final = 65_535
SECURE_COOKIE_PREFIX: Final = "__Host-"  # a cookie with this prefix is set over TLS alone, and by this very host
SAFE_METHODS: Final = ("GET", "HEAD", "OPTIONS")
FORWARDED_HEADERS: Final = ("Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Real-IP", "Via")
PROXIES = web.AppKey("proxies", Collection)  # of the settings


def require_host(request: web.Request, names: Collection[str]) -> None:
    """Against DNS rebinding: a name that leads to this address for a moment, so that its page speaks to this peer as its own.

    An address cannot be made to lead elsewhere. Of names, this machine's own counts, and those of the settings.
    """
    said = request.headers.getall("Host", ())
    if len(said) != 1 or not (found := HOST_PATTERN.fullmatch(said[0])) or int(found["port"] or 0) > PORT_MAX:
        raise HttpProblem("misdirected", "a request has one Host header: a name or an address, and perhaps `:` and a port")
    host = (found["address"] or found["name"]).lower().removesuffix(".")
    if found["address"] and not _is_address(host):
        raise HttpProblem("misdirected", "the address in the Host header is none")
    if host != "localhost" and host not in names and not _is_address(host):
        raise HttpProblem("misdirected", "this peer does not have the name in the Host header: add it to `web_host_names`")
    if request.host.lower() not in (host, said[0].lower()):  # of an absolute address, which goes before the header
        raise HttpProblem("misdirected", "the address of the request is of another host than its Host header")


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def cookie_name(request: web.Request, who: ClientClass) -> str:
    return f"{SECURE_COOKIE_PREFIX if is_secure(request) else ''}{who.cookie_name}"


def read_token(request: web.Request, who: ClientClass, known: Collection[ClientClass]) -> str:
    """Of a header that a program sets; or of the cookie, which a browser sends with whatever page asks.

    A browser without a session of this class shows that of another `known` class: its client is told that the call is for others.
    """
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token:
        return token
    cookies = (request.cookies.get(cookie_name(request, client)) for client in (who, *known))
    token = next(filter(None, cookies), "")
    if not token:
        raise HttpProblem("unauthorized", "say `Authorization: Bearer` and a token, or sign in")
    if request.method not in SAFE_METHODS:
        if request.headers.get(CSRF_HEADER) != "1":
            raise HttpProblem("forbidden", f"a call with the cookie that changes something says `{CSRF_HEADER}: 1`")
        if "Origin" not in request.headers:
            raise HttpProblem("forbidden", "a call with the cookie that changes something says its Origin")
        require_own_origin(request)
    return token


def require_own_origin(request: web.Request) -> None:
    """Where a browser says which page asks, it is one of this peer's. The scheme may be another behind a proxy that ends TLS."""
    origin = request.headers.get("Origin")
    if origin is not None and origin.partition("://")[2] != request.headers.get("Host"):
        raise HttpProblem("forbidden", "this call comes from a page of another site")


def client_host(request: web.Request) -> str:
    """An address, or the network of 2^64 addresses that a subscriber has with IPv6.

    `X-Forwarded-For` counts from a proxy of the settings alone, and there the last address that is no proxy: whatever stands
    before it may be the client's own invention.
    """
    host = _address(request.remote or "")
    said = [_address(part) for line in request.headers.getall("X-Forwarded-For", ()) for part in line.split(",")]
    while host in request.app[PROXIES] and said and said[-1]:
        host = said.pop()
    return host_subnet(host)


def find_unnamed_proxy(request: web.Request) -> str:
    """The address of a proxy of this machine that the settings do not name; empty where none brought the request."""
    host = _address(request.remote or "")
    return host if "X-Forwarded-For" in request.headers and is_loopback(host) and host not in request.app[PROXIES] else ""


def is_secure(request: web.Request) -> bool:
    """True if the browser speaks TLS, with this peer or with a proxy of the settings."""
    is_proxied = _address(request.remote or "") in request.app[PROXIES]
    return request.secure or (is_proxied and request.headers.get("X-Forwarded-Proto", "").strip().lower() == "https")


def is_local_request(request: web.BaseRequest) -> bool:
    """True if a program of this machine asks for itself. A proxy of this machine asks for others, and mostly says so.

    nginx without any setting says nothing, but asks by HTTP/1.0.
    """
    is_direct = request.version >= (1, 1) and not any(name in request.headers for name in FORWARDED_HEADERS)
    return is_direct and is_loopback(_address(request.remote or ""))


def _address(text: str) -> str:
    """As `ip_address` writes it, without port, brackets or interface; empty if it is none."""
    text = text.strip().partition("%")[0]
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        ip = ip_address(text)
    except ValueError:
        return ""
    return str(getattr(ip, "ipv4_mapped", None) or ip)
