"""The `peer` daemon, its commands, console, control socket and demo."""

from typing import Final

VERSION: Final = "0.2.0"  # of this program; `pyproject.toml` repeats it
