"""The calls of `PeerApi`, each answered by the handler of its topic.

A handler is imported at its first call: a voter without users needs few handlers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Final, cast

from features.lazy_import import import_object
from features.rpc import RpcMethod, collect_methods, defer_handlers
from peer.features import FEATURES
from protocol.api import (
    AuditRpc,
    BlockRpc,
    InvitationRpc,
    JobRpc,
    LocalPeerRpc,
    MemberRpc,
    ModelRpc,
    NetworkRpc,
    PeerApi,
    RowProofRpc,
)

if TYPE_CHECKING:
    from peer.api.running_peer import RunningPeer

# Protocol class with declarations of calls -> `module:class` of its handler, as in `Feature.rpc_handler`.
HANDLERS: Final[dict[type, str]] = {
    LocalPeerRpc: "peer.api.handlers.local_peer_handler:LocalPeerRpcHandler",
    BlockRpc: "peer.api.handlers.network_handler:BlockRpcHandler",
    MemberRpc: "peer.api.handlers.network_handler:MemberRpcHandler",
    InvitationRpc: "peer.api.handlers.network_handler:JoinRpcHandler",
    JobRpc: "peer.api.handlers.job_handler:JobRpcHandler",
    AuditRpc: "peer.api.handlers.audit_handler:AuditRpcHandler",
    ModelRpc: "peer.api.handlers.model_handler:ModelRpcHandler",
    RowProofRpc: "peer.api.handlers.network_handler:RowProofRpcHandler",
    NetworkRpc: "peer.api.handlers.network_handler:NetworkRpcHandler",
}


def rpc_methods() -> dict[str, RpcMethod]:
    return _declared(PeerApi, *(import_object(feature.rpc) for feature in FEATURES if feature.rpc))


_declared = functools.cache(collect_methods)  # cached: each request to the control socket looks up its call


def rpc_handlers() -> Iterator[tuple[type, str]]:
    """Yield the protocol classes of this peer and of its features, each with the `module:class` of its handler."""
    yield from HANDLERS.items()
    for feature in FEATURES:
        if feature.rpc:
            yield import_object(feature.rpc), feature.rpc_handler


def make_peer_api(peer: RunningPeer) -> PeerApi:
    roof = defer_handlers({protocol: partial(_make_handler, place, peer) for protocol, place in rpc_handlers()})
    assert vars(roof).keys() == rpc_methods().keys(), "a call that no protocol of a handler declares"
    return cast(PeerApi, roof)


def _make_handler(place: str, peer: RunningPeer) -> object:
    handler: object = import_object(place)(peer)
    return handler
