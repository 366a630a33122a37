"""Hosts that ask: by the connection, or as a reverse proxy of the settings names them."""

from __future__ import annotations

from collections.abc import Collection
from ipaddress import ip_address
from typing import Final

from aiohttp import web

from protocol.addresses import host_subnet, is_loopback

FORWARDED_HEADERS: Final = ("Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Real-IP", "Via")


def client_host(request: web.BaseRequest, proxies: Collection[str]) -> str:
    """An address, or the network of 2^64 addresses that a subscriber has with IPv6.

    `X-Forwarded-For` counts from a proxy of the settings alone, and there the last address that is no proxy: whatever stands
    before it may be the client's own invention.
    """
    host = _address(request.remote or "")
    said = [_address(part) for line in request.headers.getall("X-Forwarded-For", ()) for part in line.split(",")]
    while host in proxies and said and said[-1]:
        host = said.pop()
    return host_subnet(host)


def find_unnamed_proxy(request: web.BaseRequest, proxies: Collection[str]) -> str:
    """The address of a proxy of this machine that the settings do not name; empty where none brought the request."""
    host = _address(request.remote or "")
    return host if "X-Forwarded-For" in request.headers and is_loopback(host) and host not in proxies else ""


def is_secure(request: web.BaseRequest, proxies: Collection[str]) -> bool:
    """True if the browser speaks TLS, with this peer or with a proxy of the settings."""
    is_proxied = _address(request.remote or "") in proxies
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
