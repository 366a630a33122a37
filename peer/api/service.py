"""What a running peer answers: every call of `PeerApi`, by the part that knows about it."""

from __future__ import annotations

from typing import cast

from features.calls import under_one_roof
from features.lazily import named
from peer.api.audits import AuditAnswers
from peer.api.blocks import BlockAnswers
from peer.api.calls import calls
from peer.api.jobs import JobAnswers
from peer.api.joining import JoiningAnswers
from peer.api.members import MemberAnswers
from peer.api.models import ModelAnswers
from peer.api.network import NetworkAnswers
from peer.api.running import RunningPeer
from peer.api.tables import TableAnswers
from peer.api.this_peer import ThisPeerAnswers
from peer.features import FEATURES
from protocol.api import PeerApi

PARTS = (
    ThisPeerAnswers,
    BlockAnswers,
    MemberAnswers,
    JoiningAnswers,
    JobAnswers,
    AuditAnswers,
    ModelAnswers,
    TableAnswers,
    NetworkAnswers,
)


def service(peer: RunningPeer) -> PeerApi:
    of_features = [named(feature.answers) for feature in FEATURES if feature.answers]
    roof = under_one_roof([part(peer) for part in (*PARTS, *of_features)])
    assert vars(roof).keys() == calls().keys(), "a call that no part answers, or an answer to no call"
    return cast(PeerApi, roof)
