"""The state of a replica, and the functions that change it. Handlers, rules and timers are built on this class."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Set

from consensus.block import decode_block
from consensus.effects import (
    JournalRecord,
    PeerFault,
    RestartState,
    SendBlock,
    SendDecisions,
    SendMessage,
    StoredBlock,
    StoredCertificate,
    VotePause,
)
from consensus.evidence import AgreementStatement
from consensus.inputs import AgreementMessage, Application, AppliedInput
from consensus.pbft.block_sync import BlockFetcher, BlockSync, FutureHeightMessages, ResponseRateLimiter
from consensus.pbft.chain import Chain
from consensus.pbft.own_votes import VOTE_SETS_KEPT, OwnVotes, RollbackCheck, votes_of_certificate
from consensus.pbft.pacemaker import Pacemaker
from consensus.pbft.vote_set import BlockProposal, HeightVoteSet
from protocol.errors import RemoteProtocolError
from protocol.identity import CachingVerifier, Signed, Signer, Verifier, short_id, signing_preimage
from protocol.limits import VIEWS_AHEAD_MAX
from protocol.messages import Certificate, Commit, Prepare, ProposeEnvelope

# Minimum number of voters that confirm a block's time: even without faulty voters (f = 0), the leader's clock may be wrong.
TIME_PREPARERS_MIN = 2
BLOCKS_HELD_MAX = 8  # undecided blocks in memory, of at most 7 MiB each; an older block is requested again when it is needed


class ReplicaState:
    """The state of one replica. All parts are bounded:

    - one open vote set and `VOTE_SETS_KEPT` closed ones, as `HeightVoteSet` describes
    - `BLOCKS_HELD_MAX` undecided blocks
    - messages of later heights, as `FutureHeightMessages` describes
    - the last decided heights, as `Chain` describes
    - own statements: a few for each view that a quorum gives up, which is at most one view a minute in the end
    """

    def __init__(
        self,
        signer: Signer,
        chain_id: bytes,
        verifier: Verifier,
        application: Application,
        applied: AppliedInput,
        restart: RestartState,
        anchor_height: int,
    ) -> None:
        self.me = signer.public
        # Reason why this voter does not prepare the block of the current view; None: there is none.
        self.block_refusal: str | None = None
        self.view = 0
        self._chain_id = chain_id
        self._anchor_height = anchor_height
        self._verifier = CachingVerifier(verifier)
        self._application = application
        self._chain = Chain(chain_id, application, applied, restart)
        self._own = OwnVotes(signer, chain_id, restart.votes)
        self._first_height = self.height  # lowest height from which on the log of own votes is complete
        self._check = RollbackCheck(no_votes_below=restart.no_votes_below)
        self._pacemaker = Pacemaker()
        self._catch_up, self._fetch, self._future, self._answers = (
            BlockSync(),
            BlockFetcher(),
            FutureHeightMessages(),
            ResponseRateLimiter(),
        )
        self._links: set[bytes] = set()
        # Voter whose link broke -> time of the break; voters that never had a link are absent.
        self._lost: dict[bytes, float] = {}
        self._recovered = restart.prepared  # prepare certificate from before the restart, which is adopted when its height opens
        self._blocks: OrderedDict[bytes, bytes] = OrderedDict(
            (stored.digest, stored.block) for stored in restart.blocks[-BLOCKS_HELD_MAX:]
        )
        self._stored = {stored.digest for stored in restart.blocks}
        self._now = 0.0
        self._ask_application = True  # whether the application's answers may have changed
        # Time to ask the application again, if a block's time is ahead of this clock; None: no such block.
        self._ask_again: float | None = None
        self._records: list[JournalRecord] = []
        self._sends: list[SendMessage | SendDecisions | SendBlock] = []
        self._faults: list[PeerFault] = []
        self._heard: list[Signed] = []
        self._book: HeightVoteSet | None = None
        self._closed: dict[int, HeightVoteSet] = {}  # height -> vote set, for the last decided heights
        self._rivalry: str | None = None  # first `fork_proof` about a decided height; None: there is none

    @property
    def height(self) -> int:
        """Height that is decided next."""
        return self._chain.height

    @property
    def highest_claimed_height(self) -> int:
        """The highest height that a connected peer claims to work on. The claims are not verified."""
        return max(self._catch_up.highest_claimed_height, self.height)

    def height_claimed_by(self, peers: Set[bytes], count: int) -> int:
        """Return the highest height that at least `count` of these peers claim. 0: fewer of them have claimed a height."""
        return self._catch_up.height_claimed_by(peers, count)

    @property
    def divergence(self) -> str | None:
        """Text about a difference between a decided block and our state, or None.

        It stops all signing until the state is restored.
        """
        return self._chain.divergence

    @property
    def state_root_split(self) -> str | None:
        """A text for people if more than n − q leaders of this height have proposed another state root; otherwise None."""
        return self._chain.state_root_split

    @property
    def fork_proof(self) -> str | None:
        """Text about the first proof since the start that more than f voters are faulty: two certified blocks.

        The replica continues.
        """
        return self._rivalry or (self._rivalry_in(self._book) if self._book else None)

    def _rivalry_in(self, book: HeightVoteSet) -> str | None:
        if book.conflicting_commit is None or self._is_below_anchor(book):
            return None
        rival = (
            f"block {book.conflicting_commit.block.hex()[:16]} is certified at height {book.height}, but it is not in our chain"
        )
        faulty = f"more than {book.voters.faults_tolerated} of {len(book.voters)} voters are faulty"
        return f"{rival}: {faulty}, or their keys were stolen"

    @property
    def _is_unproven(self) -> bool:
        """True until the trusted block is decided. Before that, retired voters may have led this peer to another chain."""
        return self.height <= self._anchor_height

    def _is_below_anchor(self, book: HeightVoteSet) -> bool:
        """Return whether the vote set's height is at or below the height of the trusted block.

        The voters of such a height may have retired. Their signatures then prove nothing about the current voters.
        """
        return book.height <= self._anchor_height

    @property
    def is_voter(self) -> bool:
        return self._book is not None and self.me in self._book.voters.members

    def accepts_answers_of(self, peer: bytes) -> bool:
        """Return whether RememberedStatements of this peer are accepted: it must be a known voter of this height."""
        return self._book is not None and peer in self._book.voters

    @property
    def may_sign_round_messages(self) -> bool:
        """True if this peer may sign messages of rounds.

        A voter must first know that its log lacks none of its own signatures.
        """
        book = self._book
        if book is None:  # the voters of this height are not known yet
            return not self._is_stopped and self._check.is_over
        return self._may_sign(book) if self.me in book.voters.members else not self._is_stopped

    @property
    def _is_stopped(self) -> bool:
        return self.divergence is not None or self.duplicate_identity_reason is not None or self.is_outdated

    @property
    def is_outdated(self) -> bool:
        """True if this program cannot judge the next block, because the network runs a module version that the program lacks."""
        return self._is_beyond(self.height)

    def _is_beyond(self, height: int) -> bool:
        last = self._application.last_supported_height()
        return last is not None and height > last

    @property
    def duplicate_identity_reason(self) -> str | None:
        """Text about an action of another machine with our key, or None. It stops this replica until its process ends."""
        return self._check.duplicate_identity_reason

    @property
    def no_votes_below(self) -> int:
        """Height from which on this voter signs again, after its log lost signatures; 0: none were lost."""
        return self._check.no_votes_below

    @property
    def leader(self) -> bytes | None:
        """Leader of the current view; None: the schedule of leaders is not known yet."""
        schedule = self._chain.leader_schedule(self.height)
        return schedule.leader_of_view(self.view) if schedule else None

    # Statements and certificates -------------------------------------------------------------------------------------

    def _in_window(self, view: int) -> bool:
        return abs(view - self.view) <= VIEWS_AHEAD_MAX

    def _verify(self, book: HeightVoteSet, signed: Signed, statement: AgreementStatement) -> None:
        if statement.voters != book.voters.hash:
            raise RemoteProtocolError("foreign-voters", f"{statement.TAG} at height {statement.height}")
        if signed.signer not in book.voters:
            raise RemoteProtocolError("not-a-voter", f"{statement.TAG} of {short_id(signed.signer)}")
        if not self._verifier.verify(
            signed.signer, signing_preimage(statement.TAG, self._chain_id, signed.body), signed.signature
        ):
            raise RemoteProtocolError("bad-signature", f"{statement.TAG} of {short_id(signed.signer)}")

    def _add(self, book: HeightVoteSet, signed: Signed, statement: AgreementStatement, counts: bool = True) -> None:
        if signed.signer == self.me:
            self._recognise(statement)
        evidence = book.add_statement(signed, statement) if counts else book.add_uncounted_statement(signed, statement)
        if evidence is not None and evidence.signer != self.me:
            self._records.append(evidence)

    def _recognise(self, statement: AgreementStatement) -> None:
        """Handle an own statement that another peer returned.

        If our log lacks the statement, the log has lost its end, or another machine has our key.
        """
        if self._own.has_signed(statement) or statement.height < max(self._first_height, self.height - VOTE_SETS_KEPT):
            return  # the log does not keep votes of heights that were decided before the start or long ago
        if self._check.record_forgotten_statement(statement.height):
            # The record is durable, because after another restart no peer may return the statement again.
            self._records.append(VotePause(self._check.no_votes_below))

    def _add_certified(self, book: HeightVoteSet, certificate: Certificate, vote: Prepare | Commit) -> None:
        """Add the votes of a certificate as statements.

        They may contradict other statements, or be own votes that our log lost.
        """
        for signed in votes_of_certificate(certificate.vote, certificate.signatures):
            self._add(book, signed, vote)

    def _add_rival(self, book: HeightVoteSet, certificate: Certificate, vote: Commit) -> None:
        """Add a verified certificate of a block that is not accepted. Its votes do not count, but may be evidence."""
        if self._is_below_anchor(book):
            return  # only the trusted block determines which of two chains is true
        book.conflicting_commit = book.conflicting_commit or vote
        for signed in votes_of_certificate(certificate.vote, certificate.signatures):
            self._add(book, signed, vote, counts=False)
        self._rivalry = self.fork_proof or self._rivalry_in(book)

    def _adopt(self, book: HeightVoteSet, certificate: Certificate, vote: Prepare) -> bool:
        """(S4, S5) Adopt a prepare certificate, even if this voter prepared another block.

        It is durable before the replica acts on it.
        """
        adopted = book.adopt_prepare_certificate(certificate, vote)
        if adopted:
            self._records.append(StoredCertificate(book.height, certificate))
        return adopted

    # Views -----------------------------------------------------------------------------------------------------------

    def _enter_view(self, book: HeightVoteSet, view: int) -> None:
        self.view = view
        self._ask_application, self._ask_again, self.block_refusal = True, None, None
        self._pacemaker.enter_view(view)
        book.prune_below_view(view - VIEWS_AHEAD_MAX, offers_below=view)

    # Blocks ----------------------------------------------------------------------------------------------------------

    def _hold(self, digest: bytes, block: bytes) -> None:
        self._blocks[digest] = block
        self._blocks.move_to_end(digest)
        if len(self._blocks) > BLOCKS_HELD_MAX:
            self._blocks.popitem(last=False)

    def _store(self, height: int, digest: bytes, block: bytes) -> None:
        """(S4) Keep the bytes of a block.

        Their record belongs to the same step as the statement about the block, and is durable before it is sent.
        """
        self._hold(digest, block)
        if digest not in self._stored:
            self._stored.add(digest)
            self._records.append(StoredBlock(height, digest, block))

    def _missing_block(self) -> tuple[bytes, tuple[bytes, ...]] | None:
        """Return the digest of the missing block that a certificate or the current proposal names, and the peers to ask.

        None: no block is missing.
        """
        book = self._book
        if book is None:
            return None
        for certificate, vote in ((book.commit, book.commit_vote), (book.highest_prepare_certificate, book.high_vote)):
            if certificate is not None and vote is not None and vote.block not in self._blocks:
                return vote.block, self._after_me(tuple(certificate.signatures))
        offer = book.proposals.get(self.view)
        if offer is None or offer.digest in self._blocks or not self._may_sign(book):
            return None
        leader = offer.propose.signer
        prepared = self._after_me(book.preparers(self.view, offer.digest))
        return offer.digest, (leader, *(key for key in prepared if key != leader))

    def _after_me(self, keys: tuple[bytes, ...]) -> tuple[bytes, ...]:
        """Return the keys in an order that differs between voters, so that voters ask different peers first."""
        return tuple(sorted((key for key in keys if key != self.me), key=lambda key: (key < self.me, key)))

    def _proposal(self, offer: BlockProposal) -> ProposeEnvelope:
        """Return the message of a proposal whose block is here.

        The compact body is made again, because the received compact body is not signed.
        """
        short = self._application.make_compact_body(decode_block(self._blocks[offer.digest]).body)
        return ProposeEnvelope(offer.propose, offer.header, short, offer.justification)

    # Conditions of the rules -----------------------------------------------------------------------------------------

    def _may_sign(self, book: HeightVoteSet) -> bool:
        is_voter = self.me in book.voters.members
        is_able = self._chain.divergence is None and not self._is_beyond(book.height)
        return is_voter and is_able and self._check.may_sign(self.me, book.height, book.voters)

    def _is_prepared(self, book: HeightVoteSet) -> bool:
        return book.high_vote is not None and book.high_vote.view == self.view

    def _may_judge(self, book: HeightVoteSet) -> bool:
        """(S2, S6) Return whether this voter may propose and prepare: the parent is applied, and the view is not given up."""
        return self._may_sign(book) and self._chain.is_applied and self._own.highest_timed_out_view(book.height) < self.view

    def _is_vouched_for(self) -> bool:
        """(L) Return whether an honest voter has prepared the block of this view.

        If so, a slow clock here must not delay the block.
        """
        book = self._book
        offer = book.proposals.get(self.view) if book else None
        if book is None or offer is None or not self._may_judge(book):
            return False
        return len(book.preparers(self.view, offer.digest)) >= max(TIME_PREPARERS_MIN, book.voters.faults_tolerated + 1)

    def _now_ms(self) -> int:
        return int(self._now * 1_000)

    # Output ----------------------------------------------------------------------------------------------------------

    def _sign(self, book: HeightVoteSet, statement: AgreementStatement) -> Signed:
        voted = self._own.sign_statement(statement)
        self._records.append(voted)
        self._add(book, voted.signed, statement)
        return voted.signed

    def _send(self, peer: bytes, message: AgreementMessage) -> None:
        self._sends.append(SendMessage((peer,), message))

    def _send_to(self, peers: tuple[bytes, ...], message: AgreementMessage) -> None:
        self._sends.append(SendMessage(peers, message))

    def _broadcast(self, book: HeightVoteSet, message: AgreementMessage) -> None:
        others = tuple(key for key in book.voters.keys if key != self.me)
        if others:
            self._sends.append(SendMessage(others, message))
