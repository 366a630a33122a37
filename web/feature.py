"""The HTTP server as a feature: its services and settings. Each feature declares its own routes and pages."""

from __future__ import annotations

from ipaddress import ip_address

from features.feature import EventKind, Feature, Setting
from protocol.addresses import is_loopback, parse_address
from protocol.errors import UserError


def _address_problem(value: object) -> str | None:
    try:
        parse_address(str(value))
    except UserError as error:
        return str(error)
    return None


def _proxies_problem(value: object) -> str | None:
    assert isinstance(value, tuple)
    for proxy in value:
        try:
            ip_address(proxy)
        except ValueError:
            return f"has {proxy!r}, which is not an IP address: list each proxy by its IP address"
    return None


def _not_loopback(value: object) -> str | None:
    """Return the reason why metrics cannot be served at this address, or None.

    Metrics need no password, so only loopback is allowed.
    """
    if value == "":
        return None
    if problem := _address_problem(value):
        return problem
    host, _ = parse_address(str(value))
    return None if is_loopback(host) else "is not on loopback: set 127.0.0.1:PORT, and run the monitor on this machine"


WEB = Feature(
    name="web",
    about="pages and HTTP routes of the other features, and metrics",
    services={"serve": "web.web_service:WebService", "metrics": "web.metrics_endpoint:MetricsEndpoint"},
    services_everywhere=("metrics",),
    event_kinds=(
        EventKind(
            "serve",
            "This peer serves pages for people or could not, read its certificate again, or found faulty answers or imports.",
            ("info", "warning"),
        ),
        EventKind("metrics", "The address of the metrics opened, or could not be opened.", ("info", "warning")),
    ),
    settings=(
        Setting(
            "metrics",
            "Address on loopback that serves `/healthz` and `/metrics` to monitors",
            "",
            _not_loopback,
            "Port 0 takes any free port, which `peer log` names. If the port is taken, the log says so and the peer runs on.",
        ),
        Setting(
            "web_listen",
            "Address where web pages are served",
            "127.0.0.1:7780",
            _address_problem,
            "Port 0 takes any free port, which `peer log` names. If the port is taken, the log says so and no pages are served.",
        ),
        Setting(
            "web_host_names",
            "Host names under which browsers may reach this peer",
            (),
            details="The addresses of this host and `localhost` are always allowed. Requests for other names are refused, "
            "because a stranger's name could lead here.",
        ),
        Setting(
            "web_trusted_proxies",
            "IP addresses of reverse proxies that name their clients in `X-Forwarded-For`",
            (),
            _proxies_problem,
        ),
        Setting(
            "web_tls_cert",
            "PEM file with the certificate chain for https",
            "",
            details="Needs `web_tls_key`. No pages are served with an unreadable file. SIGHUP reads both files again.",
        ),
        Setting("web_tls_key", "PEM file with the certificate's private key", ""),
    ),
)
