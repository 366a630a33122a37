"""A node's work for strangers, who may be many: it is small, and nothing is done before it is necessary."""

from __future__ import annotations

import pytest

from ledger.members import RegisterRoles
from peer.node import node as node_module
from protocol import codec
from protocol.identity import Identity, sign_message
from protocol.messages import GetRound, GossipEnvelope, Status, Transaction
from tests.ledger.world import PEOPLE
from tests.peer.nodes import Pack, Shell
from tests.peer.test_node import full_pool, start_job
from transport.network import DataReceived, PeerConnected

STRANGER = Identity(bytes(31) + b"s")


@pytest.fixture
def pack() -> Pack:
    return Pack()


def hears_of(shell: Shell, kind: str) -> None:
    shell.turn(
        DataReceived(
            STRANGER.public,
            codec.encode(GossipEnvelope(sign_message(STRANGER, shell.pack.world.chain, Transaction(1, 1 << 20, kind, b"")))),
        )
    )


def test_what_no_member_wrote_is_refused_before_its_signature_is_checked_but_for_an_admission(
    pack: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = list[bytes]()

    def verify(public: bytes, data: bytes, signature: bytes) -> bool:
        checked.append(public)
        return False

    monkeypatch.setattr(pack[0].node.rules.verifier, "verify", verify)
    hears_of(pack[0], "member/rename")
    assert pack[0].node.refusal_counts == {"not-a-member": 1} and not checked and not pack[0].last.faults
    hears_of(pack[0], "member/admit")
    assert checked == [STRANGER.public]
    assert [fault.error.reason for fault in pack[0].last.faults] == ["bad-signature"]


def test_a_stranger_hears_where_agreement_is_and_the_rest_once_it_is_a_member(
    pack: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = full_pool(pack, 3)
    monkeypatch.setattr(node_module.Node, "is_stranger", lambda node, peer: peer == STRANGER.public)
    pack[0].sent.clear()
    pack[0].turn(PeerConnected(STRANGER.public))
    told = [message for to, message in pack[0].sent if to == (STRANGER.public,)]
    assert [type(message) for message in told] == [Status]
    monkeypatch.setattr(node_module.Node, "is_stranger", lambda node, peer: False)
    pack[0].sent.clear()
    pack[3].say(pack.world.tx(PEOPLE[3], "member/register", RegisterRoles(())))
    pack.settle()
    told = [message for to, message in pack[0].sent if to == (STRANGER.public,)]
    assert {message.signed for message in told if isinstance(message, GossipEnvelope)} >= set(waiting)


def test_strangers_are_not_asked_what_they_hold_of_a_round(pack: Pack) -> None:
    start_job(pack)
    for number in range(50):
        pack[1].turn(PeerConnected(bytes([number]) * 32))
    pack[1].sent.clear()
    pack.pass_time(4.0)
    asked = {peer for to, message in pack[1].sent if isinstance(message, GetRound) for peer in to or ()}
    assert asked == {shell.me for shell in pack} - {pack[1].me}
