"""Things that are named where they are listed, and imported by whoever uses them: `peer --help` is to answer at once."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def named(place: str) -> Any:
    """The module `package.module`, or what is called so in it: `package.module:name`."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name) if name else import_module(module)
