"""The vote of one simulated round: honest voters follow `rounds.round_state` and `rounds.vouch_set`, and liars their attack.

All messages arrive at once. Signatures, records of re-executors, and leaders that omit messages are not simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import product
from typing import Final

from benchmarks.attack_suite import Votes
from protocol.codec import encode
from protocol.identity import Signed
from protocol.messages import Ballot, Judgement, Proposal, Vouch
from protocol.verdicts import Verdict
from rounds.round_state import VOUCH_FACTOR, OpenRoundState, RoundResult, RoundTimeouts, compute_round_result
from rounds.round_terms import RoundTerms, signed_body_digest

TIMERS: Final = RoundTimeouts(proposals_max_seconds=60.0, replay_seconds=30.0)
UNSIGNED: Final = bytes(64)


def decided(
    terms: RoundTerms,
    lying: Mapping[bytes, Votes],
    proposals: Mapping[bytes, tuple[Proposal, Verdict]],
    replayed: Callable[[bytes], Verdict],
) -> RoundResult:
    """Return the result of a round.

    `proposals` has the verdicts of the cheap checks by trainer, and `replayed` returns that of an honest re-execution.
    """
    books = {voter: OpenRoundState(terms, voter, 0.0, TIMERS) for voter in sorted(terms.voters - lying.keys())}
    signed = {trainer: _signed(trainer, proposal) for trainer, (proposal, _) in proposals.items()}
    for book in books.values():
        for trainer, (proposal, verdict) in proposals.items():
            book.add_proposal(signed[trainer], proposal)
            book.record_verdict(trainer, verdict, 0.0)

    def of_all(verdict: Verdict, trainers: Iterable[bytes]) -> tuple[Judgement, ...]:
        return tuple(Judgement(trainer, signed_body_digest(signed[trainer]), verdict) for trainer in sorted(trainers))

    def tell(vouches: Mapping[bytes, Vouch], now: float) -> None:
        for book, (voter, vouch) in product(books.values(), vouches.items()):
            book.add_vouch(_signed(voter, vouch), vouch, now)

    if terms.trainers_to_vouch_for:  # liars do not wait for a call
        vouching = {liar: votes.vouch for liar, votes in lying.items() if votes.vouch is not None}
        of_vouched = {liar: of_all(verdict, terms.trainers_to_vouch_for) for liar, verdict in vouching.items()}
        tell({liar: Vouch(terms.job, terms.round, judged) for liar, judged in of_vouched.items()}, 0.0)
    for now in (0.0, VOUCH_FACTOR * TIMERS.vouch_usual_seconds):  # the second calls are those for late vouches
        while vouches := {voter: vouch for voter, book in books.items() if (vouch := _vouch(book, replayed, now))}:
            tell(vouches, now)
    ballots = {voter: ballot for voter, book in books.items() if (ballot := book.make_ballot_if_due(book.cut_off_due_at))}
    voting = {liar: votes.ballot for liar, votes in lying.items() if votes.ballot is not None}
    ballots |= {liar: Ballot(*terms.signed_fields, of_all(verdict, signed)) for liar, verdict in voting.items()}
    return compute_round_result(terms, ballots, next(iter(books.values())).vouching.vouches)


def _vouch(book: OpenRoundState, replayed: Callable[[bytes], Verdict], now: float) -> Vouch | None:
    """Return the next vouch of an honest voter. It re-executes a proposal when it is called."""
    book.assign_reexecutions(now)
    for trainer in book.vouching.assigned_at.keys() - book.vouching.own_judgements.keys():
        book.record_replay_verdict(trainer, replayed(trainer), now)
    return book.vouching.make_vouch_if_due()


def _signed(signer: bytes, message: Proposal | Vouch) -> Signed:
    return Signed(encode(message), signer, UNSIGNED)
