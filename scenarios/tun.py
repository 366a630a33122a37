"""Kernel TCP over links of any profile: each peer is in its own network namespace, with a TUN device as its only interface.

A peer started as `python -m scenarios.namespace peer.cli run …` hands its device to the router of its scenario
(`scenarios/router.py`), which carries, delays and drops its packets. Every TCP socket of the peer uses the given congestion
control.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from pathlib import Path

from demo.demo_peers import DemoPeer
from protocol.errors import UserError
from scenarios.emulation.link_profiles import CONGESTION_CONTROL, SHIFT_SECONDS, AccessProfile
from scenarios.namespace import VARIABLE

NETWORK = "10.78.0."
HOSTS_MAX = 250
ROUTER_SECONDS_MAX = 10.0  # until the router listens, or has executed an order


def refusal(congestion: str = CONGESTION_CONTROL) -> str:
    """Return the reason why this carrier cannot run here, or "". The check runs in a process of its own."""
    command = [sys.executable, "-m", "scenarios.namespace", "try", NETWORK + "1", congestion]
    done = subprocess.run(command, capture_output=True, text=True, timeout=ROUTER_SECONDS_MAX)
    return done.stderr.strip().rpartition("\n")[2] if done.returncode else ""


# The scenario's side ----------------------------------------------------------------------------------------------------


@dataclass
class Router:
    folder: Path
    profile: AccessProfile
    congestion: str
    hosts: dict[str, str] = field(default_factory=dict)  # name -> host

    @property
    def socket(self) -> Path:
        return self.folder / "router"

    def dress(self, peer: DemoPeer, profile: AccessProfile | None = None) -> None:
        peer.address = f"{self.host(peer.name, profile)}:0"
        peer.module = ("scenarios.namespace", *peer.module)
        peer.environment[VARIABLE] = f"{self.socket} {self.hosts[peer.name]} {self.congestion}"

    def host(self, name: str, profile: AccessProfile | None = None) -> str:
        """Return an address for this name, with its own profile or the router's, each from another moment."""
        if name not in self.hosts:
            assert len(self.hosts) < HOSTS_MAX
            self.hosts[name] = f"{NETWORK}{len(self.hosts) + 1}"
            profile = profile or self.profile_of(name)
            file = self.folder / self.hosts[name]
            file.write_text(json.dumps([profile.shift_seconds, list(map(astuple, profile.moments))]))
            self._tell({"profile": str(file)})
        return self.hosts[name]

    def profile_of(self, name: str) -> AccessProfile:
        return self.profile.shifted(SHIFT_SECONDS * list(self.hosts).index(name))

    def _tell(self, what: dict[str, str]) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as control:
            control.settimeout(ROUTER_SECONDS_MAX)
            control.connect(str(self.socket))
            control.send(json.dumps(what).encode())
            control.recv(1 << 16)  # confirmation

    def command(self, host: str, *module: str) -> tuple[list[str], dict[str, str]]:
        """Return the command that runs one of our modules at a host, and its environment."""
        variable = f"{self.socket} {host} {self.congestion}"
        return [sys.executable, "-m", "scenarios.namespace", *module], dict(os.environ) | {VARIABLE: variable}


@contextmanager
def running_router(profile: AccessProfile, congestion: str = CONGESTION_CONTROL) -> Iterator[Router]:
    with tempfile.TemporaryDirectory(prefix="folkmoot-tun-") as folder:
        process = subprocess.Popen([sys.executable, "-m", "scenarios.router", f"{folder}/router"], start_new_session=True)
        try:
            router = Router(Path(folder), profile, congestion)
            deadline = time.monotonic() + ROUTER_SECONDS_MAX
            while not router.socket.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise UserError("the router of the TUN devices did not start")
                time.sleep(0.02)
            yield router
        finally:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ROUTER_SECONDS_MAX)
            process.kill()
            process.wait()
