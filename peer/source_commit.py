"""The commit of this program's sources. `setup.py` writes it into wheels and sdists; in a checkout, git reports it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from peer import VERSION

FILE_NAME = "commit.txt"  # file with the commit beside this module, in wheels and sdists
PACKAGE = Path(__file__).parent


def source_commit() -> str:
    """Return 12 digits of the commit, with `-dirty` after changes of files that git tracks, or an empty text if unknown."""
    if (written := PACKAGE / FILE_NAME).exists():
        return written.read_text().strip()
    root = PACKAGE.parent
    if not (root / ".git").exists():  # not a checkout: git would describe any repository around the installed program
        return ""
    command = ["git", f"--git-dir={root / '.git'}", f"--work-tree={root}", "describe"]
    try:
        done = subprocess.run(
            [*command, "--always", "--dirty", "--abbrev=12", "--exclude=*"], capture_output=True, text=True, check=False
        )
    except OSError:  # git is not installed
        return ""
    return "" if done.returncode else done.stdout.strip()


def describe_version() -> str:
    """Return the line of `peer --version`, for example `folkmoot 0.3.0 (1a2b3c4d5e6f)`."""
    commit = source_commit()
    return f"folkmoot {VERSION}" + (f" ({commit})" if commit else "")
