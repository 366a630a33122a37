"""The `peer` daemon, its commands, console and control socket."""

from typing import Final

VERSION: Final = "0.3.0"  # version of this program; `pyproject.toml` repeats it
