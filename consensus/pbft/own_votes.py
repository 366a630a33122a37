"""This voter's own signatures: one message per slot, ever. `RollbackCheck` finds out what a disk that was rolled back forgot.

Before its first signature, a voter asks the others what they have heard it sign. It speaks when q voters, itself counted, have
answered, and then only at heights above everything that it seems to have forgotten.

Why this is enough for a rolled-back disk that counts among the f faults. Agreement never depends on it: with f faults, any two
quorums still share an honest voter that forgot nothing. The question keeps the voter from doing harm, and from being expelled
for it, nearly as if it were no fault at all:

- *What was decided with my commit.* q voters committed and q answered: they share f+1, so besides me f. Those that are honest
  have decided that block, or hold a prepare certificate of it and send it before their answer: the forgotten lock is back. An
  answer from above counts when I reach its height; from so far above that I cannot keep its certificate, I ask again.
- *What I signed at an open height.* Links deliver in order or break, so honest answerers have what I sent them, and name it. A
  statement of mine that is not in my log proves that something was forgotten, but not how much: an answerer may be one height
  behind where I was. So I am silent in the height of that statement and in the next one.
- *Answerers that went on meanwhile* remember the statements of three heights: the open one and the last two decided. So they
  still name my statements when they have decided that height and the one after it. Older heights are decided and certified. I
  sign nothing below the (f+1)-th highest height claimed, which some honest voter has reached.

A copy of the disk that runs beside the original signs with the same key, so it looks like something forgotten, for ever. Three
things tell it apart:

- *A silent voter asks at each height.* While a voter is silent, the check begins anew whenever a height opens. So it hears what
  the other machine signed meanwhile before it signs anything itself.
- *A height opened after our own start.* Let H be the height at which this life first has answers from there or below of
  n − q + f + 1 others, or of all. An earlier life of this voter signed nothing above H + 1. For a signature at height x needs
  x − 1 decided, so at least q − 1 others committed x − 1 before they answered us. They share more than f voters with those that
  answered, so one of these is honest, answered after it committed x − 1, and x − 1 ≤ H. A signature of ours above H + 1 that is
  not in our log was made by another machine. We stop for good, since both would soon sign two things for one slot. Fewer answers
  prove nothing: then we are silent, as for anything forgotten.
- *A link with our own key.* We dial an address that is said to be of our key. If another process answers there and proves the
  key, it is another machine (`inputs.DuplicateIdentityInput`). That takes no signature of the log, so it may come before the
  first one.

A lying minority silences nobody: f liars do not reach the (f+1)-th highest claim, what I am said to have signed needs my
signature, and n − f ≥ q honest voters answer. The limit of all this: answerers that restarted since know only certificates and
what they themselves wrote down, so that votes of mine which entered no certificate are forgotten by all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from consensus.effects import OwnStatement, VoteSlot
from consensus.evidence import AGREEMENT_STATEMENT_TYPES, STATEMENT_TYPES, AgreementStatement
from consensus.pbft.block_sync import FUTURE_HEIGHTS_MAX
from consensus.voter_set import VoterSet
from protocol import codec
from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.identity import Signed, Signer, Verifier, open_signed, short_id, sign_message
from protocol.messages import Commit, Prepare, RememberedStatements, Timeout

ASK_SECONDS = 0.5  # then those whose answer is missing are asked again: they may have been far above my height
EARLIER_HEIGHTS = 1  # above the heights from which others answered: an earlier life may have been one height ahead of them
SILENT_HEIGHTS = 2  # from the height of a forgotten statement on: an answerer may be one height behind what was forgotten
VOTE_SETS_KEPT = 2  # decided heights whose statements are remembered for others


class OwnVotes:
    """Everything signed for the undecided height. A `OwnStatement` record goes out before the message does."""

    def __init__(self, signer: Signer, chain_id: bytes, votes: Iterable[OwnStatement]) -> None:
        self._signer = signer
        self._chain_id = chain_id
        self._signed: dict[VoteSlot, Signed] = {voted.slot: voted.signed for voted in votes}

    def get_vote(self, tag: str, height: int, view: int) -> Signed | None:
        return self._signed.get((tag, height, view))

    def has_signed(self, statement: AgreementStatement) -> bool:
        """Whether this very statement was signed here."""
        signed = self.get_vote(statement.TAG, statement.height, statement.view)
        return signed is not None and signed.body == codec.encode(statement)

    def statements_at(self, height: int) -> list[tuple[Signed, AgreementStatement]]:
        return [
            (signed, codec.decode_message(signed.body, AGREEMENT_STATEMENT_TYPES))  # type: ignore[misc]
            for (_, of_height, _), signed in self._signed.items()
            if of_height == height
        ]

    def sign_statement(self, message: AgreementStatement) -> OwnStatement:
        """Signs. `LocalProtocolError` if the slot is taken or a rule of the protocol forbids the message."""
        slot = (message.TAG, message.height, message.view)
        if slot in self._signed:
            raise LocalProtocolError(f"{slot} is signed already")
        if isinstance(message, (Prepare, Commit)) and self.highest_timed_out_view(message.height) >= message.view:
            raise LocalProtocolError(f"{message.TAG} in {message.height}.{message.view} after a timeout")
        signed = sign_message(self._signer, self._chain_id, message)
        self._signed[slot] = signed
        return OwnStatement(slot, signed)

    def has_voted(self, height: int) -> bool:
        return any(tag != Timeout.TAG and of_height == height for tag, of_height, _ in self._signed)

    def highest_timed_out_view(self, height: int) -> int:
        """The highest view of `height` that was given up; −1: none."""
        given_up = (view for tag, of_height, view in self._signed if tag == Timeout.TAG and of_height == height)
        return max(given_up, default=-1)

    def highest_signed_view(self, height: int) -> int:
        """The highest view of `height` that anything was signed in."""
        return max((view for _, of_height, view in self._signed if of_height == height), default=0)

    def prune_below_height(self, height: int) -> None:
        self._signed = {slot: signed for slot, signed in self._signed.items() if slot[1] >= height}


@dataclass(slots=True)
class RollbackCheck:
    """Whether a voter may sign. One per life of a replica; it starts closed and opens once. Holds what VOTERS_MAX voters said."""

    is_over: bool = False
    _claims: dict[bytes, int] = field(default_factory=dict)  # voter -> the height it said it works on
    _answered: set[bytes] = field(default_factory=set)  # voters whose answer counts once their height is reached
    no_votes_below: int = 0
    _reached: int | None = None  # no earlier life signed above the height after this one; None: too few have answered to tell
    duplicate_identity_reason: str | None = None  # what another machine with our key did in this life: nothing more is signed
    next_request_at: float = 0.0  # when voters without an answer are asked again

    def record_answer(self, voter: bytes, claim: int, height: int) -> None:
        """`claim`: the voter's height; `height`: mine."""
        self._claims[voter] = claim
        if claim <= height + FUTURE_HEIGHTS_MAX:
            self._answered.add(voter)

    def record_forgotten_statement(self, height: int) -> bool:
        """A statement of mine turned up that is not in my log: whether that makes me silent for longer.

        It counts after the check too, when an answer came too late.
        """
        # No earlier life of this voter can have signed anything so far above what it had reached.
        is_of_this_life = self._reached is not None and height > self._reached + EARLIER_HEIGHTS
        if is_of_this_life and self.duplicate_identity_reason is None:
            self.duplicate_identity_reason = f"signed at height {height} what was not signed here"
        before, self.no_votes_below = self.no_votes_below, max(self.no_votes_below, height + SILENT_HEIGHTS)
        return self.no_votes_below > before

    def may_sign(self, me: bytes, height: int, voters: VoterSet) -> bool:
        if not self.is_over:
            self.is_over = self._is_answered(me, height, voters)
        if self._reached is None:
            answers = sum(voter in voters and voter != me and claim <= height for voter, claim in self._claims.items())
            if answers >= min(len(voters) - 1, len(voters) - voters.quorum + voters.faults_tolerated + 1):
                self._reached = height
        return self.is_over and height >= self.no_votes_below and self.duplicate_identity_reason is None

    def _is_answered(self, me: bytes, height: int, voters: VoterSet) -> bool:
        """Counts answers of voters of the height to be signed only: a rolled-back disk names an old set, which may lie by now."""
        others = {voter: claim for voter, claim in self._claims.items() if voter in voters and voter != me}
        answered = 1 + sum(voter in self._answered and claim <= height for voter, claim in others.items())
        claims = sorted([height, *others.values()], reverse=True)
        return answered >= voters.quorum and claims[voters.faults_tolerated] <= height

    def enter_height(self, voters: VoterSet, height: int) -> None:
        """A height with these voters opens. Answers of other peers go. While we are silent, all answers go: we ask anew."""
        if self.is_over and height <= self.no_votes_below:
            self.is_over, self.next_request_at = False, 0.0
            self._answered.clear()
            self._claims.clear()
        self._answered.intersection_update(voters.keys)
        self._claims = {voter: claim for voter, claim in self._claims.items() if voter in voters}

    def voters_without_answer(self, me: bytes, voters: VoterSet) -> tuple[bytes, ...]:
        """The voters whose answer is missing: they are asked, and asked again."""
        if self.is_over or me not in voters:
            return ()
        return tuple(voter for voter in voters.keys if voter != me and voter not in self._answered)


def open_remembered_statements(
    heard: RememberedStatements, me: bytes, chain_id: bytes, verifier: Verifier
) -> tuple[list[AgreementStatement], list[Signed]]:
    """My statements of the agreement and of rounds, as somebody remembers them; `RemoteProtocolError` if one is not mine."""
    statements: list[AgreementStatement] = []
    of_rounds: list[Signed] = []
    for signed in heard.signed:
        if signed.signer != me:
            raise RemoteProtocolError("foreign-statement", f"heard of {short_id(signed.signer)}, asked about {short_id(me)}")
        message = open_signed(signed, chain_id, verifier, STATEMENT_TYPES)
        if isinstance(message, AGREEMENT_STATEMENT_TYPES):
            statements.append(message)
        else:
            of_rounds.append(signed)
    return statements, of_rounds


def votes_of_certificate(certificate_vote: bytes, signatures: dict[bytes, bytes]) -> list[Signed]:
    """The votes of which a certificate consists, as they were signed."""
    return [Signed(certificate_vote, signer, signature) for signer, signature in signatures.items()]
