"""What a peer serves beside its links: `/metrics` for monitors, pages for annotators."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

import trio

from features.feature import Role
from peer.doctor.findings import DoctorFinding, FindingLevel, ok, warning
from peer.doctor.reachability_checks import check_free_port
from peer.settings.config import Config
from protocol.addresses import parse_address
from web import metrics_endpoint

HTTP_SECONDS_MAX: Final = 5.0  # as long as a peer waits for its monitor
ANSWER_BYTES_MAX: Final = 1 << 20  # a network of 10,000 members gives some kilobytes


async def check_free_ports(config: Config, role: Role) -> list[DoctorFinding]:
    """Of a peer that does not run. It goes on without these ports."""
    wanted = {"metrics": config.feature_settings["metrics"]}
    if "serve" in role.services:
        wanted["web"] = config.feature_settings["web_listen"]
    flags = {"metrics": "metrics", "web": "web-listen"}
    found = [await check_free_port(check, address, flags[check]) for check, address in wanted.items() if address]
    return [replace(finding, level=FindingLevel.WARNING) if finding.level == FindingLevel.FAULT else finding for finding in found]


async def check_served_endpoints(config: Config, role: Role, parts: Path, me: str) -> list[DoctorFinding]:
    """Of a peer that runs."""
    found = []
    listen, written = config.feature_settings["metrics"], parts / "metrics" / metrics_endpoint.ADDRESS_FILE
    if listen or written.exists():  # the peer may have been started with other settings than these
        found.append(await _of_metrics(listen, written, me))
    if "serve" in role.services:
        written = parts / "serve" / "address"
        if written.exists():
            found.append(ok("web", f"web pages are served at {written.read_text()}"))
        else:
            found.append(warning("web", "web pages are not served", "`peer log` says why; perhaps name another --web-listen"))
    return found


async def _of_metrics(listen: str, written: Path, me: str) -> DoctorFinding:
    advice = "name another --metrics, and start the peer again with it"
    if not written.exists():
        return warning("metrics", f"not served at {listen}: the address was taken, or the peer started without it", advice)
    address = written.read_text()
    answer = await _get(address, "/metrics")
    if f'peer="{me}"'.encode() not in answer:
        return warning("metrics", f"at {address} not this peer answers", advice)
    return ok("metrics", f"served at http://{address}/metrics")


async def _get(address: str, path: str) -> bytes:
    """The whole answer; what came until it broke off or took too long."""
    host, port = parse_address(address)
    answer = b""
    try:
        with trio.move_on_after(HTTP_SECONDS_MAX):
            async with await trio.open_tcp_stream(host, port) as stream:
                await stream.send_all(f"GET {path} HTTP/1.1\r\nHost: {address}\r\n\r\n".encode())
                while len(answer) < ANSWER_BYTES_MAX and (part := await stream.receive_some()):
                    answer += part
    except (OSError, trio.BrokenResourceError):
        pass
    return answer
