"""Bounds of the memory, the answers and the requests of a replica, for any messages of the others."""

from __future__ import annotations

import dataclasses

from consensus.block import decode_block, encode_block
from consensus.effects import SendMessage, StepEffects
from consensus.inputs import ConnectedInput, DisconnectedInput, MessageInput, TickInput
from consensus.pbft.block_sync import RESPONSE_BURST_MAX, RESPONSES_PER_SECOND, RETRY_SECONDS_MAX, BlockSync, FutureHeightMessages
from consensus.voter_set import verify_timeout_certificate
from protocol import codec
from protocol.identity import Signed
from protocol.limits import DECISIONS_PER_REPLY_MAX, VIEWS_AHEAD_MAX
from protocol.messages import (
    NO_VIEW,
    Commit,
    Decision,
    GetBlock,
    GetDecisions,
    GetRememberedStatements,
    Prepare,
    Prepared,
    Propose,
    ProposeEnvelope,
    RememberedStatements,
    Status,
    Timeout,
    TimeoutCertificate,
    ViewEnded,
    Vote,
)
from tests.consensus.bench import BODY, CHAIN_ID, Bench, ShortBench, follower, others, short_others
from tests.consensus.counter import Counter
from tests.sim.keys import FastVerifier

LIAR, HONEST = b"l" * 32, b"h" * 32
ABSURD = 2**53 - 1


def decide(bench: Bench, item: int) -> bytes:
    block = bench.block(bench.leader(), bytes([0x91, item]))
    turn = bench.give(others(bench)[0], Decision(block, bench.certificate(Commit, block, 0, others(bench))))
    bench.apply(turn.decided_blocks[0])
    return block


# Requests ------------------------------------------------------------------------------------------------------------


def test_a_peer_that_asks_without_end_is_answered_at_the_named_rate(bench: Bench) -> None:
    asker = others(bench)[0]
    answers = sum(bool(bench.give(asker, GetDecisions(1, 5)).sends) for _ in range(200))
    assert answers == RESPONSE_BURST_MAX
    bench.now += 2.0
    assert sum(bool(bench.give(asker, GetDecisions(1, 5)).sends) for _ in range(200)) == 2 * RESPONSES_PER_SECOND
    assert not bench.give(asker, GetBlock(0, bytes(32))).sends and not bench.give(asker, GetRememberedStatements()).sends
    assert bench.give(others(bench)[1], GetBlock(0, bytes(32))).sends, "the others are not made to wait for it"


def test_a_peer_without_a_link_is_not_counted_any_more(bench: Bench) -> None:
    bench.give(others(bench)[0], GetDecisions(1, 5))
    bench.step(DisconnectedInput(bench.signers[others(bench)[0]].public))
    assert not bench.replica._answers._left


# Later heights -------------------------------------------------------------------------------------------------------


def test_nothing_that_strangers_say_of_later_heights_is_kept_however_many_they_are(bench: Bench) -> None:
    vote = Vote(bench.sign(others(bench)[0], Prepare(bytes(32), 2, 0, bytes(32))))
    propose = bench.sign(others(bench)[0], Propose(bytes(32), 2, 0, bytes(32)))
    said = (vote, ProposeEnvelope(propose, b"header", b"body", None))
    for stranger in range(100):
        for message in said:
            bench.give_from(stranger.to_bytes(32, "big"), message)
    assert not bench.replica._future._small and not bench.replica._future._proposals
    for message in said:
        bench.give(others(bench)[0], message)
    assert bench.replica._future._small and bench.replica._future._proposals, "what voters say is kept"


# Claims --------------------------------------------------------------------------------------------------------------


def requests(catch_up: BlockSync, start: float, seconds: float) -> list[bytes]:
    asked, now = [], start
    while True:
        deadline = catch_up.deadline(now)
        assert deadline is not None
        now = max(now, deadline)
        if now > start + seconds:
            return asked
        asked.append(catch_up.next_request(now)[0])


def test_who_claims_an_absurd_height_is_asked_ever_more_rarely() -> None:
    catch_up = BlockSync()
    catch_up.record_claim(LIAR, ABSURD)
    assert len(requests(catch_up, 0.0, 100.0)) < 10
    assert len(requests(catch_up, 1_000.0, 1_000.0)) <= 1_000.0 / RETRY_SECONDS_MAX + 1


def test_progress_by_others_does_not_make_a_liar_worth_asking() -> None:
    catch_up, asked = BlockSync(), 0
    for height in range(1, 200):
        catch_up.record_own_height(height, float(height))
        catch_up.record_claim(LIAR, ABSURD)
        asked += len(requests(catch_up, float(height), 0.9))
    assert asked < 15


def test_who_delivers_is_asked_again_at_once_and_a_liar_does_not_slow_it_down() -> None:
    catch_up = BlockSync()
    catch_up.record_claim(LIAR, ABSURD)
    catch_up.record_claim(HONEST, 3_000)
    now, height = 0.0, 1
    while height < 3_000:
        catch_up.record_own_height(height, now)
        deadline = catch_up.deadline(now)
        assert deadline is not None
        now = max(now, deadline)
        if catch_up.next_request(now)[0] == HONEST:
            catch_up.reset_backoff(HONEST)
            height += DECISIONS_PER_REPLY_MAX
    assert now < 10.0


def test_who_votes_is_asked_before_any_number_of_strangers_that_claim_more() -> None:
    catch_up = BlockSync()
    for number in range(400):
        catch_up.record_claim(b"stranger %d" % number, ABSURD)
    catch_up.record_claim(HONEST, 3_000)
    assert catch_up.next_request(0.0, lambda peer: peer == HONEST)[0] == HONEST
    assert catch_up.next_request(0.1, lambda peer: peer == HONEST)[0] != HONEST  # it has had no time to answer


def test_a_decision_on_another_parent_is_not_ours_whoever_certified_it(bench: Bench) -> None:
    decide(bench, 1)
    block = bench.block(bench.leader())
    foreign = encode_block(dataclasses.replace(decode_block(block), parent=bytes(32)))
    turn = bench.give(others(bench)[0], Decision(foreign, bench.certificate(Commit, foreign, 0, others(bench))))
    assert not turn.decided_blocks and bench.replica.height == 2
    assert bench.give(others(bench)[0], Decision(block, bench.certificate(Commit, block, 0, others(bench)))).decided_blocks


def test_decisions_ahead_are_kept_of_voters_and_of_who_was_asked_and_nobody_replaces_them(bench: Bench) -> None:
    voter, asked, stranger = bench.signers[others(bench)[0]].public, bytes([1]) * 32, bytes([2]) * 32
    for peer in (asked, stranger):
        bench.step(ConnectedInput(peer))
    junk = Decision(b"", bench.certificate(Commit, bench.block(bench.leader()), 0, others(bench)))
    vote = codec.encode(Commit(bytes(32), 3, 0, bytes(32)))
    ahead = dataclasses.replace(junk, certificate=dataclasses.replace(junk.certificate, vote=vote))
    bench.give_from(asked, Status(40, 0))
    bench.step(TickInput(), wait=1.0)
    for sender, kept in ((stranger, None), (asked, b"of asked"), (voter, b"of asked")):
        bench.give_from(sender, dataclasses.replace(ahead, block=b"of asked" if sender == asked else b"of another"))
        assert [entry.block for _, entry in bench.replica._future._decisions.values()] == ([kept] if kept else [])
    bench.step(DisconnectedInput(asked))
    assert bench.replica._future == FutureHeightMessages()
    bench.give_from(voter, ahead)
    assert len(bench.replica._future._decisions) == 1


def test_a_voter_that_gives_one_decision_at_a_time_does_not_keep_the_others_from_being_asked() -> None:
    catch_up, asked = BlockSync(), set[bytes]()
    catch_up.record_claim(LIAR, 3_000)
    catch_up.record_claim(HONEST, 3_000)
    for now in range(4):
        peer, _ = catch_up.next_request(float(now), lambda peer: peer == LIAR)
        catch_up.reset_backoff(peer)
        asked.add(peer)
    assert asked == {LIAR, HONEST}


def test_a_decision_that_was_needed_makes_its_sender_worth_asking_again(bench: Bench) -> None:
    peer = bench.signers[others(bench)[0]].public
    bench.give(others(bench)[0], Status(40, 0))
    bench.step(TickInput(), wait=1.0)
    assert bench.replica._catch_up._claims[peer].not_before > bench.now
    block = bench.block(bench.leader())
    bench.give(others(bench)[0], Decision(block, bench.certificate(Commit, block, 0, others(bench))))
    assert bench.replica._catch_up._claims[peer].not_before <= bench.now


# Books ---------------------------------------------------------------------------------------------------------------


def test_statements_of_views_long_left_behind_are_forgotten(bench: Bench) -> None:
    for view in range(0, 600, VIEWS_AHEAD_MAX):
        bench.give(others(bench)[0], ViewEnded(bench.timeout_certificate(view, others(bench))))
        for voter in others(bench):
            for nearby in range(view, view + VIEWS_AHEAD_MAX):
                bench.give(voter, bench.timed_out(voter, nearby))
    book = bench.replica._book
    assert book is not None
    assert max(map(len, book._statements.values())) <= 2 * (2 * VIEWS_AHEAD_MAX + 1)
    assert len(book._tallies) <= 2 * (2 * VIEWS_AHEAD_MAX + 1)


def test_timeouts_of_views_far_ahead_leave_one_number_a_voter(bench: Bench) -> None:
    book, voter = bench.replica._book, others(bench)[0]
    assert book is not None
    for view in range(VIEWS_AHEAD_MAX + 1, 2 * VIEWS_AHEAD_MAX):
        bench.give(voter, bench.timed_out(voter, view))
    assert not book.statements_of(bench.signers[voter].public) and not book._tallies
    assert book._given_up == {bench.signers[voter].public: 2 * VIEWS_AHEAD_MAX - 1}


def test_two_decided_heights_are_remembered_without_what_voting_needs(bench: Bench) -> None:
    for item in range(1, 8):
        decide(bench, item)
    assert sorted(bench.replica._closed) == [6, 7]
    assert all(not book.proposals and not book._tallies for book in bench.replica._closed.values())


def test_a_closed_book_takes_no_statements_of_views_far_from_its_decision(bench: Bench) -> None:
    block, voter = decide(bench, 1), others(bench)[0]
    for view in range(200):
        bench.give(voter, bench.prepare(voter, block, view))
    assert len(bench.replica._closed[1]._statements[bench.signers[voter].public]) <= VIEWS_AHEAD_MAX + 2
    assert not bench.replica._closed[1]._tallies


def test_proposals_for_later_heights_have_a_bound_together() -> None:
    bench, future = follower(), FutureHeightMessages()
    large = dataclasses.replace(bench.propose(bench.block(bench.leader())), compact_body=bytes(4 << 20))
    for peer in range(100):
        future.add_message(bytes([peer]) * 32, 2, large)
    assert len(future._proposals) == 7, "each is counted with what stands around its body"


def test_peers_that_come_and_go_leave_nothing_behind(bench: Bench) -> None:
    for stranger in range(200):
        bench.step(ConnectedInput(bytes([stranger]) * 32))
        bench.give_from(bytes([stranger]) * 32, Status(ABSURD, 0))
        bench.step(DisconnectedInput(bytes([stranger]) * 32))
    replica = bench.replica
    assert not replica._lost and not replica._links and not replica._catch_up._claims and not replica._answers._left


# Late evidence and old keys ------------------------------------------------------------------------------------------


def evidence_at(bench: Bench, voter: int, height: int, turn: StepEffects) -> bool:
    return [item.signer for item in turn.evidence] == [bench.signers[voter].public]


def test_a_second_statement_for_one_of_the_last_two_decided_heights_is_evidence(bench: Bench) -> None:
    voter = others(bench)[0]
    blocks = [decide(bench, item) for item in (1, 2, 3)]
    for block, known in zip(blocks, (False, True, True), strict=True):
        height = decode_block(block).height
        second = bench.sign(voter, Commit(bench.voters.hash, height, 0, bytes(32)))
        turn = bench.give(voter, dataclasses.replace(bench.commit(voter, block), vote=second))
        assert evidence_at(bench, voter, height, turn) == known, "the first one came in the certificate"
    assert not bench.faults


def test_a_certificate_that_contradicts_a_vote_is_evidence_against_its_voter(bench: Bench) -> None:
    liar = others(bench)[0]
    one, two = bench.block(bench.leader()), bench.block(bench.leader(), b"\x91\x02")
    bench.give(liar, bench.prepare(liar, one))
    turn = bench.give(others(bench)[1], Prepared(bench.certificate(Prepare, two, 0, others(bench))))
    assert evidence_at(bench, liar, 1, turn)


def test_a_late_commit_shows_in_the_next_block(bench: Bench) -> None:
    block = bench.block(bench.leader())
    bench.give(1, Decision(block, bench.certificate(Commit, block, 0, (0, 1, 2))))
    bench.apply(bench.turn.decided_blocks[0])
    bench.give(3, bench.commit(3, block))
    bench.give(3, bench.commit(3, block, view=1))
    certificate = decode_block(bench.block(bench.leader())).parent_certificate
    assert certificate is not None and bench.signers[3].public in certificate.signatures


def test_a_key_that_has_left_the_voters_signs_nothing_that_counts(bench: Bench) -> None:
    leaver = others(bench)[0]
    bench.counter.candidates = tuple(signer.public for signer in bench.signers)
    change = Counter.CHANGE + leaver
    body = b"\x91\xce" + change.to_bytes(4, "big")
    for content in (body, b"\x91\x01"):
        block = bench.block(bench.leader(), content)
        certificate = bench.certificate(Commit, block, 0, others(bench))
        bench.apply(bench.give(others(bench)[1], Decision(block, certificate)).decided_blocks[0])
    block = bench.block(others(bench)[1], b"\x91\x03")
    bench.give(leaver, bench.prepare(leaver, block))
    assert bench.faults == ["foreign-voters"], "it signs as if nothing had changed"
    bench.voters = bench.counter.voters[1]
    assert bench.replica.height == 3 and len(bench.voters) == 3
    bench.give(leaver, bench.prepare(leaver, block))
    assert bench.faults == ["not-a-voter"]
    bench.give(leaver, RememberedStatements(3, ()))
    assert bench.signers[leaver].public not in bench.replica._check._claims


# Messages of hostile peers --------------------------------------------------------------------------------------------


JUNK = b"j" * (1 << 20)


def in_view_one(n: int = 4) -> Bench:
    bench = follower(n=n, views=(0, 1, 3))
    for voter in others(bench):
        bench.give(voter, bench.timed_out(voter))
    assert bench.replica.view == 1
    return bench


def test_a_certificate_of_a_later_view_in_the_same_turn_does_not_spoil_the_end_of_a_view_that_is_sent() -> None:
    bench = in_view_one(6)
    asker, *signers = others(bench)
    certificate = bench.certificate(Prepare, bench.block(bench.leader(3)), 3, tuple(signers))
    for message in (Prepared(certificate), Status(1, 0)):
        bench.replica.handle_input(MessageInput(bench.signers[asker].public, message), bench.now)
    turn = bench.replica.finish_step(bench.now)
    for send in turn.sends:  # a peer that receives a wrong one drops the link
        if isinstance(send, SendMessage) and isinstance(send.message, ViewEnded):
            verify_timeout_certificate(send.message.certificate, 1, 0, bench.voters, CHAIN_ID, FastVerifier())


def test_a_voter_that_keeps_saying_that_it_lags_is_not_told_everything_each_time() -> None:
    bench = in_view_one()
    told = 0
    for _ in range(4 * int(RESPONSE_BURST_MAX)):
        bench.give(others(bench)[0], Status(1, 0))
        told += bool(bench.turn.sends)
    assert 0 < told <= RESPONSE_BURST_MAX


def test_timeouts_as_large_as_a_message_are_refused_before_they_are_kept_for_a_later_height() -> None:
    bench = follower(views=(0, 1, 3))
    voter, height = others(bench)[0], bench.replica.height + 1
    first = bench.sign(voter, Timeout(bench.voters.hash, height, 0, NO_VIEW, None))
    certificate = TimeoutCertificate((first, *(Signed(JUNK, signer.public, bytes(64)) for signer in bench.signers)), None)
    proposed = bench.propose(bench.block(bench.leader()))
    propose = bench.sign(voter, Propose(bench.voters.hash, height, 1, bytes(32)))
    for message in (ViewEnded(certificate), dataclasses.replace(proposed, propose=propose, justification=certificate)):
        bench.give(voter, message)
        assert bench.faults == ["oversized"]
    assert bench.replica._future == FutureHeightMessages()


def test_the_leaders_own_short_form_replaces_one_that_somebody_else_gave_for_it() -> None:
    bench = follower(ShortBench)
    liar = short_others(bench)[0]
    block = bench.block(bench.leader(), BODY)
    right = bench.short(block)
    bench.give(liar, dataclasses.replace(right, compact_body=b"s" * 32))  # a digest that nobody knows
    bench.learn()
    assert not bench.sent_votes(Prepare)
    bench.give(bench.leader(), right)
    assert bench.sent_votes(Prepare) and not bench.faults
