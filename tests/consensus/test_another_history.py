"""Retired voters sign another history. A newcomer cannot tell which history is true until it has decided the block of its
invitation: until then neither history may stop it, and it blames nobody for either."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import pytest

from consensus.block import block_digest, decode_block, encode_block
from consensus.effects import RestartState, SendMessage
from consensus.inputs import TickInput
from consensus.pbft.replica import Replica
from protocol.limits import DECISIONS_PER_REPLY_MAX
from protocol.messages import BlockBytes, Commit, Decision, GetDecisions, Prepare, Status
from tests.consensus.bench import CHAIN_ID, Bench
from tests.consensus.counter import Counter
from tests.sim.keys import FastSigner, FastVerifier

ANCHOR_HEIGHT = 9  # height of the block in the newcomer's invitation
SIGNERS = (1, 2, 3)
ONE, FALSE = b"\x91\x01", b"\x91\x63"
DISMISSES = b"\x91\xce" + Counter.CHANGE.to_bytes(4, "big")  # the first founder, which votes no more from height 3 on
STRANGER = FastSigner("stranger").public


@dataclass
class Newcomer(Bench):
    """A newcomer that observes the decisions of the founders. It has no invitation if `anchor_height` is 0."""

    anchor_height: int = ANCHOR_HEIGHT

    def _replica(self, restart: RestartState) -> Replica:
        self.counter.candidates = tuple(signer.public for signer in self.signers)
        me = FastSigner("newcomer")
        return Replica(me, CHAIN_ID, FastVerifier(), self.counter, self.counter.applied(), restart, self.anchor_height)

    def follow(self, *decisions: Decision) -> None:
        for decision in decisions:
            (decided,) = self.give(1, decision).decided_blocks
            self.apply(decided)

    def hear_commits(self, block: bytes) -> None:
        for voter in SIGNERS:
            self.give(voter, self.commit(voter, block))
            assert not self.faults and not self.turn.decided_blocks


def history(first: bytes, count: int) -> list[Decision]:
    """Return the decisions of the founders if the first block holds these items."""
    bench, decisions = Newcomer(), []
    for height in range(1, count + 1):
        bench.now += 1.0
        bench.voters = bench.counter.voters[1]
        block = bench.block(1, first if height == 1 else bytes([0x91, height]))
        decisions.append(Decision(block, bench.certificate(Commit, block, 0, SIGNERS)))
        bench.follow(decisions[-1])
    return decisions


def test_a_certificate_of_another_history_whose_block_never_comes_does_not_stop_a_newcomer() -> None:
    """Invariant: below its anchor, a newcomer decides the certified blocks that follow from its last block, and no others."""
    bench, true = Newcomer(), history(ONE, 3)
    bench.follow(true[0])
    bench.hear_commits(history(FALSE, 2)[1].block)
    bench.follow(true[1], true[2])
    assert bench.replica.height == 4 and bench.replica.fork_proof is None


@pytest.mark.parametrize("anchor_height", [0, ANCHOR_HEIGHT])
def test_a_certified_block_that_does_not_follow_from_ours_is_dropped(anchor_height: int) -> None:
    """Invariant: every decided block names the decided one before it as its parent. A replica that trusts its voters reports the
    fork, and keeps its report."""
    bench, true, false = Newcomer(anchor_height=anchor_height), history(ONE, 3), history(FALSE, 2)
    bench.follow(true[0])
    bench.hear_commits(false[1].block)
    assert not bench.give(1, BlockBytes(2, false[1].block)).decided_blocks
    assert (bench.replica.fork_proof is None) == (anchor_height > 0)
    assert not bench.give(0, bench.commit(0, false[1].block)).decided_blocks, "one more signature makes it no better"
    bench.follow(true[1], true[2])
    assert bench.replica.height == 4 and bench.replica.divergence is None and bench.replica.state_root_split is None
    assert (bench.replica.fork_proof is None) == (anchor_height > 0)


@pytest.mark.parametrize("anchor_height", [0, ANCHOR_HEIGHT])
def test_a_decision_that_does_not_follow_from_ours_costs_nobody_anything(anchor_height: int) -> None:
    """Invariant: as above. The sender cannot know our history, so only a peer that trusts its voters reports it."""
    bench, true = Newcomer(anchor_height=anchor_height), history(ONE, 3)
    bench.follow(true[0])
    assert not bench.give(1, history(FALSE, 2)[1]).decided_blocks and not bench.faults
    assert (bench.replica.fork_proof is None) == (anchor_height > 0)
    bench.follow(true[1], true[2])
    assert (bench.replica.fork_proof is None) == (anchor_height > 0) and bench.replica.state_root_split is None


@pytest.mark.parametrize("signers", [SIGNERS, (0, 1, 2, 3)])
@pytest.mark.parametrize("decided", [ANCHOR_HEIGHT, 0])
def test_two_certificates_of_one_height_are_evidence_and_a_dispute_and_the_second_is_not_taken(
    signers: tuple[int, ...], decided: int
) -> None:
    """Invariant: a peer that has decided its invitation's block, or has no invitation, never replaces one certified block of a
    height by another. It reports that more than f voters lie."""
    bench, true = Newcomer(anchor_height=decided), history(ONE, decided + 1)
    bench.follow(*true[:decided])
    rival = bench.block(1, FALSE)
    bench.hear_commits(rival)
    second = Decision(true[decided].block, bench.certificate(Commit, true[decided].block, 0, signers))
    turn = bench.give(0, second)
    assert not turn.decided_blocks and {item.signer for item in turn.evidence} == {bench.signers[i].public for i in SIGNERS}
    assert bench.replica.fork_proof is not None
    assert f"{block_digest(second.block).hex()[:16]} is certified at height {decided + 1}" in bench.replica.fork_proof
    assert "more than 1 of 4 voters" in bench.replica.fork_proof
    assert [item.block for item in bench.give(1, BlockBytes(decided + 1, rival)).decided_blocks] == [rival]


def culprits(bench: Bench, voters: Iterable[int]) -> set[bytes]:
    return {bench.signers[voter].public for voter in voters}


@pytest.mark.parametrize("later", [1, 2], ids=["last height", "the one before"])
def test_a_certified_rival_of_a_decided_block_is_evidence_and_reported(later: int) -> None:
    """Invariant: a certificate of another block of a height that is still remembered accuses its signers, and is reported."""
    bench, true, false = Newcomer(anchor_height=0), history(ONE, 4), history(FALSE, 2)[1]
    bench.follow(*true[: 1 + later])
    assert bench.replica.fork_proof is None
    turn = bench.give(1, false)
    assert {item.signer for item in turn.evidence} == culprits(bench, SIGNERS) and not bench.faults
    assert f"{block_digest(false.block).hex()[:16]} is certified at height 2" in (bench.replica.fork_proof or "")
    assert not bench.give(1, false).records, "once"
    bench.follow(*true[1 + later :])
    assert bench.replica.fork_proof is not None and bench.replica.height == 5, "nothing halts"


@pytest.mark.parametrize("is_first", [False, True])
def test_signatures_of_a_decision_that_does_not_follow_are_evidence(is_first: bool) -> None:
    """Invariant: a voter that commits to two blocks in one view is accused, in both orders of arrival, also if one block does not
    follow. A block that does not follow is not decided."""
    bench = Bench()
    block = bench.block(bench.leader())
    false = encode_block(replace(decode_block(block), parent=bytes(32)))
    rival = Decision(false, bench.certificate(Commit, false, 0, SIGNERS))
    votes = [bench.commit(voter, block) for voter in SIGNERS]
    accused = set()
    for message in [rival, *votes] if is_first else [*votes, rival]:
        accused |= {item.signer for item in bench.give(2, message).evidence}
    assert accused == culprits(bench, SIGNERS)
    assert [item.block for item in bench.give(1, BlockBytes(1, block)).decided_blocks] == [block]
    assert bench.replica.fork_proof is not None


def test_a_peer_that_reports_a_rival_goes_on_signing() -> None:
    """Invariant: a certificate that breaks the two-thirds assumption, which stolen old keys can make, silences nobody."""
    bench = Bench()
    block = bench.block(bench.leader())
    false = encode_block(replace(decode_block(block), parent=bytes(32)))
    bench.give(2, Decision(false, bench.certificate(Commit, false, 0, SIGNERS)))
    assert bench.replica.fork_proof is not None and bench.replica.state_root_split is None
    bench.give(bench.leader(), bench.propose(block))
    assert bench.sent_votes(Prepare)


def test_a_newcomer_is_told_nothing_of_rivals_at_or_below_the_block_of_its_invitation() -> None:
    bench, true, false = Newcomer(anchor_height=2), history(ONE, 4), history(FALSE, 2)[1]
    for count in range(4):
        turn = bench.give(1, false)
        assert not turn.records and not bench.faults and bench.replica.fork_proof is None
        bench.follow(true[count])
    assert bench.replica.fork_proof is None


def test_a_decision_of_a_decided_height_is_verified_only_if_its_block_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant: repeated messages of honest peers cost nothing. Signatures of a rival are verified once, and must be valid."""
    bench, true, false = Newcomer(anchor_height=0), history(ONE, 2), history(FALSE, 2)[1]
    bench.follow(*true)
    verified: list[bytes] = []
    real = FastVerifier.verify

    def verify(self: FastVerifier, public: bytes, data: bytes, signature: bytes) -> bool:
        verified.append(public)
        return real(self, public, data, signature)

    monkeypatch.setattr(FastVerifier, "verify", verify)
    bench.give(1, replace(true[1], certificate=bench.certificate(Commit, true[1].block, 7, SIGNERS)))
    assert not verified and bench.replica.fork_proof is None
    for _ in range(3):
        bench.give(1, false)
    assert len(verified) == len(SIGNERS)
    signatures = dict(false.certificate.signatures) | {bench.signers[1].public: bytes(64)}
    bench.give(1, replace(false, certificate=replace(false.certificate, signatures=signatures)))
    assert bench.faults == ["bad-signature"]


def misled(anchor_height: int = ANCHOR_HEIGHT, count: int = 4) -> Newcomer:
    """Return a newcomer that decided a history in which a founder was dismissed. In the true history none was."""
    bench = Newcomer(anchor_height=anchor_height)
    bench.follow(*history(DISMISSES, count))
    return bench


@pytest.mark.parametrize("count", [4, ANCHOR_HEIGHT - 1])
def test_a_misled_newcomer_blames_nobody_for_decisions_and_votes_of_the_true_voters(count: int) -> None:
    """Invariant: no message of unexpected voters costs its sender anything before the invitation's block is decided. Only the
    peers that know the true history can lead back to it."""
    bench, true = misled(count=count), history(ONE, count + 1)[count]
    bench.voters = bench.counter.founders
    for message in (true, bench.commit(1, true.block), bench.prepare(1, true.block)):
        bench.give(1, message)
        assert not bench.faults and not bench.turn.decided_blocks


@pytest.mark.parametrize(("anchor_height", "count"), [(0, 4), (ANCHOR_HEIGHT, ANCHOR_HEIGHT), (4, 4)])
def test_votes_of_other_voters_are_a_fault_once_the_block_of_the_invitation_is_decided(anchor_height: int, count: int) -> None:
    bench = misled(anchor_height, count)
    bench.give(1, history(ONE, count + 1)[count])
    assert bench.faults == ["foreign-voters"]


@pytest.mark.parametrize("first", [DISMISSES, FALSE], ids=["other voters", "same voters"])
def test_decisions_of_another_history_that_came_early_do_not_keep_the_right_ones_out_twice(first: bytes) -> None:
    """Invariant: after a decision of another history, no decision of its sender is kept until the next request to it."""
    bench = Newcomer()
    false, true = history(first, 12), history(ONE, 12)
    bench.give_from(STRANGER, Status(13, 0))
    bench.step(TickInput(), wait=1.0)
    assert SendMessage((STRANGER,), GetDecisions(1, DECISIONS_PER_REPLY_MAX)) in bench.turn.sends
    bench.follow(true[0], true[1])
    for decision in false[3:]:
        bench.give_from(STRANGER, decision)
    assert len(bench.replica._future._decisions) == 9
    bench.follow(true[2])
    assert bench.replica.height == 4 and not bench.faults
    assert not bench.replica._future._decisions
    for decision in false[4:]:
        bench.give_from(STRANGER, decision)
        bench.give(1, decision)
    assert not bench.replica._future._decisions
