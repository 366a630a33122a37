"""A description of this machine's processor for people."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Final

from training.worker_protocol import DeviceInfo

CPU: Final = "cpu"  # name of the device in the setting `device`
MB: Final = 1_000_000


def describe_processor(is_used: bool) -> DeviceInfo:
    """Return a description whose memory is the machine's. The memory of this process counts as held."""
    page = os.sysconf("SC_PAGE_SIZE")
    total, free = (page * os.sysconf(name) // MB for name in ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES"))
    held = page * int(Path("/proc/self/statm").read_text().split()[1]) // MB if Path("/proc/self/statm").exists() else 0
    return DeviceInfo(CPU, platform.processor() or platform.machine(), total, free, held, is_used)
