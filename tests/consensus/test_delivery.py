"""When a ballot is cast and what it names, while some of what was proposed does not come."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from protocol.identity import Identity, Signed, sign
from protocol.messages import Ballot, Judgement, Proposal
from protocol.reasons import Verdict
from rounds.ballots import PROPOSALS_SECONDS_MIN, RoundBook, RoundTerms, RoundTimers, outcome

CHAIN, JOB, ROOT = bytes(32), bytes([1]) * 32, bytes([2]) * 32
PEERS = [Identity(bytes([n + 1]) * 32) for n in range(4)]
KEYS = [peer.public for peer in PEERS]
TRAINERS = frozenset(KEYS[:3])
TERMS = RoundTerms(JOB, 0, ROOT, frozenset(KEYS), TRAINERS, TRAINERS, TRAINERS, True)
SOON = 0.1  # seconds after the opening, when everything comes that comes at all


def book_of(me: int, terms: RoundTerms = TERMS) -> RoundBook:
    return RoundBook(terms, KEYS[me], 0.0, RoundTimers(60.0, 90.0))


def propose(book: RoundBook, trainer: int) -> Proposal:
    digest = hashlib.sha256(KEYS[trainer]).digest()
    proposal = Proposal(JOB, 0, ROOT, digest, 100, digest, None)
    book.add_proposal(sign(PEERS[trainer], CHAIN, proposal), proposal)
    return proposal


def named(ballot: Ballot | None) -> dict[bytes, Verdict]:
    assert ballot is not None
    return {judgement.trainer: judgement.verdict for judgement in ballot.judgements}


def test_a_proposal_whose_payload_never_comes_costs_the_first_timer_only() -> None:
    book = book_of(0)
    for trainer in range(3):
        propose(book, trainer)
    for trainer in range(2):
        book.judge(KEYS[trainer], Verdict.ACCEPT, SOON)
    assert book.ballot_due(PROPOSALS_SECONDS_MIN - 0.01) is None
    assert named(book.ballot_due(PROPOSALS_SECONDS_MIN)) == {KEYS[0]: Verdict.ACCEPT, KEYS[1]: Verdict.ACCEPT}


def test_a_proposal_that_nobody_awaits_and_whose_payload_never_comes_costs_nothing() -> None:
    book = book_of(0, replace(TERMS, awaited=frozenset(KEYS[:2])))
    for trainer in range(3):
        propose(book, trainer)
    for trainer in range(2):
        book.judge(KEYS[trainer], Verdict.ACCEPT, SOON)
    assert set(named(book.ballot_due(SOON))) == set(KEYS[:2])


def test_a_delivered_proposal_is_waited_for_until_it_is_judged_or_the_second_timer_runs_out() -> None:
    book = book_of(0)
    for trainer in range(3):
        propose(book, trainer)
        book.deliver(KEYS[trainer], SOON)
    for trainer in range(2):
        book.judge(KEYS[trainer], Verdict.ACCEPT, SOON)
    assert book.ballot_due(PROPOSALS_SECONDS_MIN + 1) is None
    assert named(book.ballot_due(PROPOSALS_SECONDS_MIN + 90))[KEYS[2]] is Verdict.UNJUDGED


def test_nothing_that_can_be_judged_means_no_ballot() -> None:
    book = book_of(0)
    propose(book, 2)
    assert book.ballot_due(1_000.0) is None


def test_a_light_voter_speaks_as_soon_as_the_re_executors_have_when_a_payload_is_missing() -> None:
    """A trainer is killed in the middle of serving its payload: the round costs T1, not the light voter's own long timer."""
    book = book_of(3)
    for trainer in range(3):
        propose(book, trainer)
    for trainer in range(2):
        book.judge(KEYS[trainer], Verdict.ACCEPT, SOON)
    for voter in range(2):
        book.add_ballot(*_ballot_of(voter, book), PROPOSALS_SECONDS_MIN)
    assert book.audited == PROPOSALS_SECONDS_MIN
    cast = book.ballot_due(PROPOSALS_SECONDS_MIN)
    assert named(cast) == {KEYS[0]: Verdict.ACCEPT, KEYS[1]: Verdict.ACCEPT}
    assert cast is not None
    decided = outcome(TERMS, {**book.ballots, KEYS[3]: cast})
    assert set(decided.accepted) == set(KEYS[:2])
    assert decided.absent == {KEYS[2]}
    assert decided.unjudged == frozenset()  # nobody's timer grows for it


def test_ballots_of_those_whose_time_ran_out_do_not_tell_how_long_re_execution_takes() -> None:
    """Else the timer of one round, cast in vain, would be the measure of the next ones."""
    book = book_of(3)
    for trainer in range(3):
        propose(book, trainer)
    book.add_ballot(*_ballot_of(0, book), SOON)
    book.add_ballot(*_ballot_of(1, book, Verdict.UNJUDGED), 3.0)
    assert book.audited is None
    book.add_ballot(*_ballot_of(2, book), 4.0)
    assert book.audited == 4.0


def _ballot_of(voter: int, book: RoundBook, verdict: Verdict = Verdict.ACCEPT) -> tuple[Signed, Ballot]:
    digests = {key: hashlib.sha256(signed.body).digest() for key, signed in book.proposals.items()}
    ballot = Ballot(JOB, 0, ROOT, tuple(Judgement(key, digests[key], verdict) for key in sorted(KEYS[:2])))
    return sign(PEERS[voter], CHAIN, ballot), ballot
