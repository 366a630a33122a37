"""Origin of a figure: machine, date, commit and command; and the file with the figures."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.dispatch import REPOSITORY
from protocol.errors import UserError


def provenance(started: float) -> dict[str, Any]:
    """Return the origin of a run. `started` is in seconds since the epoch."""
    return {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "load": os.getloadavg()[0],
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(started)),
        "minutes": (time.time() - started) / 60,
        "commit": _commit(),
        "command": " ".join(sys.orig_argv),
        "versions": {"python": platform.python_version(), **{name: metadata.version(name) for name in ("torch", "numpy")}},
    }


def write(file: Path | None, started: float, figures: Mapping[str, Any]) -> None:
    """Write the whole file or nothing. Called after every row, so that an interrupted run loses one row."""
    if file is None:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(file.name + ".part")
    part.write_text(_portable(json.dumps({**provenance(started), **figures}, indent=1)) + "\n")
    part.replace(file)


def earlier(file: Path | None, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures that an interrupted run left in `file`, or nothing if there is none.

    Raises `UserError` if they are of another commit, or of other settings than `about`.
    """
    if file is None or not file.exists():
        return {}
    found: dict[str, Any] = json.loads(file.read_text())
    for name, value in {"commit": _commit(), **json.loads(_portable(json.dumps(about)))}.items():
        if found.get(name) != value:
            raise UserError(f"{file}: its {name} is {found.get(name)!r}, not {value!r}: name another file, or leave out --resume")
    return found


def _portable(figures: str) -> str:
    """Remove the paths of this machine."""
    return figures.replace(f"{REPOSITORY}/", "").replace(f"{tempfile.gettempdir()}/", "")


def _commit() -> str:
    """Return the commit of this repository, independent of the working directory, with a plus if tracked files were changed."""
    try:
        return _git("rev-parse", "HEAD") + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.strip()
