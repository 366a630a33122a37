"""The calls that this program knows: those of every peer, and those of its features."""

from __future__ import annotations

import functools

from features.lazy_import import import_object
from features.rpc import RpcMethod, collect_methods
from peer.features import FEATURES
from protocol.api import PeerApi


def rpc_methods() -> dict[str, RpcMethod]:
    return _declared(PeerApi, *(import_object(feature.rpc) for feature in FEATURES if feature.rpc))


_declared = functools.cache(collect_methods)  # every request to the control socket looks a call up
