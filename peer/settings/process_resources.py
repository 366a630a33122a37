"""Resources of processes: file descriptors, their numbers for connections, and memory as the kernel counts it. A stranger that
connects takes a descriptor. Each port has a bounded number of descriptors, so that others are left for the database, blobs, the
worker's pipes, the log and the control socket.
"""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Final, NamedTuple

from transport.connections.connection_manager import LINKS_MAX
from transport.quotas.accept_limiter import HALF_OPEN_MAX

# Descriptors for other uses than accepted connections: databases 30, event loops and listeners 20, worker and log 10, control
# socket 33, monitors 17, blobs of 40 threads 80, dials 48.
DESCRIPTORS_RESERVED: Final = 256
PEER_CONNECTIONS_MAX: Final = LINKS_MAX + HALF_OPEN_MAX  # accepted connections of other peers
WEB_CONNECTIONS_MAX: Final = 512  # connections of the web port: a browser opens six, and 100 may be event streams
DESCRIPTORS_PER_WEB_CONNECTION: Final = 2  # descriptors of one web connection: its socket, and a file that is sent to the browser
DESCRIPTORS_NEEDED: Final = DESCRIPTORS_RESERVED + PEER_CONNECTIONS_MAX + DESCRIPTORS_PER_WEB_CONNECTION * WEB_CONNECTIONS_MAX
DESCRIPTORS_NEEDED_WITHOUT_WEB: Final = DESCRIPTORS_RESERVED + PEER_CONNECTIONS_MAX


class ConnectionLimits(NamedTuple):
    """Numbers of accepted connections that may be open at once."""

    peers: int  # connections of other peers
    web: int


def connection_limits(limit: int) -> ConnectionLimits:
    """Return the numbers of connections for a process with `limit` descriptors.

    Half of a low limit is reserved for other uses.
    """
    left = limit - min(DESCRIPTORS_RESERVED, limit // 2)
    peers = min(PEER_CONNECTIONS_MAX, left * 3 // 4)
    return ConnectionLimits(peers, min(WEB_CONNECTIONS_MAX, (left - peers) // DESCRIPTORS_PER_WEB_CONNECTION))


def descriptor_limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return DESCRIPTORS_NEEDED if soft == resource.RLIM_INFINITY else soft


def raise_descriptor_limit() -> None:
    """Raise the process's soft limit of descriptors to its hard limit. If the system refuses, the soft limit stays."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError):  # macOS refuses an infinite limit
        return


def process_memory_mb(process: int, kind: str = "Pss") -> float:
    """Return the memory of a process in units of 10^6 bytes, or 0 if the kernel does not report it.

    "Pss" is the proportional set size, which divides shared pages among processes. "Rss" counts them in full.
    """
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{kind}:")), 0) * 1024 / 1e6


def child_processes(process: int) -> list[int]:
    """Return the ids of child processes that the first thread of a process started.

    The list is empty if the kernel does not report them.
    """
    try:
        return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []
