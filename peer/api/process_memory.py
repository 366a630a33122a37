"""Memory of a process as the kernel counts it."""

from __future__ import annotations

from pathlib import Path


def process_memory_mb(process: int, kind: str = "Pss") -> float:
    """Proportional set size in 10^6 bytes: shared pages count for their share; in the resident one, "Rss", as if there were no
    other process. 0 if the kernel does not tell.
    """
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    kib = next((int(line.split()[1]) for line in lines if line.startswith(f"{kind}:")), 0)
    return kib * 1024 / 1e6


def child_processes(process: int) -> list[int]:
    """Those that its first thread has started. None if the kernel does not tell."""
    try:
        return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []
