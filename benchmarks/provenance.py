"""What a figure must come with: machine, date, commit, command."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from typing import Any

import numpy as np
import torch


def provenance(started: float) -> dict[str, Any]:
    """`started`: seconds since the epoch."""
    return {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "load": os.getloadavg()[0],
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(started)),
        "minutes": (time.time() - started) / 60,
        "commit": _git("rev-parse", "HEAD") + ("+" if _git("status", "--porcelain", "--untracked-files=no") else ""),
        "command": " ".join(sys.orig_argv),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
    }


def _git(*words: str) -> str:
    try:
        return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
