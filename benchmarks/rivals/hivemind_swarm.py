"""Discovery between the processes of a hivemind rival."""

from __future__ import annotations

import time
from pathlib import Path

import hivemind

from benchmarks.rivals.work import POLL_SECONDS, Work

START_SECONDS_MAX = 120.0
REQUEST_SHARE = 0.6  # share of the matchmaking time: longer requests can deadlock, by the package's documentation


def join(work: Work, rank: int) -> hivemind.DHT:
    """Join the DHT. The first process writes its addresses to a file, from which the others start."""
    file = Path(work.folder) / "address"
    dht = hivemind.DHT(initial_peers=_addresses(file) if rank else [], start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    if rank == 0:
        part = file.with_suffix(".part")
        part.write_text("\n".join(map(str, dht.get_visible_maddrs())))
        part.replace(file)
    return dht


def _addresses(file: Path) -> list[str]:
    deadline = time.monotonic() + START_SECONDS_MAX
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return file.read_text().split()
