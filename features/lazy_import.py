"""Imports by name at the first use, so that `peer --help` answers at once."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any


def import_object(place: str) -> Any:
    """Import and return the module `package.module`, or the object `package.module:name`."""
    module, _, name = place.partition(":")
    with garbage_collection_paused():
        return getattr(import_module(module), name) if name else import_module(module)


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Pause the garbage collector in the `with` block. The collector would take a sixth of the time of an import of torch."""
    looks = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if looks:
            gc.enable()
