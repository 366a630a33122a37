"""Checks of request headers: the client's address, its use of TLS, its name for this peer, and the page that sends the request. A
page of another site, or of a foreign name of this host, must not use the browser session of a person who is signed in at this
peer.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from ipaddress import ip_address
from typing import Final

from aiohttp import web

from protocol.addresses import host_subnet, is_loopback
from web.calls import Credentials, HttpProblem
from web.routes import ClientClass

# Header of calls with a cookie: HTML forms cannot send it, and scripts of other sites need a CORS preflight for it.
CSRF_HEADER: Final = "X-Folkmoot"
HOST_PATTERN: Final = re.compile(r"(?:\[(?P<address>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9._-]+))(?::(?P<port>[0-9]{1,5}))?")
PORT_MAX: Final = 65_535
# Prefix of a cookie's name: browsers accept such a cookie only over TLS and only from this host itself.
SECURE_COOKIE_PREFIX: Final = "__Host-"
SAFE_METHODS: Final = ("GET", "HEAD", "OPTIONS")
FORWARDED_HEADERS: Final = ("Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Real-IP", "Via")
PROXIES = web.AppKey("proxies", Collection)  # key of the application's trusted proxies, from the setting `web_trusted_proxies`


def require_host(request: web.Request, names: Collection[str]) -> None:
    """Raise `HttpProblem` unless the Host header names this peer.

    The check prevents DNS rebinding: a foreign name resolves to this peer's address for a moment, so that a foreign page has this
    peer's origin. A Host header with an IP address is safe. A name must be `localhost` or one of `names`.
    """
    said = request.headers.getall("Host", ())
    if len(said) != 1 or not (found := HOST_PATTERN.fullmatch(said[0])) or int(found["port"] or 0) > PORT_MAX:
        raise HttpProblem("misdirected", "a request needs exactly one Host header: a name or an address, with an optional port")
    host = (found["address"] or found["name"]).lower().removesuffix(".")
    if found["address"] and not _is_address(host):
        raise HttpProblem("misdirected", "the Host header has an invalid address")
    if host != "localhost" and host not in names and not _is_address(host):
        raise HttpProblem("misdirected", "the name in the Host header is unknown: add it to `web_host_names`")
    if request.host.lower() not in (host, said[0].lower()):  # an absolute URL in the request line overrides the Host header
        raise HttpProblem("misdirected", "the request's URL and its Host header name different hosts")


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def cookie_name(request: web.Request, who: ClientClass) -> str:
    return f"{SECURE_COOKIE_PREFIX if is_secure(request) else ''}{who.cookie_name}"


def read_credentials(request: web.Request, who: ClientClass | None, known: Collection[ClientClass]) -> Credentials:
    """Return the credentials of a client of the class `who`. Raises `HttpProblem` as `read_token` does."""
    token = read_token(request, who, known) if who else ""
    return Credentials(token, client_host(request), is_local_request(request))


def read_token(request: web.Request, who: ClientClass, known: Collection[ClientClass]) -> str:
    """Return the token of the Authorization header, which programs set, or of the session cookie, which browsers send.

    A browser sends the cookie with requests of any page. A call that changes data and has a cookie therefore needs CSRF_HEADER
    and this peer's Origin. A browser may have only a session of another class in `known`: its token is returned, so that the
    refusal of the call names the right class. Raises `HttpProblem` if there is no token or the headers do not allow the call.
    """
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token:
        return token
    if who.header and (token := request.headers.get(who.header, "")):
        return token
    cookies = (request.cookies.get(cookie_name(request, client)) for client in (who, *known))
    token = next(filter(None, cookies), "")
    if not token:
        raise HttpProblem("unauthorized", "no token: send `Authorization: Bearer TOKEN`, or sign in")
    if request.method not in SAFE_METHODS:
        if request.headers.get(CSRF_HEADER) != "1":
            raise HttpProblem("forbidden", f"a call with a cookie needs the header `{CSRF_HEADER}: 1`")
        if "Origin" not in request.headers:
            raise HttpProblem("forbidden", "a call with a cookie needs the header `Origin`")
        require_own_origin(request)
    return token


def require_own_origin(request: web.Request) -> None:
    """Raise `HttpProblem` if the Origin header names another site. Its scheme is not compared: a reverse proxy may end TLS."""
    origin = request.headers.get("Origin")
    if origin is not None and origin.partition("://")[2] != request.headers.get("Host"):
        raise HttpProblem("forbidden", "calls from pages of other sites are not allowed")


def client_host(request: web.Request) -> str:
    """Return the client's address. For IPv6, return the /64 network, since one subscriber has all addresses in it.

    `X-Forwarded-For` counts only from a trusted proxy. The client is then the last address in the header that is no trusted
    proxy, because a client can invent the addresses before its own.
    """
    host = _address(request.remote or "")
    said = [_address(part) for line in request.headers.getall("X-Forwarded-For", ()) for part in line.split(",")]
    while host in request.app[PROXIES] and said and said[-1]:
        host = said.pop()
    return host_subnet(host)


def find_unnamed_proxy(request: web.Request) -> str:
    """Return the address of a proxy on this machine that the settings do not name.

    The text is empty if the request has no such proxy.
    """
    host = _address(request.remote or "")
    return host if "X-Forwarded-For" in request.headers and is_loopback(host) and host not in request.app[PROXIES] else ""


def is_secure(request: web.Request) -> bool:
    """Return whether the client uses TLS, to this peer or to a trusted proxy."""
    is_proxied = _address(request.remote or "") in request.app[PROXIES]
    return request.secure or (is_proxied and request.headers.get("X-Forwarded-Proto", "").strip().lower() == "https")


def is_local_request(request: web.BaseRequest) -> bool:
    """Return whether the request comes from a program on this machine that is no reverse proxy.

    Most proxies add one of FORWARDED_HEADERS. nginx without settings adds none, but uses HTTP/1.0.
    """
    is_direct = request.version >= (1, 1) and not any(name in request.headers for name in FORWARDED_HEADERS)
    return is_direct and is_loopback(_address(request.remote or ""))


def _address(text: str) -> str:
    """Return an IP address in normal form, without port, brackets or interface, or an empty text if `text` is no IP address."""
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
