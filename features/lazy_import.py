"""Things that are named where they are listed, and imported by whoever uses them: `peer --help` is to answer at once."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any


def import_object(place: str) -> Any:
    """The module `package.module`, or what is called so in it: `package.module:name`."""
    module, _, name = place.partition(":")
    with garbage_collection_paused():
        return getattr(import_module(module), name) if name else import_module(module)


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Nothing that is imported goes away: to look for garbage meanwhile would take a sixth of the time that torch takes."""
    looks = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if looks:
            gc.enable()
