"""What a replica holds, and the few ways in which that changes: everything the handlers, rules and timers stand on."""

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

TIME_PREPARERS_MIN = 2  # for the time of a block: even if nobody lies (f = 0), the leader's clock may be wrong
BLOCKS_HELD_MAX = 8  # undecided blocks in memory, 4 MiB each; an older one that is needed again is fetched from its signers


class ReplicaState:
    """Bounds: one open book and `VOTE_SETS_KEPT` closed ones, each as its class says; `BLOCKS_HELD_MAX` blocks; messages of later
    heights as `FutureHeightMessages` says; the last decided heights as `Chain` says; own statements of one height, which grow by
    a few with every view that a quorum gives up, so with one view a minute in the end.
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
        self.block_refusal: str | None = None  # why the current view's block is not prepared here
        self.view = 0
        self._chain_id = chain_id
        self._anchor_height = anchor_height
        self._verifier = CachingVerifier(verifier)
        self._application = application
        self._chain = Chain(chain_id, application, applied, restart)
        self._own = OwnVotes(signer, chain_id, restart.votes)
        self._first_height = self.height  # of which all own votes are at hand
        self._check = RollbackCheck(no_votes_below=restart.no_votes_below)
        self._pacemaker = Pacemaker()
        self._catch_up, self._fetch, self._future, self._answers = (
            BlockSync(),
            BlockFetcher(),
            FutureHeightMessages(),
            ResponseRateLimiter(),
        )
        self._links: set[bytes] = set()
        self._lost: dict[bytes, float] = {}  # voters whose link broke, and when; those that we never had are not among them
        self._recovered = restart.prepared  # adopted when the book of its height opens
        self._blocks: OrderedDict[bytes, bytes] = OrderedDict(
            (stored.digest, stored.block) for stored in restart.blocks[-BLOCKS_HELD_MAX:]
        )
        self._stored = {stored.digest for stored in restart.blocks}
        self._now = 0.0
        self._ask_application = True  # its answers may have changed since it was asked
        self._ask_again: float | None = None  # when they will: a block's time lies ahead of this clock
        self._records: list[JournalRecord] = []
        self._sends: list[SendMessage | SendDecisions | SendBlock] = []
        self._faults: list[PeerFault] = []
        self._heard: list[Signed] = []
        self._book: HeightVoteSet | None = None
        self._closed: dict[int, HeightVoteSet] = {}  # of the last decided heights
        self._rivalry: str | None = None  # of a height that is decided

    @property
    def height(self) -> int:
        """The next height to be decided."""
        return self._chain.height

    @property
    def highest_claimed_height(self) -> int:
        """The highest height that a connected peer says it works on. Nobody has to believe it."""
        return max(self._catch_up.highest_claimed_height, self.height)

    def height_claimed_by(self, peers: Set[bytes], count: int) -> int:
        """The height that so many of these peers, or more, say they work on; 0 if so many are not ahead."""
        return self._catch_up.height_claimed_by(peers, count)

    @property
    def divergence(self) -> str | None:
        """Why this replica signs nothing any more: a decided block names another state than it has. Restore, then build anew."""
        return self._chain.divergence

    @property
    def state_root_split(self) -> str | None:
        """Why people are needed: more than n − q leaders of this height stand on another state than this replica."""
        return self._chain.state_root_split

    @property
    def fork_proof(self) -> str | None:
        """The first proof, since the start, that more than f voters lie: two certified blocks. It stops nothing here."""
        return self._rivalry or (self._rivalry_in(self._book) if self._book else None)

    def _rivalry_in(self, book: HeightVoteSet) -> str | None:
        if book.conflicting_commit is None or self._is_below_anchor(book):
            return None
        rival = (
            f"block {book.conflicting_commit.block.hex()[:16]} is certified at height {book.height} "
            "beside the history that is here"
        )
        return f"{rival}: more than {book.voters.faults_tolerated} of {len(book.voters)} voters lie, or their keys were stolen"

    @property
    def _is_unproven(self) -> bool:
        """Whether the invitation's block is still to be decided: until then retired voters may have led this peer astray."""
        return self.height <= self._anchor_height

    def _is_below_anchor(self, book: HeightVoteSet) -> bool:
        """Whether its voters may be retired ones: the invitation's block, or an earlier one, is decided in it."""
        return book.height <= self._anchor_height

    @property
    def is_voter(self) -> bool:
        return self._book is not None and self.me in self._book.voters.members

    def accepts_answers_of(self, peer: bytes) -> bool:
        """Whether this peer's OwnStatements are read now: it votes at this height, whose voters are known here."""
        return self._book is not None and peer in self._book.voters

    @property
    def may_sign_round_messages(self) -> bool:
        """Whether this peer may sign messages of rounds. A voter may not until it knows that it has forgotten nothing."""
        book = self._book
        if book is None:  # the voters of this height are not known yet
            return not self._is_stopped and self._check.is_over
        return self._may_sign(book) if self.me in book.voters.members else not self._is_stopped

    @property
    def _is_stopped(self) -> bool:
        return self.divergence is not None or self.duplicate_identity_reason is not None or self.is_outdated

    @property
    def is_outdated(self) -> bool:
        """Whether this program cannot judge the block that follows, or one before it: the network runs what it lacks."""
        return self._is_beyond(self.height)

    def _is_beyond(self, height: int) -> bool:
        last = self._application.last_supported_height()
        return last is not None and height > last

    @property
    def duplicate_identity_reason(self) -> str | None:
        """What another machine with our key did, which stops this replica for good; None: there is none that we know of."""
        return self._check.duplicate_identity_reason

    @property
    def no_votes_below(self) -> int:
        """The height from which on this voter signs again, because its log lacks signatures of its own; 0: it lacks none."""
        return self._check.no_votes_below

    @property
    def leader(self) -> bytes | None:
        """Who leads the current view; None while that is not known yet."""
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
        """A statement of mine came back. If my log lacks it, the log has lost its end, or another machine has my key."""
        if self._own.has_signed(statement) or statement.height < max(self._first_height, self.height - VOTE_SETS_KEPT):
            return  # our votes of heights that were decided before this start, or long ago, are not kept
        if self._check.record_forgotten_statement(statement.height):
            self._records.append(VotePause(self._check.no_votes_below))  # nobody may tell us again after another restart

    def _add_certified(self, book: HeightVoteSet, certificate: Certificate, vote: Prepare | Commit) -> None:
        """A certificate's votes are statements like others: they may contradict some, and may be what somebody forgot."""
        for signed in votes_of_certificate(certificate.vote, certificate.signatures):
            self._add(book, signed, vote)

    def _add_rival(self, book: HeightVoteSet, certificate: Certificate, vote: Commit) -> None:
        """A verified certificate of a block that is not taken: counted, its votes would decide it. Its liars are accused."""
        if self._is_below_anchor(book):
            return  # only the invitation's block tells which of the two histories is true
        book.conflicting_commit = book.conflicting_commit or vote
        for signed in votes_of_certificate(certificate.vote, certificate.signatures):
            self._add(book, signed, vote, counts=False)
        self._rivalry = self.fork_proof or self._rivalry_in(book)

    def _adopt(self, book: HeightVoteSet, certificate: Certificate, vote: Prepare) -> bool:
        """(S4, S5) A prepare certificate is taken whole, whatever was prepared here, and is durable before it is acted on."""
        adopted = book.adopt_prepare_certificate(certificate, vote)
        if adopted:
            self._records.append(StoredCertificate(book.height, certificate))
        return adopted

    # Books -----------------------------------------------------------------------------------------------------------

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
        """(S4) Block bytes are durable before anything about them is signed: the record goes in the same turn."""
        self._hold(digest, block)
        if digest not in self._stored:
            self._stored.add(digest)
            self._records.append(StoredBlock(height, digest, block))

    def _missing_block(self) -> tuple[bytes, tuple[bytes, ...]] | None:
        """The block that a certificate or the current proposal names and that is not here, and who should have it."""
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
        """In an order that differs from voter to voter, so that not everybody asks the same one."""
        return tuple(sorted((key for key in keys if key != self.me), key=lambda key: (key < self.me, key)))

    def _proposal(self, offer: BlockProposal) -> ProposeEnvelope:
        """The message of an offer whose block is here. Its short body is made anew: what came may have been anything."""
        short = self._application.make_compact_body(decode_block(self._blocks[offer.digest]).body)
        return ProposeEnvelope(offer.propose, offer.header, short, offer.justification)

    # What the rules stand on -----------------------------------------------------------------------------------------

    def _may_sign(self, book: HeightVoteSet) -> bool:
        is_voter = self.me in book.voters.members
        is_able = self._chain.divergence is None and not self._is_beyond(book.height)
        return is_voter and is_able and self._check.may_sign(self.me, book.height, book.voters)

    def _is_prepared(self, book: HeightVoteSet) -> bool:
        return book.high_vote is not None and book.high_vote.view == self.view

    def _may_judge(self, book: HeightVoteSet) -> bool:
        """(S2, S6) Blocks are proposed and prepared on an applied parent, and not in a view that was given up."""
        return self._may_sign(book) and self._chain.is_applied and self._own.highest_timed_out_view(book.height) < self.view

    def _is_vouched_for(self) -> bool:
        """(L) Whether an honest voter is among those that prepared this view's block: no clock that is behind keeps it back."""
        book = self._book
        offer = book.proposals.get(self.view) if book else None
        if book is None or offer is None or not self._may_judge(book):
            return False
        return len(book.preparers(self.view, offer.digest)) >= max(TIME_PREPARERS_MIN, book.voters.faults_tolerated + 1)

    def _now_ms(self) -> int:
        return int(self._now * 1_000)

    # What goes out ---------------------------------------------------------------------------------------------------

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
