"""This voter's own statements, at most one per slot, and a check for lost ones.

A voter loses statements if its disk returns to an earlier state, for example from a backup. `RollbackCheck` detects such a loss.

Before its first signature, a voter asks the other voters for its own statements, which they remember. Each answer also contains
the height at which that voter works: its claim. The voter signs again after q voters, itself included, have answered. It signs
only at heights above those for which its log seems to lack statements.

Safety does not depend on this check. A voter whose disk was rolled back is one of the f faulty voters. Any two quorums still
share an honest voter that lost nothing. The check keeps the voter from signing statements that contradict its lost ones, because
the network expels a voter for them:

- *Decided blocks.* q voters committed a decided block, and q voters have answered. These two groups share f + 1 voters, and so f
  voters beside this one. Each honest voter among these f has decided the block or has a prepare certificate for it. It sends this
  certificate before its answer, so this voter has its lost certificate again. An answer from a later height counts when this
  voter reaches that height. If the height is too far ahead to keep its certificate, this voter asks again.
- *Statements at an open height.* Links deliver in order or break. Honest voters have therefore received this voter's statements,
  and return them. A returned statement that the log lacks proves a loss. It does not prove how many statements are lost, because
  the voter that returned it may be one height behind. This voter is therefore silent at the height of the statement and at the
  next height.
- *Progress of the other voters.* Voters remember the statements of the open height and of the last two decided heights. They
  therefore return a statement even after the decisions of its height and of the next one. All earlier heights are decided and
  certified. This voter signs nothing below the (f+1)-th highest claim, because an honest voter has reached that height.

A copy of the disk on another machine signs with the same key. To this voter, each statement of the copy looks like a lost one.
Three checks detect the copy:

- *A silent voter asks at each height.* While a voter is silent, its check starts again at every height. The voter therefore
  learns of the copy's signatures before it signs anything itself.
- *Heights above the start.* Enough answers are those of n − q + f + 1 other voters, or of all. Let H be the first height at which
  this process has enough answers from voters at H or below. Earlier processes of this voter then signed nothing above H + 1.
  Proof: A signature at height x needs the decision of x − 1. At least q − 1 other voters therefore committed x − 1 before they
  answered. They share more than f voters with those that answered. One of these is honest and answered after its commit of x − 1,
  hence x − 1 ≤ H. A signature above H + 1 that the log lacks is therefore from another machine. This voter then stops for good,
  because both machines would soon sign two messages for one slot. Fewer answers prove nothing. This voter is then silent, as
  after any loss.
- *A link with this voter's key.* The peer dials an address that is announced for its own key. If another process at that address
  proves the key, it is on another machine (`inputs.DuplicateIdentityInput`). This check needs no signature of the copy. It may
  therefore detect the copy before the copy signs.

f faulty voters cannot silence this voter, for three reasons. The (f+1)-th highest claim is not above all honest claims. A
returned statement needs this voter's signature. The n − f honest voters answer, and they are at least q.

One gap remains: a voter that restarted knows only certificates and its own records. If all voters that answer have restarted,
those statements of this voter that entered no certificate are lost.
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

ASK_SECONDS = 0.5  # seconds between requests to voters without a valid answer, which may have been too far ahead
EARLIER_HEIGHTS = 1  # heights above the answering voters at which an earlier process of this voter may have signed
SILENT_HEIGHTS = (
    2  # heights of silence, from the height of a lost statement on: the voter that returned it may be one height behind
)
VOTE_SETS_KEPT = 2  # decided heights whose statements are stored for other voters


class OwnVotes:
    """This voter's own statements about the open height and the last `VOTE_SETS_KEPT` decided heights.

    Each is durable before it is sent.
    """

    def __init__(self, signer: Signer, chain_id: bytes, votes: Iterable[OwnStatement]) -> None:
        self._signer = signer
        self._chain_id = chain_id
        self._signed: dict[VoteSlot, Signed] = {voted.slot: voted.signed for voted in votes}

    def get_vote(self, tag: str, height: int, view: int) -> Signed | None:
        return self._signed.get((tag, height, view))

    def has_signed(self, statement: AgreementStatement) -> bool:
        """Return whether this voter's log has exactly this statement."""
        signed = self.get_vote(statement.TAG, statement.height, statement.view)
        return signed is not None and signed.body == codec.encode(statement)

    def statements_at(self, height: int) -> list[tuple[Signed, AgreementStatement]]:
        return [
            (signed, codec.decode_message(signed.body, AGREEMENT_STATEMENT_TYPES))  # type: ignore[misc]
            for (_, of_height, _), signed in self._signed.items()
            if of_height == height
        ]

    def sign_statement(self, message: AgreementStatement) -> OwnStatement:
        """Return a new signed statement.

        Raises `LocalProtocolError` if its slot is taken, or if it is a vote after an own timeout.
        """
        slot = (message.TAG, message.height, message.view)
        if slot in self._signed:
            raise LocalProtocolError(f"slot {slot} is already signed")
        if isinstance(message, (Prepare, Commit)) and self.highest_timed_out_view(message.height) >= message.view:
            raise LocalProtocolError(f"{message.TAG} in {message.height}.{message.view} after a timeout")
        signed = sign_message(self._signer, self._chain_id, message)
        self._signed[slot] = signed
        return OwnStatement(slot, signed)

    def has_voted(self, height: int) -> bool:
        return any(tag != Timeout.TAG and of_height == height for tag, of_height, _ in self._signed)

    def highest_timed_out_view(self, height: int) -> int:
        """Return the highest view of `height` for which this voter has signed a timeout; −1 if there is none."""
        given_up = (view for tag, of_height, view in self._signed if tag == Timeout.TAG and of_height == height)
        return max(given_up, default=-1)

    def highest_signed_view(self, height: int) -> int:
        """Return the highest view of `height` for which this voter has signed a statement; 0 if there is none."""
        return max((view for _, of_height, view in self._signed if of_height == height), default=0)

    def prune_below_height(self, height: int) -> None:
        self._signed = {slot: signed for slot, signed in self._signed.items() if slot[1] >= height}


@dataclass(slots=True)
class RollbackCheck:
    """The check whether a voter may sign. It starts with the process, and again at each height while the voter is silent."""

    is_over: bool = False
    _claims: dict[bytes, int] = field(default_factory=dict)  # voter -> height that it claims to work on
    _answered: set[bytes] = field(default_factory=set)  # voters whose answers count when this voter reaches their heights
    no_votes_below: int = 0
    _reached: int | None = None  # H in the module's docstring; None: not enough voters have answered
    # Text about an action of another machine with our key, which ends all signing; None: none is known.
    duplicate_identity_reason: str | None = None
    next_request_at: float = 0.0  # time at which voters without an answer are asked again

    def record_answer(self, voter: bytes, claim: int, height: int) -> None:
        """Record a voter's answer. `claim` is the height at which that voter works, and `height` is our height."""
        self._claims[voter] = claim
        if claim <= height + FUTURE_HEIGHTS_MAX:
            self._answered.add(voter)

    def record_forgotten_statement(self, height: int) -> bool:
        """Record an own statement that our log lacks. Return whether this voter must stay silent for longer.

        The statement also counts when the check is over, because the answer with it may have been late.
        """
        # Earlier processes of this voter can have signed at most one height above the voters that answered.
        is_of_this_life = self._reached is not None and height > self._reached + EARLIER_HEIGHTS
        if is_of_this_life and self.duplicate_identity_reason is None:
            self.duplicate_identity_reason = f"signed a statement at height {height} that this peer did not sign"
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
        """Return whether enough voters of this height have answered.

        Former voters do not count, because more than f may now be faulty.
        """
        others = {voter: claim for voter, claim in self._claims.items() if voter in voters and voter != me}
        answered = 1 + sum(voter in self._answered and claim <= height for voter, claim in others.items())
        claims = sorted([height, *others.values()], reverse=True)
        return answered >= voters.quorum and claims[voters.faults_tolerated] <= height

    def enter_height(self, voters: VoterSet, height: int) -> None:
        """Start the check at a new height with these voters. Answers of peers that do not vote now are dropped.

        While this voter is silent, all answers are dropped, and the voters are asked again.
        """
        if self.is_over and height <= self.no_votes_below:
            self.is_over, self.next_request_at = False, 0.0
            self._answered.clear()
            self._claims.clear()
        self._answered.intersection_update(voters.keys)
        self._claims = {voter: claim for voter, claim in self._claims.items() if voter in voters}

    def voters_without_answer(self, me: bytes, voters: VoterSet) -> tuple[bytes, ...]:
        """Return the voters that have not answered and must be asked again. Empty: the check is over."""
        if self.is_over or me not in voters:
            return ()
        return tuple(voter for voter in voters.keys if voter != me and voter not in self._answered)


def open_remembered_statements(
    heard: RememberedStatements, me: bytes, chain_id: bytes, verifier: Verifier
) -> tuple[list[AgreementStatement], list[Signed]]:
    """Verify this voter's statements that another voter returned. Return those of agreement, and the signed messages of rounds.

    Raises `RemoteProtocolError` if a signature is invalid or of another key.
    """
    statements: list[AgreementStatement] = []
    of_rounds: list[Signed] = []
    for signed in heard.signed:
        if signed.signer != me:
            raise RemoteProtocolError(
                "foreign-statement", f"received a statement of {short_id(signed.signer)}, requested those of {short_id(me)}"
            )
        message = open_signed(signed, chain_id, verifier, STATEMENT_TYPES)
        if isinstance(message, AGREEMENT_STATEMENT_TYPES):
            statements.append(message)
        else:
            of_rounds.append(signed)
    return statements, of_rounds


def votes_of_certificate(certificate_vote: bytes, signatures: dict[bytes, bytes]) -> list[Signed]:
    """Return the signed votes that a certificate contains."""
    return [Signed(certificate_vote, signer, signature) for signer, signature in signatures.items()]
