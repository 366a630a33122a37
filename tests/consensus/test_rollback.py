"""A voter with a disk that may have been rolled back: its questions, its silence, and the memory of the others."""

from __future__ import annotations

import copy
import dataclasses

import pytest

from consensus.block import decode_block
from consensus.effects import DecidedBlock, SendMessage, StepEffects
from consensus.inputs import ConnectedInput, DisconnectedInput, DuplicateIdentityInput, TickInput, WorkChangedInput
from consensus.pbft.own_votes import ASK_SECONDS, SILENT_HEIGHTS, RollbackCheck
from consensus.voter_set import VoterSet
from protocol.identity import Signed
from protocol.limits import REMEMBERED_STATEMENTS_MAX
from protocol.messages import (
    Ballot,
    Commit,
    CutOff,
    Decision,
    GetRememberedStatements,
    Prepare,
    Prepared,
    ProposeEnvelope,
    RememberedStatements,
    TimeoutEnvelope,
    Vote,
)
from tests.consensus.bench import START, Bench, follower, others
from tests.consensus.counter import Counter
from tests.consensus.network import Network, Node

ONE, TWO = b"\x91\x01", b"\x91\x02"


class Untold(Bench):
    """A replica without an answer to its first question."""

    def tell_that_nothing_was_heard(self) -> None:
        pass


def tell(bench: Bench, other: int, height: int = 1, signed: tuple[Signed, ...] = ()) -> StepEffects:
    return bench.give(other, RememberedStatements(height, signed))


def tell_all(bench: Bench, height: int | None = None, signed: tuple[Signed, ...] = ()) -> None:
    for other in others(bench):
        tell(bench, other, bench.replica.height if height is None else height, signed)


def is_silent(bench: Bench) -> bool:
    """Return whether the replica signs nothing for a valid proposal."""
    bench.give(bench.leader(), bench.propose(bench.block(bench.leader(), bytes([0x91, 100 + bench.replica.height]))))
    return not bench.sent_votes(Prepare)


def decide(bench: Bench, body: bytes) -> DecidedBlock:
    block = bench.block(bench.leader(), body)
    turn = bench.give(others(bench)[0], Decision(block, bench.certificate(Commit, block, 0, others(bench))))
    bench.apply(turn.decided_blocks[0])
    return turn.decided_blocks[0]


# Asking --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def bench() -> Untold:
    return follower(Untold)


def test_a_voter_signs_nothing_before_a_quorum_itself_counted_has_answered(bench: Untold) -> None:
    first, second, _ = others(bench)
    assert is_silent(bench) and not bench.replica.may_sign_round_messages
    tell(bench, first)
    assert not bench.sent_votes(Prepare) and not bench.replica.may_sign_round_messages
    tell(bench, second)
    assert len(bench.sent_votes(Prepare)) == 1 and bench.replica.may_sign_round_messages


def test_nothing_is_timed_out_nor_joined_before_it_has_answers(bench: Untold) -> None:
    bench.add_work(1)
    bench.step(TickInput(), wait=100.0)
    for voter in others(bench):
        bench.give(voter, bench.timed_out(voter))
    assert not bench.journal.read_restart_state().votes


def test_one_voter_twice_or_a_stranger_is_no_second_answer(bench: Untold) -> None:
    tell(bench, others(bench)[0])
    tell(bench, others(bench)[0])
    stranger = Untold(7)
    bench.signers.append(next(signer for signer in stranger.signers if signer not in bench.signers))
    tell(bench, 4)
    assert is_silent(bench)


def test_every_voter_with_a_link_is_asked_and_asked_again_until_it_answers_and_no_longer(bench: Untold) -> None:
    bench.connect(*others(bench)[:2])
    assert bench.sent(GetRememberedStatements)
    tell(bench, others(bench)[0])
    turn = bench.step(TickInput(), wait=ASK_SECONDS)
    [asked] = [send for send in turn.sends if isinstance(send, SendMessage) and isinstance(send.message, GetRememberedStatements)]
    assert asked.to == (bench.signers[others(bench)[1]].public,)
    bench.step(TickInput(), wait=ASK_SECONDS / 2)
    assert not bench.sent(GetRememberedStatements), "nobody is asked at every turn"
    tell(bench, others(bench)[1])
    bench.step(TickInput(), wait=10 * ASK_SECONDS)
    bench.connect(others(bench)[2])
    assert not bench.sent(GetRememberedStatements)


def test_a_voter_alone_needs_nobody() -> None:
    bench = Untold(n=1)
    bench.counter.add(1)
    assert len(bench.step(WorkChangedInput()).decided_blocks) == 1


def test_an_observer_asks_nothing_and_may_speak_in_rounds() -> None:
    network = Network(observers=1)
    observer = network.all[-1]
    network.run_until(START + 1, lambda: False)
    assert observer.replica is not None and observer.replica.may_sign_round_messages and not observer.replica.is_voter


# Heights -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("claims", "silent"), [((2**53 - 1, 1, 1), False), ((3, 3, 1), True), ((3, 1, 1, 1, 1), False), ((3, 3, 1, 1, 1), True)]
)
def test_f_liars_cannot_silence_by_their_height_and_more_claims_than_that_hold_until_it_is_reached(
    claims: tuple[int, ...], silent: bool
) -> None:
    """Six voters tolerate one liar, and four are a quorum. Two voters that are ahead do not stop the answers of the others."""
    bench = follower(Untold, n=len(claims) + 1)
    for other, claim in zip(others(bench), claims, strict=True):
        tell(bench, other, claim)
    assert is_silent(bench) == silent
    if silent:
        decide(bench, ONE)
        decide(bench, TWO)
        assert not is_silent(bench)


def test_an_answer_from_further_above_than_its_certificate_is_kept_is_asked_for_again(bench: Untold) -> None:
    bench.connect(*others(bench))
    for other in others(bench):
        tell(bench, other, 9)
    turn = bench.step(TickInput(), wait=ASK_SECONDS)
    [asked] = [send for send in turn.sends if isinstance(send, SendMessage) and isinstance(send.message, GetRememberedStatements)]
    assert asked.to is not None and len(asked.to) == 3


def test_an_answer_from_just_above_counts_when_its_height_is_reached(bench: Untold) -> None:
    first, second, _ = others(bench)
    tell(bench, first, 2)
    tell(bench, second, 1)
    assert is_silent(bench)
    decide(bench, ONE)
    assert not is_silent(bench)


def test_a_voter_that_left_and_came_back_is_asked_again() -> None:
    both, one = VoterSet.from_keys((bytes(32), bytes([1]) * 32)), VoterSet.from_keys((bytes(32),))
    check = RollbackCheck()
    check.record_answer(both.keys[1], 1, 1)
    assert check.voters_without_answer(bytes(32), both) == ()
    check.enter_height(one, 2)
    check.enter_height(both, 3)
    assert check.voters_without_answer(bytes(32), both) == both.keys[1:]


def test_the_voters_of_the_height_to_be_signed_must_answer_not_those_of_an_old_set() -> None:
    old, new = VoterSet.from_keys(bytes([i]) * 32 for i in range(4)), VoterSet.from_keys(bytes([i]) * 32 for i in (0, 7, 8, 9))
    check = RollbackCheck()
    for voter in old.keys[1:]:
        check.record_answer(voter, 1, 1)
    check.enter_height(new, 3)
    assert not check.may_sign(bytes(32), 3, new)
    assert check.voters_without_answer(bytes(32), new) == new.keys[1:]


# Forgotten statements -------------------------------------------------------------------------------------------------


def test_a_statement_that_is_not_in_the_log_silences_until_the_height_after_it_is_decided(bench: Untold) -> None:
    forgotten = bench.prepare(bench.place, bench.block(bench.leader(), TWO)).vote
    for other in others(bench):
        tell(bench, other, 1, (forgotten,))
    assert is_silent(bench) and not bench.replica.may_sign_round_messages
    decide(bench, ONE)
    tell_all(bench)
    assert is_silent(bench)
    decide(bench, TWO)
    assert is_silent(bench), "nobody has said yet that nothing more was heard"
    tell_all(bench)
    assert bench.journal.read_restart_state().votes and bench.replica.may_sign_round_messages


def test_a_lower_statement_that_turns_up_later_does_not_shorten_the_silence() -> None:
    check = RollbackCheck()
    assert check.record_forgotten_statement(9) and check.no_votes_below == 9 + SILENT_HEIGHTS
    assert not check.record_forgotten_statement(8) and check.no_votes_below == 9 + SILENT_HEIGHTS


def test_who_is_silent_stays_so_over_another_restart(bench: Untold) -> None:
    """It may be above the forgotten statement then, and nobody reports this statement again."""
    forgotten = bench.prepare(bench.place, bench.block(bench.leader(), TWO)).vote
    for other in others(bench):
        tell(bench, other, 1, (forgotten,))
    decide(bench, ONE)
    bench.replica = bench._replica(bench.journal.read_restart_state())
    for other in others(bench):
        tell(bench, other, 2)
    assert is_silent(bench) and not bench.replica.may_sign_round_messages
    decide(bench, TWO)
    tell_all(bench)
    assert not is_silent(bench) and bench.replica.may_sign_round_messages


def test_one_honest_answer_is_enough_also_when_it_comes_after_the_others(bench: Untold) -> None:
    for other in others(bench)[:2]:
        tell(bench, other)
    tell(bench, others(bench)[2], 1, (bench.prepare(bench.place, bench.block(bench.leader(), TWO)).vote,))
    assert is_silent(bench)


def test_a_statement_of_the_log_and_one_of_a_height_left_behind_silence_nobody() -> None:
    bench = follower()
    bench.give(bench.leader(), bench.propose(bench.block(bench.leader())))
    known = bench.sent_votes(Prepare)[0]
    late = Untold(place=bench.place, journal=bench.journal)
    late.replica = late._replica(bench.journal.read_restart_state())
    for other in others(late):
        tell(late, other, 1, (known,))
    assert late.replica.may_sign_round_messages
    later = Untold(place=bench.place)
    decide(later, ONE)
    later.replica = later._replica(later.journal.read_restart_state())
    tell_all(later, 2)
    tell(later, others(later)[0], 2, (later.sign(later.place, Prepare(later.voters.hash, 1, 5, bytes(32))),))
    assert later.replica.may_sign_round_messages, "height 1 was decided before its start"


def test_other_bytes_in_a_slot_of_the_log_are_forgotten_too() -> None:
    bench = follower()
    bench.give(bench.leader(), bench.propose(bench.block(bench.leader())))
    tell(bench, others(bench)[2], 1, (bench.prepare(bench.place, bench.block(bench.leader(), TWO)).vote,))
    assert not bench.replica.may_sign_round_messages


def test_nobody_is_silenced_by_what_it_has_not_signed(bench: Untold) -> None:
    other = others(bench)[0]
    foreign = bench.prepare(other, bench.block(bench.leader())).vote
    tell(bench, other, 1, (foreign,))
    assert bench.faults == ["foreign-statement"]
    tell(bench, other, 1, (dataclasses.replace(foreign, signer=bench.signers[bench.place].public),))
    assert bench.faults == ["bad-signature"]
    for honest in others(bench)[1:]:
        tell(bench, honest)
    assert not is_silent(bench)


def test_a_certificate_with_a_vote_of_ours_that_the_log_lacks_silences() -> None:
    bench = follower()
    block = bench.block(bench.leader(), TWO)
    bench.give(others(bench)[0], Prepared(bench.certificate(Prepare, block, 0, (bench.place, *others(bench)[:2]))))
    assert not bench.sent_votes(Commit) and not bench.replica.may_sign_round_messages


def test_what_we_forgot_is_no_evidence_that_we_write_against_ourselves() -> None:
    bench = follower()
    bench.give(bench.leader(), bench.propose(bench.block(bench.leader())))
    turn = bench.give(others(bench)[0], bench.prepare(bench.place, bench.block(bench.leader(), TWO)))
    assert not turn.evidence and not bench.replica.may_sign_round_messages


def test_what_we_signed_in_rounds_is_handed_on_and_silences_no_vote() -> None:
    bench = follower()
    cut_off = bench.sign(bench.place, CutOff(bytes(32), 3, ()))
    ballot = bench.sign(bench.place, Ballot(bytes(32), 3, bytes(32), ()))
    assert tell(bench, others(bench)[2], 1, (cut_off, ballot)).remembered_round_messages == (cut_off, ballot)
    assert bench.replica.may_sign_round_messages


# A second machine with our key -----------------------------------------------------------------------------------------


def of_a_copy(bench: Bench, height: int) -> Signed:
    """Return a statement that another machine signed with our key."""
    return bench.sign(bench.place, Prepare(bench.voters.hash, height, 5, bytes(32)))


def at_height(height: int) -> Bench:
    """Return a replica at this height that was allowed to sign at height 1."""
    bench = follower()
    tell_all(bench)
    assert bench.replica.may_sign_round_messages
    for number in range(height - 1):
        decide(bench, bytes([0x91, number + 1]))
    assert bench.replica.height == height
    return bench


def test_a_signature_of_ours_at_a_height_that_was_opened_after_our_start_stops_us_for_good() -> None:
    bench = at_height(3)
    bench.give(others(bench)[0], Vote(of_a_copy(bench, 3)))
    assert (
        bench.replica.duplicate_identity_reason == "signed a statement at height 3 that this peer did not sign"
        and not bench.replica.may_sign_round_messages
    )
    for height in range(3, 9):
        assert is_silent(bench)
        decide(bench, bytes([0x91, 50 + height]))
        tell_all(bench)
    assert is_silent(bench) and not bench.replica.may_sign_round_messages


def test_a_machine_that_has_proven_our_key_stops_us_for_good_before_and_after_the_first_signature() -> None:
    for bench in (follower(Untold), at_height(1), at_height(3)):
        bench.step(DuplicateIdentityInput("10.0.0.9:7700"))
        assert bench.replica.duplicate_identity_reason == "is at 10.0.0.9:7700" and not bench.replica.may_sign_round_messages
        for _ in range(4):
            tell_all(bench)
            assert is_silent(bench)
            decide(bench, bytes([0x91, 60 + bench.replica.height]))


def test_a_signature_that_an_earlier_life_may_have_made_stops_nobody_for_good() -> None:
    bench = at_height(2)
    bench.give(others(bench)[0], Vote(of_a_copy(bench, 2)))
    assert bench.replica.duplicate_identity_reason is None and not bench.replica.may_sign_round_messages


def test_what_we_signed_ourselves_stops_nobody_when_it_comes_back() -> None:
    bench = at_height(3)
    block = bench.block(others(bench)[0])
    bench.give(others(bench)[0], Prepared(bench.certificate(Prepare, block, 0, others(bench))))
    [mine] = bench.sent_votes(Commit)
    for _ in range(2):  # at its height, and when that is decided
        tell(bench, others(bench)[0], bench.replica.height, (mine,))
        assert bench.replica.duplicate_identity_reason is None and bench.replica.may_sign_round_messages
        decide(bench, TWO)


def test_a_copy_beside_its_original_hears_of_it_at_every_height_and_signs_nothing() -> None:
    """The original signs at each height. The copy learns of each signature only when the next height is open."""
    copy = follower(Untold)
    heights = 0
    while copy.replica.duplicate_identity_reason is None:
        heights += 1
        tell_all(copy, signed=(of_a_copy(copy, max(1, copy.replica.height - 1)),))
        assert is_silent(copy), f"it signed at height {copy.replica.height}"
        decide(copy, bytes([0x91, heights]))
        assert heights < 8
    assert not copy.journal.read_restart_state().votes


def test_a_lower_forgotten_height_does_not_shorten_the_silence() -> None:
    check = RollbackCheck()
    assert check.record_forgotten_statement(5) and not check.record_forgotten_statement(3)
    assert check.no_votes_below == 7


# Answering -----------------------------------------------------------------------------------------------------------


def heard(bench: Bench, asker: int) -> RememberedStatements:
    bench.give(asker, GetRememberedStatements())
    [answer] = bench.sent(RememberedStatements)
    assert isinstance(answer, RememberedStatements)
    return answer


def test_an_answer_names_what_was_signed_at_the_open_height_and_the_two_decided_before_and_nothing_older() -> None:
    bench, asker = follower(), 0
    bench = Bench(place=next(i for i in range(4) if i != asker))
    said: list[Signed] = []
    for height in range(1, 5):
        block = bench.block(bench.leader(), bytes([0x91, height]))
        for vote in (bench.prepare(asker, block), bench.commit(asker, block)):
            bench.give(asker, vote)
            said.append(vote.vote)
        if height < 4:
            turn = bench.give(asker, Decision(block, bench.certificate(Commit, block, 0, (0, 1, 2))))
            bench.apply(turn.decided_blocks[0])
    answer = heard(bench, asker)
    assert answer.height == 4 and set(answer.signed) == set(said[2:])


def test_an_answer_names_what_came_only_in_certificates_also_after_a_restart() -> None:
    bench = follower()
    asker = others(bench)[0]
    block = bench.block(bench.leader())
    prepares = bench.certificate(Prepare, block, 0, others(bench))
    bench.give(others(bench)[1], Prepared(prepares))
    signed = Signed(prepares.vote, bench.signers[asker].public, prepares.signatures[bench.signers[asker].public])
    assert heard(bench, asker).signed == (signed,)
    bench.restart()
    assert heard(bench, asker).signed == (signed,)
    commits = bench.certificate(Commit, block, 0, others(bench))
    bench.apply(bench.give(others(bench)[1], Decision(block, commits)).decided_blocks[0])
    bench.restart()
    assert [signed.body for signed in heard(bench, asker).signed] == [commits.vote]


def test_the_lock_is_sent_before_the_answer() -> None:
    bench = follower()
    bench.give(others(bench)[1], Prepared(bench.certificate(Prepare, bench.block(bench.leader()), 0, others(bench))))
    turn = bench.give(others(bench)[0], GetRememberedStatements())
    assert [type(send.message) for send in turn.sends if isinstance(send, SendMessage)] == [Prepared, RememberedStatements]


def test_the_lock_of_before_a_restart_is_sent_also_when_the_question_is_the_first_thing_heard(bench: Untold) -> None:
    lock = Prepared(bench.certificate(Prepare, bench.block(bench.leader()), 0, others(bench)))
    bench.give(others(bench)[1], lock)
    bench.restart()
    turn = bench.give(others(bench)[0], GetRememberedStatements())
    assert next(send.message for send in turn.sends if isinstance(send, SendMessage)) == lock


def test_an_answer_is_bounded_and_keeps_the_newest() -> None:
    bench = follower()
    asker = others(bench)[0]
    for view in range(64):
        bench.give(asker, bench.timed_out(asker, view))
        for kind in ("prepare", "commit"):
            bench.give(asker, getattr(bench, kind)(asker, bench.block(bench.leader()), view))
    many = tuple(bench.sign(asker, CutOff(bytes(32), number, ())) for number in range(REMEMBERED_STATEMENTS_MAX - 10))
    bench.counter.statements_signed_by = lambda peer: many  # type: ignore[method-assign]
    answer = heard(bench, asker)
    assert len(answer.signed) == REMEMBERED_STATEMENTS_MAX and answer.signed[: len(many)] == many
    newest = [signed for signed in answer.signed[len(many) :] if signed.body[1:].startswith(b"\xa7timeout")]
    assert bench.timed_out(asker, 63).timeout in newest and bench.timed_out(asker, 0).timeout not in newest


# Whole networks ------------------------------------------------------------------------------------------------------


def decided_by_all(network: Network, item: int) -> bool:
    network.inject(item)
    running = [node for node in network.all if node.replica is not None]
    return network.run_until(network.now + 60.0, lambda: all(item in node.counter.done for node in running))


def votes_of(network: Network, node: Node, height: int) -> bool:
    witness = next(other for other in network.all if other is not node)
    return node.key in decode_block(witness.journal.decided[height].block).parent_certificate.signatures  # type: ignore[union-attr]


def test_a_whole_network_that_starts_again_at_once_goes_on() -> None:
    network = Network()
    assert decided_by_all(network, 1)
    for node in network.all:
        network.crash(node)
    for node in network.all:
        network.restart(node)
    assert decided_by_all(network, 2)


@pytest.mark.parametrize("lost", [1, 2, 3, 10])
def test_a_rolled_back_voter_contradicts_nothing_that_it_said_and_votes_again(lost: int) -> None:
    """`Network` fails at the first evidence anywhere."""
    network = Network()
    node = network.all[1]
    backups = []
    for item in range(10):
        backups.append(copy.deepcopy(node.journal))
        assert decided_by_all(network, item)
    network.inject(100)
    network.run_until(network.now + 0.025, lambda: False)  # voting on the next height has begun
    network.crash(node)
    node.journal = backups[-lost]
    network.restart(node)
    for item in range(11, 20):
        assert decided_by_all(network, item)
    height = len(network.all[0].journal.decided)
    assert any(votes_of(network, node, at) for at in range(height - 3, height + 1))


def test_a_voter_with_a_lost_disk_and_its_old_key_votes_again() -> None:
    network = Network()
    node = network.all[2]
    for item in range(5):
        assert decided_by_all(network, item)
    network.crash(node)
    node.journal = type(node.journal)()
    network.restart(node)
    for item in range(6, 14):
        assert decided_by_all(network, item)
    assert votes_of(network, node, len(network.all[0].journal.decided))


def test_a_new_voter_asks_and_votes_from_its_first_height_on_or_the_next() -> None:
    network = Network(observers=1)
    joiner = network.all[-1]
    for item in (Counter.CHANGE + 4, 2, 3, 4):
        assert decided_by_all(network, item)
    assert votes_of(network, joiner, 4)


def test_while_it_is_silent_a_voter_neither_repeats_timeouts_nor_sets_view_timers(bench: Untold) -> None:
    bench.add_work(1)
    assert bench.turn.deadline is None
    bench.connect(*others(bench))
    assert bench.turn.deadline is not None and bench.turn.deadline <= START + ASK_SECONDS
    bench.step(DisconnectedInput(bench.signers[others(bench)[0]].public))
    bench.step(ConnectedInput(bench.signers[others(bench)[0]].public))
    assert not [kind for kind in (TimeoutEnvelope, Vote, ProposeEnvelope) if bench.sent(kind)]


@pytest.mark.parametrize(("n", "needed"), [(2, 1), (3, 2), (4, 3), (5, 3), (7, 5)])
def test_in_which_life_something_was_signed_is_known_when_enough_others_have_answered(n: int, needed: int) -> None:
    """A restored backup that asks a lagging voter must not take its own statements for those of another machine."""
    keys = tuple(bytes([number]) * 32 for number in range(1, n + 1))
    me, others, voters = keys[0], keys[1:], VoterSet(keys)

    def asked(answers: int, claim: int = 5) -> RollbackCheck:
        check = RollbackCheck()
        for voter in others[:answers]:
            check.record_answer(voter, claim, 5)
        assert check.may_sign(me, 5, voters) == (answers >= voters.quorum - 1)
        return check

    for answers in range(voters.quorum - 1, n):
        check = asked(answers)
        check.record_forgotten_statement(7)
        assert (check.duplicate_identity_reason is not None) == (answers >= needed), answers
        assert check.no_votes_below == 9
    if needed < voters.quorum:
        return  # the answers that open the check are enough
    late = asked(voters.quorum - 1)
    for voter in others:
        late.record_answer(voter, 8, 5)
    assert late.may_sign(me, 5, voters)
    late.record_forgotten_statement(7)
    assert late.duplicate_identity_reason is None, "who answered later was further on by then"
    late.may_sign(me, 8, voters)
    late.record_forgotten_statement(9)
    assert late.duplicate_identity_reason is None
    late.record_forgotten_statement(10)
    assert late.duplicate_identity_reason is not None


@pytest.mark.parametrize("claim", [6, 2**53 - 1])
def test_a_liar_that_claims_to_be_far_above_hides_no_copy_where_others_are_enough(claim: int) -> None:
    keys = tuple(bytes([number]) * 32 for number in range(1, 8))
    me, others, voters = keys[0], keys[1:], VoterSet(keys)
    check = RollbackCheck()
    for voter in others[:5]:
        check.record_answer(voter, 5, 5)
    check.record_answer(others[5], claim, 5)
    assert check.may_sign(me, 5, voters)
    check.record_forgotten_statement(7)
    assert check.duplicate_identity_reason is not None
