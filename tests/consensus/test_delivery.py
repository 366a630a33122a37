"""Time and contents of a ballot while some proposed payloads do not arrive."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from protocol.identity import Identity, Signed, sign_message
from protocol.messages import Ballot, Judgement, Proposal, Vouch
from protocol.verdicts import Verdict
from rounds.round_state import PROPOSALS_SECONDS_MIN, OpenRoundState, RoundTimeouts, compute_round_result
from rounds.round_terms import RoundTerms

CHAIN, JOB, ROOT = bytes(32), bytes([1]) * 32, bytes([2]) * 32
PEERS = [Identity(bytes([n + 1]) * 32) for n in range(4)]
KEYS = [peer.public for peer in PEERS]
TRAINERS = frozenset(KEYS[:3])
TERMS = RoundTerms(JOB, 0, ROOT, frozenset(KEYS), TRAINERS, TRAINERS, TRAINERS, TRAINERS)
SOON = 0.1  # seconds from the opening until the last arrival


def book_of(me: int, terms: RoundTerms = TERMS) -> OpenRoundState:
    return OpenRoundState(terms, KEYS[me], 0.0, RoundTimeouts(60.0, 90.0))


def propose(book: OpenRoundState, trainer: int) -> Proposal:
    digest = hashlib.sha256(KEYS[trainer]).digest()
    proposal = Proposal(JOB, 0, ROOT, digest, 100, digest, None)
    book.add_proposal(sign_message(PEERS[trainer], CHAIN, proposal), proposal)
    return proposal


def vouch(book: OpenRoundState, voter: int, verdicts: dict[int, Verdict], now: float = SOON) -> None:
    digests = {trainer: hashlib.sha256(book.proposals[KEYS[trainer]].body).digest() for trainer in verdicts}
    judged = (Judgement(KEYS[trainer], digests[trainer], verdict) for trainer, verdict in verdicts.items())
    message = Vouch(JOB, 0, tuple(sorted(judged, key=lambda judgement: judgement.trainer)))
    book.add_vouch(sign_message(PEERS[voter], CHAIN, message), message, now)


def judge_two(book: OpenRoundState) -> None:
    """Judge two proposals: they pass our cheap checks, and their trainers vouch for each other."""
    for trainer in range(2):
        book.record_verdict(KEYS[trainer], Verdict.ACCEPT, SOON)
        vouch(book, trainer, {1 - trainer: Verdict.ACCEPT})


def named(ballot: Ballot | None) -> dict[bytes, Verdict]:
    assert ballot is not None
    return {judgement.trainer: judgement.verdict for judgement in ballot.judgements}


def test_a_proposal_whose_payload_never_comes_costs_the_first_timer_only() -> None:
    book = book_of(0)
    for trainer in range(3):
        propose(book, trainer)
    judge_two(book)
    assert book.make_ballot_if_due(PROPOSALS_SECONDS_MIN - 0.01) is None
    assert named(book.make_ballot_if_due(PROPOSALS_SECONDS_MIN)) == {KEYS[0]: Verdict.ACCEPT, KEYS[1]: Verdict.ACCEPT}


def test_a_proposal_that_nobody_awaits_and_whose_payload_never_comes_costs_nothing() -> None:
    book = book_of(0, replace(TERMS, awaited=frozenset(KEYS[:2])))
    for trainer in range(3):
        propose(book, trainer)
    judge_two(book)
    assert set(named(book.make_ballot_if_due(SOON))) == set(KEYS[:2])


def test_a_delivered_proposal_is_waited_for_until_it_is_judged_or_the_second_timer_runs_out() -> None:
    book = book_of(0)
    for trainer in range(3):
        propose(book, trainer)
        book.record_payload(KEYS[trainer], SOON)
    judge_two(book)
    assert book.make_ballot_if_due(PROPOSALS_SECONDS_MIN + 1) is None
    assert named(book.make_ballot_if_due(PROPOSALS_SECONDS_MIN + 90)) == {
        KEYS[0]: Verdict.ACCEPT,
        KEYS[1]: Verdict.ACCEPT,
        KEYS[2]: Verdict.UNJUDGED,
    }
    book.record_verdict(KEYS[2], Verdict.ACCEPT, SOON)
    assert book.make_ballot_if_due(PROPOSALS_SECONDS_MIN + 1) is None, "it needs a vouch, too"
    vouch(book, 1, {2: Verdict.ACCEPT})
    assert set(named(book.make_ballot_if_due(SOON)).values()) == {Verdict.ACCEPT}


def test_nothing_that_can_be_judged_means_no_ballot() -> None:
    book = book_of(0)
    propose(book, 2)
    assert book.make_ballot_if_due(1_000.0) is None


def test_a_light_voter_speaks_as_soon_as_the_re_executors_have_vouched_when_a_payload_is_missing() -> None:
    """A trainer is killed while it serves its payload. The round costs T1, not the longer timer of the light voter."""
    book = book_of(3)
    for trainer in range(3):
        propose(book, trainer)
    for voter in range(2):
        book.record_verdict(KEYS[voter], Verdict.ACCEPT, SOON)
        book.add_ballot(*_ballot_of(voter, book), PROPOSALS_SECONDS_MIN)
    assert book.make_ballot_if_due(PROPOSALS_SECONDS_MIN) is None, "ballots are no vouches"
    judge_two(book)
    cast = book.make_ballot_if_due(PROPOSALS_SECONDS_MIN)
    assert named(cast) == {KEYS[0]: Verdict.ACCEPT, KEYS[1]: Verdict.ACCEPT}
    assert cast is not None
    decided = compute_round_result(TERMS, {**book.ballots, KEYS[3]: cast}, book.vouching.vouches)
    assert set(decided.accepted) == set(KEYS[:2])
    assert decided.absent == {KEYS[2]}
    assert decided.unjudged == frozenset()  # no voter's timer grows for it


def called_first(book: OpenRoundState, trainer: int) -> int:
    return KEYS.index(book.vouching.vouches.reexecutors(KEYS[trainer])[0])


def test_vouches_of_those_that_are_unsure_do_not_tell_how_long_re_execution_takes() -> None:
    """They may have waited in vain. Otherwise the timer of one round would set those of the next ones."""
    book = book_of(3)
    for trainer in range(3):
        propose(book, trainer)
        book.record_verdict(KEYS[trainer], Verdict.ACCEPT, 1.0)
    vouch(book, called_first(book, 0), {0: Verdict.UNJUDGED}, 3.0)
    assert book.vouching.vouch_seconds == []
    vouch(book, called_first(book, 1), {1: Verdict.ACCEPT}, 5.0)
    vouch(book, called_first(book, 2), {2: Verdict.REPLAY}, 6.0)
    assert book.vouching.vouch_seconds == [4.0, 5.0]


def test_a_verdict_that_is_said_again_in_other_vouches_is_measured_once() -> None:
    """Otherwise a liar would contribute most of the times, and set their median."""
    book = book_of(3)
    for trainer in range(3):
        propose(book, trainer)
        book.record_verdict(KEYS[trainer], Verdict.ACCEPT, 0.0)
    liar = called_first(book, 0)
    others = [trainer for trainer in range(3) if trainer != 0]
    for number in range(3):
        vouch(book, liar, dict.fromkeys([0, *others[:number]], Verdict.ACCEPT), 30.0)
    measured = [trainer for trainer in range(3) if called_first(book, trainer) == liar]
    assert book.vouching.vouch_seconds == [30.0] * len(measured)


def _ballot_of(voter: int, book: OpenRoundState, verdict: Verdict = Verdict.ACCEPT) -> tuple[Signed, Ballot]:
    digests = {key: hashlib.sha256(signed.body).digest() for key, signed in book.proposals.items()}
    ballot = Ballot(JOB, 0, ROOT, tuple(Judgement(key, digests[key], verdict) for key in sorted(KEYS[:2])))
    return sign_message(PEERS[voter], CHAIN, ballot), ballot
