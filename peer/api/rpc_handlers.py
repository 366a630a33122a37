"""What a running peer answers: every call of `PeerApi`, by a handler of its topic."""

from __future__ import annotations

from typing import cast

from features.lazy_import import import_object
from features.rpc import combine_handlers
from peer.api.handlers.audit_handler import AuditRpcHandler
from peer.api.handlers.block_handler import BlockRpcHandler, RowProofRpcHandler
from peer.api.handlers.job_handler import JobRpcHandler
from peer.api.handlers.join_handler import JoinRpcHandler
from peer.api.handlers.local_peer_handler import LocalPeerRpcHandler
from peer.api.handlers.member_handler import MemberRpcHandler
from peer.api.handlers.model_handler import ModelRpcHandler
from peer.api.handlers.network_handler import NetworkRpcHandler
from peer.api.rpc_methods import rpc_methods
from peer.api.running_peer import RunningPeer
from peer.features import FEATURES
from protocol.api import PeerApi

HANDLERS = (
    LocalPeerRpcHandler,
    BlockRpcHandler,
    MemberRpcHandler,
    JoinRpcHandler,
    JobRpcHandler,
    AuditRpcHandler,
    ModelRpcHandler,
    RowProofRpcHandler,
    NetworkRpcHandler,
)


def make_peer_api(peer: RunningPeer) -> PeerApi:
    of_features = [import_object(feature.rpc_handler) for feature in FEATURES if feature.rpc_handler]
    roof = combine_handlers([part(peer) for part in (*HANDLERS, *of_features)])
    assert vars(roof).keys() == rpc_methods().keys(), "a call that no part answers, or an answer to no call"
    return cast(PeerApi, roof)
