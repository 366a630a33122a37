"""The calls that this program knows: those of every peer, and those of its features."""

from __future__ import annotations

import functools

from features.calls import Call, declared
from features.lazily import named
from peer.features import FEATURES
from protocol.api import PeerApi


def calls() -> dict[str, Call]:
    return _declared(PeerApi, *(named(feature.calls) for feature in FEATURES if feature.calls))


_declared = functools.cache(declared)  # every request to the control socket looks a call up
