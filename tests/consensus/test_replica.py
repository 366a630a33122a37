from __future__ import annotations

import dataclasses

import pytest

from consensus.block import block_digest, decode_block, encode_block
from consensus.effects import DecidedBlock, OwnStatement, SendDecisions, StepEffects, StoredBlock, StoredCertificate
from consensus.inputs import AgreementMessage, ConnectedInput, TickInput, WorkChangedInput
from protocol import codec
from protocol.errors import LocalProtocolError
from protocol.limits import DECISIONS_PER_REPLY_MAX
from protocol.messages import (
    AGREEMENT_MESSAGES,
    NO_VIEW,
    BlockBytes,
    Certificate,
    Commit,
    Decision,
    GetBlock,
    GetDecisions,
    Prepare,
    Prepared,
    Propose,
    ProposeEnvelope,
    Status,
    Timeout,
    TimeoutEnvelope,
    ViewEnded,
)
from tests.consensus.bench import CHAIN_ID, Bench, follower, others
from tests.consensus.certificates import certificate_of
from tests.consensus.counter import Counter

ONE = b"\x91\x01"  # the item 1
TWO = b"\x91\x02"


def leader(view: int = 0) -> Bench:
    return Bench(place=Bench().leader(view))


def proposed(bench: Bench) -> bytes:
    """Return the leader's block, which the replica has prepared."""
    block = bench.block(bench.leader())
    bench.give(bench.leader(), bench.propose(block))
    return block


def decide(bench: Bench, block: bytes) -> DecidedBlock:
    certificate = bench.certificate(Commit, block, 0, others(bench))
    return bench.give(others(bench)[0], Decision(block, certificate)).decided_blocks[0]


def tags(turn: StepEffects) -> list[str]:
    return [record.slot[0] for record in turn.records if isinstance(record, OwnStatement)]


# One decision --------------------------------------------------------------------------------------------------------


def test_a_leader_with_work_proposes_and_prepares() -> None:
    bench = leader()
    turn = bench.add_work(1)
    assert len(bench.sent(ProposeEnvelope)) == 1 and tags(turn) == ["propose", "prepare"]


def test_a_leader_without_work_is_quiet_and_sets_no_timer() -> None:
    turn = leader().step(WorkChangedInput())
    assert not turn.sends and turn.deadline is None


def test_a_proposal_two_prepares_and_two_commits_decide_at_four_voters(bench: Bench) -> None:
    block = proposed(bench)
    assert len(bench.sent_votes(Prepare)) == 1
    first, second, _ = others(bench)
    bench.give(first, bench.prepare(first, block))
    assert not bench.sent_votes(Commit)
    bench.give(second, bench.prepare(second, block))
    assert len(bench.sent_votes(Commit)) == 1
    bench.give(first, bench.commit(first, block))
    turn = bench.give(second, bench.commit(second, block))
    assert [decided.digest for decided in turn.decided_blocks] == [block_digest(block)] and bench.replica.height == 2


@pytest.fixture
def block(bench: Bench) -> bytes:
    return bench.block(bench.leader())


def test_votes_that_come_before_the_proposal_count(block: bytes, bench: Bench) -> None:
    bench.give_prepares(block)
    bench.give(bench.leader(), bench.propose(block))
    assert len(bench.sent_votes(Commit)) == 1


def test_a_single_voter_decides_alone() -> None:
    turn = Bench(n=1).add_work(1)
    assert len(turn.decided_blocks) == 1 and turn.deadline is None


def test_a_late_commit_shows_in_the_next_block(bench: Bench) -> None:
    block = proposed(bench)
    decided = decide(bench, block)
    late = bench.sign(bench.place, Commit(bench.voters.hash, 1, 0, decided.digest))
    assert late.signer not in decided.certificate.signatures
    bench.give(others(bench)[0], bench.commit(bench.place, block))
    bench.apply(decided)
    certificate = decode_block(bench.block(bench.leader())).parent_certificate
    assert certificate is not None and len(certificate.signatures) == 4


# Safety --------------------------------------------------------------------------------------------------------------


def test_block_is_stored_in_the_turn_that_prepares_it_and_the_certificate_in_the_one_that_commits(
    block: bytes, bench: Bench
) -> None:
    turn = bench.give(bench.leader(), bench.propose(block))
    kinds = [type(record) for record in turn.records]
    assert kinds.index(StoredBlock) < kinds.index(OwnStatement)
    for voter in others(bench)[:2]:
        turn = bench.give(voter, bench.prepare(voter, block))
    kinds = [type(record) for record in turn.records]
    assert kinds.index(StoredCertificate) < kinds.index(OwnStatement)


def test_a_second_proposal_of_a_leader_is_evidence_and_not_prepared(bench: Bench) -> None:
    proposed(bench)
    turn = bench.give(bench.leader(), bench.propose(bench.block(bench.leader(), TWO)))
    assert [evidence.signer for evidence in turn.evidence] == [bench.signers[bench.leader()].public]
    assert not bench.sent_votes(Prepare)


@pytest.mark.parametrize("kind", ["prepare", "commit"])
def test_two_votes_in_one_slot_are_evidence_and_the_first_counts(bench: Bench, kind: str) -> None:
    one, two = bench.block(bench.leader()), bench.block(bench.leader(), TWO)
    liar = others(bench)[0]
    bench.give(liar, getattr(bench, kind)(liar, one))
    turn = bench.give(others(bench)[1], getattr(bench, kind)(liar, two))
    assert len(turn.evidence) == 1 and not bench.faults
    assert not bench.give(liar, getattr(bench, kind)(liar, two)).evidence


def test_two_timeouts_in_one_slot_are_evidence(bench: Bench) -> None:
    block, liar = bench.block(bench.leader()), others(bench)[0]
    bench.give(liar, bench.timed_out(liar))
    high = bench.certificate(Prepare, block, 0, others(bench))
    assert len(bench.give(liar, bench.timed_out(liar, 0, high, (0, block))).evidence) == 1


def test_a_commit_against_a_timeout_that_hides_its_certificate_is_evidence(bench: Bench) -> None:
    block, liar = bench.block(bench.leader()), others(bench)[0]
    bench.give(liar, bench.commit(liar, block))
    assert len(bench.give(liar, bench.timed_out(liar)).evidence) == 1


def test_nothing_is_prepared_or_committed_after_a_timeout(bench: Bench) -> None:
    bench.add_work(1)
    bench.step(TickInput(), wait=1.1)
    assert len(bench.sent(TimeoutEnvelope)) == 1
    block = proposed(bench)
    assert not bench.sent_votes(Prepare)
    bench.give(others(bench)[0], Prepared(bench.certificate(Prepare, block, 0, others(bench))))
    assert not bench.sent_votes(Commit)


def test_a_voter_that_has_not_applied_the_parent_prepares_nothing_but_commits_on_a_certificate(bench: Bench) -> None:
    maker = Bench(place=bench.place)
    first = proposed(bench)
    decided = decide(bench, first)
    decide(maker, first)
    maker.apply(decided)
    second = maker.block(maker.leader(), TWO)
    bench.give(maker.leader(), maker.propose(second))
    assert not bench.sent_votes(Prepare)
    bench.give(0, Prepared(maker.certificate(Prepare, second, 0, others(bench))))
    assert len(bench.sent_votes(Commit)) == 1
    bench.apply(decided)
    assert len(bench.sent_votes(Prepare)) == 1


def test_a_decided_block_that_names_another_state_stops_all_signing(bench: Bench) -> None:
    decided = decide(bench, encode_block(dataclasses.replace(decode_block(bench.block(bench.leader())), state_root=bytes(32))))
    assert bench.replica.divergence is not None
    bench.counter.add(5)
    bench.apply(decided)
    assert bench.step(TickInput(), wait=100.0).records == ()


@pytest.mark.parametrize(
    "change",
    [
        {"time_ms": 10**13},
        {"height": 2},
        {"parent": bytes(32)},
        {"voters": bytes(32)},
        {"next_voters": bytes(32)},
        {"state_root": bytes(32)},
        {"proposer": bytes(32)},
        {"failed": {bytes(32): 9}},
        {"body": b"\x94\x01\x02\x03\x04"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_fresh_block_with_one_wrong_part_is_not_prepared(bench: Bench, change: dict[str, object]) -> None:
    block = encode_block(dataclasses.replace(decode_block(bench.block(bench.leader())), **change))  # type: ignore[arg-type]
    bench.give(bench.leader(), bench.propose(block))
    assert not bench.sent_votes(Prepare) and bench.replica.block_refusal


def on_another_root(bench: Bench, view: int) -> None:
    """Propose as the leader of this view with another state root."""
    justification = bench.timeout_certificate(view - 1, others(bench)) if view else None
    block = decode_block(bench.block(bench.leader(view)))
    other = dataclasses.replace(block, state_root=b"\xee" * 32, time_ms=block.time_ms + view)
    bench.give(bench.leader(view), bench.propose(encode_block(other), view, justification))


def test_a_block_on_another_state_root_is_refused_by_naming_both_roots(bench: Bench) -> None:
    on_another_root(bench, 0)
    mine = decode_block(bench.block(bench.leader())).state_root.hex()[:16]
    assert bench.replica.block_refusal == f"its state root is {'ee' * 8}, but ours is {mine}"
    assert bench.replica.state_root_split is None, "one leader may lie, or have computed wrongly"


def test_more_than_n_minus_q_leaders_on_another_state_root_are_a_dispute_until_the_height_is_decided(bench: Bench) -> None:
    for view in (0, 1):
        on_another_root(bench, view)
    assert (
        bench.replica.state_root_split is not None
        and "2 of 4 voters" in bench.replica.state_root_split
        and "height 1" in bench.replica.state_root_split
    )
    assert not bench.sent_votes(Prepare)
    decide(bench, bench.block(bench.leader()))
    assert bench.replica.state_root_split is None


def test_one_leader_in_several_views_is_no_dispute() -> None:
    bench = Bench()
    again = next(view for view in range(1, 20) if bench.leader(view) == bench.leader(0))
    bench = Bench(place=next(i for i in range(4) if i != bench.leader(0)))
    for view in (0, again):
        on_another_root(bench, view)
    assert bench.replica.view == again and bench.replica.state_root_split is None


def test_the_same_slot_is_never_signed_with_other_bytes(bench: Bench) -> None:
    proposed(bench)
    with pytest.raises(LocalProtocolError):
        bench.replica._own.sign_statement(Prepare(bench.voters.hash, 1, 0, bytes(32)))


# Restart -------------------------------------------------------------------------------------------------------------


def test_after_a_restart_the_same_votes_are_sent_and_no_others(bench: Bench) -> None:
    bench.give_prepares(proposed(bench))
    before = bench.sent_votes(Commit)
    bench.restart()
    bench.connect(others(bench)[0])
    assert bench.sent_votes(Commit) == before and len(bench.sent(Prepared)) == 1
    bench.give(bench.leader(), bench.propose(bench.block(bench.leader(), TWO)))
    assert not bench.sent_votes(Prepare)


def test_a_restarted_leader_proposes_the_block_it_signed() -> None:
    bench = leader()
    bench.add_work(1)
    before = bench.sent(ProposeEnvelope)
    bench.counter.add(2)
    bench.restart()
    assert bench.sent(ProposeEnvelope) == before


def test_a_restarted_voter_names_its_certificate_when_it_times_out(bench: Bench) -> None:
    bench.give_prepares(proposed(bench))
    bench.restart()
    bench.step(TickInput())
    bench.step(TickInput(), wait=2.0)
    [message] = bench.sent(TimeoutEnvelope)
    assert isinstance(message, TimeoutEnvelope) and codec.decode_message(message.timeout.body, (Timeout,)).high_view == 0


@pytest.mark.parametrize("statement", [Timeout, Propose])
def test_own_statements_of_another_voter_set_count_for_nothing_and_are_not_said(statement: type[Timeout] | type[Propose]) -> None:
    """It had wrong voters when it signed, and has restored the certified state since."""
    bench = leader()
    block, elsewhere = bench.block(bench.place), bytes(32)
    digest = block_digest(block)
    foreign = Timeout(elsewhere, 1, 0, -1, None) if statement is Timeout else Propose(elsewhere, 1, 0, digest)
    voted = OwnStatement((foreign.TAG, 1, 0), bench.sign(bench.place, foreign))
    bench.journal.append_records([StoredBlock(1, digest, block), voted])
    bench.restart()
    assert not bench.turn.sends
    for voter in others(bench)[:2]:
        bench.connect(voter)
        assert not bench.sent(TimeoutEnvelope) and not bench.sent(ProposeEnvelope)
        if statement is Timeout:
            bench.give(voter, bench.timed_out(voter, 0))
    assert bench.replica.view == 0, "two timeouts are no quorum"
    assert bench.replica._book is not None and not bench.replica._book.statements_of(bench.signers[bench.place].public)


def test_a_certificate_of_another_voter_set_is_not_recovered(block: bytes, bench: Bench) -> None:
    """Its signers may vote no more. In a Timeout the certificate would prove nothing, and it must lock nobody."""
    foreign = Prepare(bytes(32), 1, 0, block_digest(block))
    signatures = {bench.signers[i].public: bench.sign(i, foreign).signature for i in others(bench)}
    certificate = Certificate(codec.encode(foreign), signatures)
    bench.journal.append_records([StoredBlock(1, block_digest(block), block), StoredCertificate(1, certificate)])
    bench.restart()
    assert bench.replica._book is not None and bench.replica._book.highest_prepare_certificate is None
    bench.add_work(1)
    bench.step(TickInput(), wait=2.0)
    [message] = bench.sent(TimeoutEnvelope)
    assert isinstance(message, TimeoutEnvelope) and message.high is None
    assert codec.decode_message(message.timeout.body, (Timeout,)).high_view == NO_VIEW


# Views ---------------------------------------------------------------------------------------------------------------


def test_one_timeout_is_not_joined_and_two_are(bench: Bench) -> None:
    first, second, _ = others(bench)
    bench.give(first, bench.timed_out(first))
    assert not bench.sent(TimeoutEnvelope)
    bench.give(second, bench.timed_out(second))
    assert len(bench.sent(TimeoutEnvelope)) == 1 and bench.replica.view == 1


def test_two_timeouts_of_a_higher_view_take_the_replica_there(bench: Bench) -> None:
    for voter in others(bench)[:2]:
        bench.give(voter, bench.timed_out(voter, view=5))
    assert bench.replica.view == 6


def test_who_has_nothing_to_wait_for_says_again_what_others_may_lack_and_gives_up_no_view(bench: Bench) -> None:
    for voter in others(bench)[:2]:
        bench.give(voter, bench.timed_out(voter))
    assert bench.replica.view == 1
    for _ in range(3):
        assert bench.turn.deadline is not None
        bench.step(TickInput(), wait=bench.turn.deadline - bench.now)
        assert given_up(bench) == [0] and bench.replica.view == 1 and not bench.turn.records


def test_of_timeouts_however_far_ahead_those_of_all_possible_liars_are_passed_over(bench: Bench) -> None:
    liar, first, second = others(bench)
    bench.give(liar, bench.timed_out(liar, 2**53 - 1))
    assert bench.replica.view == 0 and not bench.sent(TimeoutEnvelope)
    bench.give(first, bench.timed_out(first, 300))
    assert bench.replica.view == 300 and given_up(bench) == [300, 299]
    for voter, view in ((first, 300), (second, 300)):  # a repeated message, or a first one
        bench.give(voter, bench.timed_out(voter, view))
    assert bench.replica.view == 301


def test_a_timeout_without_the_certificate_it_names_is_refused(bench: Bench) -> None:
    liar = others(bench)[0]
    for view in (0, 300):
        bench.give(liar, bench.timed_out(liar, view, None, (0, bench.block(bench.leader()))))
        assert bench.faults == ["bad-timeout"]


def test_a_proposal_of_a_later_view_needs_the_timeouts_of_exactly_the_view_before(bench: Bench) -> None:
    block = bench.block(bench.leader(2))
    bench.give(bench.leader(2), bench.propose(block, 2, bench.timeout_certificate(0, others(bench))))
    assert bench.faults == ["bad-justification"]
    bench.give(bench.leader(2), bench.propose(block, 2, None))
    assert bench.faults == ["bad-justification"]
    bench.give(bench.leader(2), bench.propose(block, 2, bench.timeout_certificate(1, others(bench)[:2])))
    assert bench.faults == ["no-quorum"]
    bench.give(bench.leader(2), bench.propose(block, 2, bench.timeout_certificate(1, others(bench))))
    assert not bench.faults and bench.replica.view == 2


def test_a_prepared_block_must_be_proposed_again_and_no_clock_judges_it(bench: Bench) -> None:
    old = bench.block(bench.leader())
    high = bench.certificate(Prepare, old, 0, others(bench))
    justification = bench.timeout_certificate(0, others(bench), high, (0, old))
    bench.give(bench.leader(1), bench.propose(bench.block(bench.leader(1), TWO), 1, justification))
    assert bench.faults == ["bad-justification"]
    bench.now -= 500.0  # by this clock the block is from the future
    bench.give(bench.leader(1), bench.propose(old, 1, justification))
    assert not bench.faults and len(bench.sent_votes(Prepare)) == 1


# A justification may hold a prepare certificate that is new to this replica. It locks like any other one. -----------------------


def carriers(bench: Bench, block: bytes) -> tuple[Certificate, dict[str, AgreementMessage]]:
    """Return a prepare certificate of view 0, and the messages that carry it inside the timeouts of that view."""
    high = bench.certificate(Prepare, block, 0, others(bench))
    justification = bench.timeout_certificate(0, others(bench), high, (0, block))
    return high, {"proposal": bench.propose(block, 1, justification), "view ended": ViewEnded(justification)}


CARRIERS = pytest.mark.parametrize("carrier", ["proposal", "view ended"])


@CARRIERS
def test_the_certificate_of_a_justification_is_adopted_and_durable(block: bytes, bench: Bench, carrier: str) -> None:
    high, by = carriers(bench, block)
    bench.give(bench.leader(1), by[carrier])
    assert not bench.faults and bench.replica.view == 1
    assert [record.certificate for record in bench.turn.records if isinstance(record, StoredCertificate)] == [high]
    for _ in range(2):  # before a restart and after it
        bench.step(TickInput(), wait=1_000.0)
        bench.connect(others(bench)[0])
        shown = [message for message in bench.sent(TimeoutEnvelope) if isinstance(message, TimeoutEnvelope)]
        views = [codec.decode_message(message.timeout.body, (Timeout,)).high_view for message in shown]
        assert shown and views == [0] * len(shown) and all(message.high == high for message in shown)
        bench.restart()


@CARRIERS
def test_votes_in_the_certificate_of_a_justification_are_evidence_against_a_voter_that_contradicts_them(
    bench: Bench, carrier: str
) -> None:
    liar = others(bench)[0]
    one, two = bench.block(bench.leader()), bench.block(bench.leader(), TWO)
    bench.give(liar, bench.prepare(liar, one))
    turn = bench.give(bench.leader(1), carriers(bench, two)[1][carrier])
    assert [item.signer for item in turn.evidence] == [bench.signers[liar].public]


@CARRIERS
def test_a_justification_without_a_quorum_behind_its_certificate_is_refused_and_leaves_no_lock(
    block: bytes, bench: Bench, carrier: str
) -> None:
    high = bench.certificate(Prepare, block, 0, others(bench)[:2])
    justification = bench.timeout_certificate(0, others(bench), high, (0, block))
    bench.give(bench.leader(1), bench.propose(block, 1, justification) if carrier == "proposal" else ViewEnded(justification))
    assert bench.faults == ["no-quorum"] and bench.replica.view == 0
    assert not any(isinstance(record, StoredCertificate) for record in bench.turn.records)


def test_a_proposal_of_the_first_view_carries_no_justification(bench: Bench) -> None:
    block, justification = bench.block(bench.leader()), bench.timeout_certificate(0, others(bench))
    bench.give(bench.leader(), bench.propose(block, 0, justification))
    assert bench.faults == ["bad-justification"] and not bench.sent_votes(Prepare)


def test_a_timeout_that_names_a_certificate_of_a_later_view_is_refused(bench: Bench) -> None:
    liar, block = others(bench)[0], bench.block(bench.leader(1))
    bench.give(liar, bench.timed_out(liar, 0, bench.certificate(Prepare, block, 1, others(bench)), (1, block)))
    assert bench.faults == ["bad-timeout"]


def test_a_timeout_with_a_prepare_certificate_of_another_height_is_refused(bench: Bench) -> None:
    liar, digest = others(bench)[0], block_digest(bench.block(bench.leader()))
    statement = Prepare(bench.voters.hash, bench.replica.height + 1, 0, digest)
    high = certificate_of(CHAIN_ID, statement, (bench.signers[i] for i in others(bench)))
    bench.give(liar, bench.timed_out(liar, 0, high))
    assert bench.faults == ["wrong-height"]


def test_a_proposal_that_is_repeated_carries_the_justification_with_which_it_came(bench: Bench) -> None:
    block = bench.block(bench.leader(1))
    justification = bench.timeout_certificate(0, others(bench))
    bench.give(bench.leader(1), bench.propose(block, 1, justification))
    bench.connect(next(i for i in others(bench) if i != bench.leader(1)))
    [repeated] = bench.sent(ProposeEnvelope)
    assert isinstance(repeated, ProposeEnvelope) and repeated.justification == justification


def test_a_new_leader_proposes_the_prepared_block_after_fetching_it() -> None:
    bench = leader(view=1)
    old = bench.block(bench.leader())
    high = bench.certificate(Prepare, old, 0, others(bench))
    for voter in others(bench):
        bench.give(voter, bench.timed_out(voter, 0, high, (0, old)))
    assert bench.replica.view == 1 and not bench.sent(ProposeEnvelope)
    bench.step(TickInput(), wait=0.2)
    assert bench.sent(GetBlock) == [GetBlock(1, block_digest(old))]
    bench.give(others(bench)[0], BlockBytes(1, old))
    [message] = bench.sent(ProposeEnvelope)
    assert isinstance(message, ProposeEnvelope) and message.propose.body.endswith(block_digest(old))


def test_a_commit_certificate_of_any_view_decides_against_a_vote_already_held(bench: Bench) -> None:
    proposed(bench)
    other = bench.block(bench.leader(), TWO)
    bench.give(others(bench)[0], Decision(other, bench.certificate(Commit, other, 3, others(bench))))
    assert bench.replica.height == 2 and bench.turn.decided_blocks[0].digest == block_digest(other)


def test_a_prepare_certificate_of_a_later_view_takes_the_replica_there_and_is_committed(bench: Bench) -> None:
    block = bench.block(bench.leader(2))
    bench.give(others(bench)[0], Prepared(bench.certificate(Prepare, block, 2, others(bench))))
    assert bench.replica.view == 2 and len(bench.sent_votes(Commit)) == 1


def test_a_timeout_is_repeated_with_a_certificate_of_the_next_view_and_taken_by_who_is_still_in_the_one_before(
    bench: Bench,
) -> None:
    block = bench.block(bench.leader(1))
    proposed(bench)
    bench.step(TickInput(), wait=100.0)
    assert given_up(bench) == [0] and bench.replica.view == 0
    bench.give(others(bench)[0], Prepared(bench.certificate(Prepare, block, 1, others(bench))))
    bench.connect(others(bench)[0])
    repeated = [message for message in bench.sent(TimeoutEnvelope) if isinstance(message, TimeoutEnvelope)]
    certified = [codec.decode_message(message.high.vote, (Prepare,)).view for message in repeated if message.high]
    assert given_up(bench) == [0] and certified == [1]
    late = follower()
    late.give(others(late)[0], late.timed_out(others(late)[0], 0, late.certificate(Prepare, block, 1, others(late))))
    assert not late.faults and late.replica.view == 1


def test_a_timeout_certificate_takes_the_replica_to_the_next_view(bench: Bench) -> None:
    bench.give(others(bench)[0], ViewEnded(bench.timeout_certificate(3, others(bench))))
    assert bench.replica.view == 4


def in_view_one() -> Bench:
    """Return a replica in view 1 after a timeout certificate, which it does not write. It has prepared there."""
    bench = follower()
    bench.give(others(bench)[0], ViewEnded(bench.timeout_certificate(0, others(bench))))
    block = bench.block(bench.leader(1))
    bench.give(bench.leader(1), bench.propose(block, 1, bench.timeout_certificate(0, others(bench))))
    assert bench.replica.view == 1 and len(bench.sent_votes(Prepare)) == 1
    return bench


def given_up(bench: Bench) -> list[int]:
    messages = [message for message in bench.sent(TimeoutEnvelope) if isinstance(message, TimeoutEnvelope)]
    return [codec.decode_message(message.timeout.body, (Timeout,)).view for message in messages]


def test_who_cannot_show_why_it_is_in_a_view_gives_up_the_one_before_once() -> None:
    bench = in_view_one()
    assert given_up(bench) == [], "it holds the certificate"
    bench.restart()
    assert given_up(bench) == [0] and bench.replica.view == 1
    bench.restart()
    bench.step(TickInput())
    assert [voted.slot for voted in bench.journal.read_restart_state().votes].count(("timeout", 1, 0)) == 1


def test_who_holds_the_certificate_of_its_view_gives_up_nothing() -> None:
    bench = in_view_one()
    block = bench.block(bench.leader(1))
    for voter in others(bench)[:2]:
        bench.give(voter, bench.prepare(voter, block, 1))
    bench.restart()
    assert given_up(bench) == []


def leader_of_view_one() -> Bench:
    """Return a replica that has proposed in view 1 with the certificate of view 0, which it does not write."""
    bench = leader(view=1)
    bench.counter.add(1)
    bench.give(others(bench)[0], ViewEnded(bench.timeout_certificate(0, others(bench))))
    assert len(bench.sent(ProposeEnvelope)) == 1
    return bench


def test_a_restarted_leader_of_a_later_view_proposes_again_when_it_can_justify_it_again() -> None:
    bench = leader_of_view_one()
    [before] = bench.sent(ProposeEnvelope)
    bench.restart()
    assert bench.replica.view == 1 and not bench.sent(ProposeEnvelope)
    bench.give(others(bench)[0], ViewEnded(bench.timeout_certificate(0, others(bench))))
    [again] = bench.sent(ProposeEnvelope)
    assert isinstance(before, ProposeEnvelope) and isinstance(again, ProposeEnvelope)
    assert again.propose == before.propose and again.justification is not None


def test_a_block_that_was_prepared_in_this_view_is_not_proposed_again_by_its_restarted_leader() -> None:
    bench = leader_of_view_one()
    [stored] = bench.journal.read_restart_state().blocks
    for voter in others(bench)[:2]:
        bench.give(voter, bench.prepare(voter, stored.block, 1))
    bench.restart()
    for voter in others(bench):
        bench.give(voter, bench.timed_out(voter, 0))
        assert not bench.sent(ProposeEnvelope), "its certificate is higher than any that timeouts of view 0 may carry"


def test_own_messages_are_repeated_while_there_is_work(bench: Bench) -> None:
    proposed(bench)
    votes = bench.sent_votes(Prepare)
    repeated = []
    for _ in range(12):
        assert bench.turn.deadline is not None
        bench.step(TickInput(), wait=max(0.0, bench.turn.deadline - bench.now))
        repeated += bench.sent_votes(Prepare)
    assert repeated and set(repeated) == set(votes)


def test_a_refused_proposal_is_no_cause_for_repeats(bench: Bench) -> None:
    """Nothing was signed because of it. Otherwise a lying leader could keep an idle network busy for ever."""
    block = encode_block(dataclasses.replace(decode_block(bench.block(bench.leader())), state_root=bytes(32)))
    bench.give(bench.leader(), bench.propose(block))
    assert bench.replica.block_refusal and bench.turn.deadline is None


# Refused -------------------------------------------------------------------------------------------------------------


def test_a_vote_with_a_flipped_bit_a_foreign_key_or_another_voter_set_is_refused(bench: Bench) -> None:
    block, voter = bench.block(bench.leader()), others(bench)[0]
    vote = bench.prepare(voter, block)
    flipped = bytes([vote.vote.signature[0] ^ 1]) + vote.vote.signature[1:]
    bench.give(voter, dataclasses.replace(vote, vote=dataclasses.replace(vote.vote, signature=flipped)))
    assert bench.faults == ["bad-signature"]
    bench.give(voter, dataclasses.replace(vote, vote=dataclasses.replace(vote.vote, signer=bytes(32))))
    assert bench.faults == ["not-a-voter"]
    foreign = bench.sign(voter, Prepare(bytes(32), 1, 0, block_digest(block)))
    bench.give(voter, dataclasses.replace(vote, vote=foreign))
    assert bench.faults == ["foreign-voters"]


def test_a_proposal_by_somebody_else_than_the_leader_is_refused(bench: Bench) -> None:
    block = bench.block(bench.leader(1))
    wrong = bench.sign(bench.leader(1), Propose(bench.voters.hash, 1, 0, block_digest(block)))
    bench.give(bench.leader(1), dataclasses.replace(bench.propose(block), propose=wrong))
    assert bench.faults == ["not-the-leader"]


def test_a_certificate_below_the_quorum_is_refused(block: bytes, bench: Bench) -> None:
    bench.give(0, Decision(block, bench.certificate(Commit, block, 0, others(bench)[:2])))
    assert bench.faults == ["no-quorum"]


def test_other_bytes_beside_a_certificate_are_refused(bench: Bench) -> None:
    block, other = bench.block(bench.leader()), bench.block(bench.leader(), TWO)
    bench.give(0, Decision(other, bench.certificate(Commit, block, 0, others(bench))))
    assert bench.faults == ["wrong-block"] and bench.replica.height == 1


# Catching up ---------------------------------------------------------------------------------------------------------


def test_a_new_link_is_greeted_and_a_peer_far_ahead_is_asked_at_once(bench: Bench) -> None:
    peer = others(bench)[0]
    bench.step(ConnectedInput(bench.signers[peer].public))
    assert bench.sent(Status) == [Status(1, 0)]
    bench.give(peer, Status(40, 0))
    [request] = bench.sent(GetDecisions)
    assert isinstance(request, GetDecisions) and request.first == 1


def test_who_does_not_deliver_is_passed_over(bench: Bench) -> None:
    asked = set()
    for peer in others(bench)[:2]:
        bench.give(peer, Status(40, 0))
    for _ in range(4):
        bench.step(TickInput(), wait=0.6)
        asked |= {send.to for send in bench.turn.sends if isinstance(getattr(send, "message", None), GetDecisions)}
    assert len(asked) == 2


def test_a_request_for_decisions_is_answered_from_the_journal(bench: Bench) -> None:
    decide(bench, proposed(bench))
    turn = bench.give(others(bench)[0], GetDecisions(1, 5))
    assert turn.sends == (SendDecisions(bench.signers[others(bench)[0]].public, 1, 5),)


def behind_a_change_of_voters() -> tuple[Bench, DecidedBlock, Decision]:
    """Return a replica that has decided two heights and applied none, its first block, and a decision of the third height."""
    bench, maker = follower(), follower()
    for each in (bench, maker):
        each.counter.candidates = (bytes(32),)
    first = decide(bench, bench.block(bench.leader(), codec.encode([Counter.CHANGE])))
    decide(maker, first.block)
    maker.apply(first)
    second = decide(maker, maker.block(maker.leader(), TWO))
    bench.give(others(bench)[0], Decision(second.block, second.certificate))
    maker.apply(second)
    maker.voters = maker.counter.voters[1]
    third = maker.block(0, b"\x91\x03")
    everybody = tuple(range(maker.n))
    return bench, first, Decision(third, maker.certificate(Commit, third, 0, everybody))


def test_no_decision_is_asked_for_while_it_is_unknown_whose_signatures_prove_it() -> None:
    """A block may be applied slowly. Decisions that come meanwhile are useless and would be requested again and again."""
    bench, first, _ = behind_a_change_of_voters()
    bench.give(others(bench)[0], Status(40, 0))
    assert bench.replica.height == 3 and bench.turn.deadline is None and not bench.sent(GetDecisions)
    bench.apply(first)
    assert bench.sent(GetDecisions) == [GetDecisions(3, DECISIONS_PER_REPLY_MAX)]


def test_a_decision_that_comes_before_it_is_known_whose_signatures_prove_it_is_kept_until_then() -> None:
    bench, first, third = behind_a_change_of_voters()
    bench.give(others(bench)[0], third)
    assert not bench.turn.decided_blocks and not bench.faults
    bench.apply(first)
    assert [decided.block for decided in bench.turn.decided_blocks] == [third.block]


def test_messages_of_the_next_height_wait_until_it_is_reached() -> None:
    bench, maker = follower(), follower()
    first = proposed(bench)
    decide(maker, first)
    maker.apply(maker.turn.decided_blocks[0])
    bench.give(maker.leader(), maker.propose(maker.block(maker.leader(), TWO)))
    bench.apply(decide(bench, first))
    assert len(bench.sent_votes(Prepare)) == 1


def test_the_memory_for_future_heights_is_bounded_per_peer() -> None:
    bench, maker = follower(), follower()
    decide(maker, bench.block(bench.leader()))
    maker.apply(maker.turn.decided_blocks[0])
    block, voter = maker.block(maker.leader()), others(bench)[0]
    for view in range(200):
        bench.give(voter, maker.prepare(voter, block, view))
        bench.give(voter, maker.propose(block, 0))
    kept = bench.replica._future
    assert sum(map(len, kept._small.values())) + len(kept._proposals) <= 17


def test_votes_far_ahead_of_the_view_are_not_kept(bench: Bench) -> None:
    block, voter = bench.block(bench.leader()), others(bench)[0]
    for view in range(300):
        bench.give(voter, bench.prepare(voter, block, view))
    assert bench.replica._book is not None and len(bench.replica._book._statements[bench.signers[voter].public]) <= 65


def test_every_message_survives_its_encoding(block: bytes, bench: Bench) -> None:
    high = bench.certificate(Prepare, block, 0, (0, 1, 2))
    messages = [
        bench.propose(block, 1, bench.timeout_certificate(0, (0, 1, 2), high, (0, block))),
        bench.timed_out(0, 0, high, (0, block)),
        ViewEnded(bench.timeout_certificate(0, (0, 1, 2))),
        Decision(block, bench.certificate(Commit, block, 0, (0, 1, 2))),
    ]
    assert all(codec.decode_message(codec.encode(message), AGREEMENT_MESSAGES) == message for message in messages)
