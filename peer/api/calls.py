"""The calls that this program knows: those of every peer, and those of its features."""

from __future__ import annotations

import functools

from features.calls import Call, declared
from protocol.api import PeerApi


@functools.cache
def calls() -> dict[str, Call]:
    return declared(PeerApi)
