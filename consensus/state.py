"""What a replica holds, and the few ways in which that changes: everything the handlers, rules and timers stand on."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Set

from consensus.application import Application
from consensus.block import decode_block
from consensus.book import Book, Offer
from consensus.catchup import AnswerRate, BlockFetch, CatchUp, Future
from consensus.chain import Chain
from consensus.events import Applied, Message
from consensus.evidence import Statement
from consensus.pacemaker import Pacemaker
from consensus.rollback import BOOKS_KEPT, RollbackCheck, certified
from consensus.signing import OwnVotes
from consensus.turn import Fault, Record, Restart, Send, SendBlock, SendDecisions, Silence, StoredBlock, StoredCertificate
from consensus.voters import CachingVerifier
from protocol import codec
from protocol.errors import RemoteProtocolError
from protocol.identity import Signed, Signer, Verifier, short_id, signing_preimage
from protocol.limits import VIEWS_AHEAD_MAX
from protocol.messages import Certificate, Commit, Prepare, ProposeEnvelope

VOUCHERS_MIN = 2  # for the time of a block: even if nobody lies (f = 0), the leader's clock may be wrong
BLOCKS_HELD_MAX = 8  # undecided blocks in memory, 4 MiB each; an older one that is needed again is fetched from its signers


class ReplicaState:
    """Bounds: one open book and `BOOKS_KEPT` closed ones, each as its class says; `BLOCKS_HELD_MAX` blocks; messages of later
    heights as `catchup.Future` says; the last decided heights as `Chain` says; own statements of one height, which grow by a few
    with every view that a quorum gives up, so with one view a minute in the end.
    """

    def __init__(
        self,
        signer: Signer,
        chain_id: bytes,
        verifier: Verifier,
        application: Application,
        applied: Applied,
        restart: Restart,
        anchor_height: int,
    ) -> None:
        self.me = signer.public
        self.refusal: str | None = None  # why the current view's block is not prepared here
        self.view = 0
        self._chain_id = chain_id
        self._anchor_height = anchor_height
        self._verifier = CachingVerifier(verifier)
        self._application = application
        self._chain = Chain(chain_id, application, applied, restart)
        self._own = OwnVotes(signer, chain_id, restart.votes)
        self._first_height = self.height  # of which all own votes are at hand
        self._check = RollbackCheck(silent_below=restart.silent_below)
        self._pacemaker = Pacemaker()
        self._catch_up, self._fetch, self._future, self._answers = CatchUp(), BlockFetch(), Future(), AnswerRate()
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
        self._records: list[Record] = []
        self._sends: list[Send | SendDecisions | SendBlock] = []
        self._faults: list[Fault] = []
        self._heard: list[Signed] = []
        self._book: Book | None = None
        self._closed: dict[int, Book] = {}  # of the last decided heights
        self._rivalry: str | None = None  # of a height that is decided

    @property
    def height(self) -> int:
        """The next height to be decided."""
        return self._chain.height

    @property
    def claimed(self) -> int:
        """The highest height that a connected peer says it works on. Nobody has to believe it."""
        return max(self._catch_up.claimed, self.height)

    def claimed_by(self, peers: Set[bytes], count: int) -> int:
        """The height that so many of these peers, or more, say they work on; 0 if so many are not ahead."""
        return self._catch_up.claimed_by(peers, count)

    @property
    def divergence(self) -> str | None:
        """Why this replica signs nothing any more: a decided block names another state than it has. Restore, then build anew."""
        return self._chain.divergence

    @property
    def dispute(self) -> str | None:
        """Why people are needed: more than n − q leaders of this height stand on another state than this replica."""
        return self._chain.dispute

    @property
    def rivalry(self) -> str | None:
        """The first proof, since the start, that more than f voters lie: two certified blocks. It stops nothing here."""
        return self._rivalry or (self._rivalry_in(self._book) if self._book else None)

    def _rivalry_in(self, book: Book) -> str | None:
        if book.rival is None or self._is_below_anchor(book):
            return None
        rival = f"block {book.rival.block.hex()[:16]} is certified at height {book.height} beside the history that is here"
        return f"{rival}: more than {book.voters.faults_tolerated} of {len(book.voters)} voters lie, or their keys were stolen"

    @property
    def _is_unproven(self) -> bool:
        """Whether the invitation's block is still to be decided: until then retired voters may have led this peer astray."""
        return self.height <= self._anchor_height

    def _is_below_anchor(self, book: Book) -> bool:
        """Whether its voters may be retired ones: the invitation's block, or an earlier one, is decided in it."""
        return book.height <= self._anchor_height

    @property
    def is_voter(self) -> bool:
        return self._book is not None and self.me in self._book.voters.members

    def reads_answers_of(self, peer: bytes) -> bool:
        """Whether this peer's OwnStatements are read now: it votes at this height, whose voters are known here."""
        return self._book is not None and peer in self._book.voters

    @property
    def may_speak(self) -> bool:
        """Whether this peer may sign messages of rounds. A voter may not until it knows that it has forgotten nothing."""
        book = self._book
        if book is None:  # the voters of this height are not known yet
            return not self._is_stopped and self._check.is_over
        return self._may_sign(book) if self.me in book.voters.members else not self._is_stopped

    @property
    def _is_stopped(self) -> bool:
        return self.divergence is not None or self.copied is not None or self.is_outdated

    @property
    def is_outdated(self) -> bool:
        """Whether this program cannot judge the block that follows, or one before it: the network runs what it lacks."""
        return self._is_beyond(self.height)

    def _is_beyond(self, height: int) -> bool:
        last = self._application.knows_until()
        return last is not None and height > last

    @property
    def copied(self) -> str | None:
        """What another machine with our key did, which stops this replica for good; None: there is none that we know of."""
        return self._check.copied

    @property
    def silent_below(self) -> int:
        """The height from which on this voter signs again, because its log lacks signatures of its own; 0: it lacks none."""
        return self._check.silent_below

    @property
    def leader(self) -> bytes | None:
        """Who leads the current view; None while that is not known yet."""
        schedule = self._chain.schedule(self.height)
        return schedule.leader(self.view) if schedule else None

    # Statements and certificates -------------------------------------------------------------------------------------

    def _in_window(self, view: int) -> bool:
        return abs(view - self.view) <= VIEWS_AHEAD_MAX

    def _verify(self, book: Book, signed: Signed, statement: Statement) -> None:
        if statement.voters != book.voters.hash:
            raise RemoteProtocolError("foreign-voters", f"{statement.TAG} at height {statement.height}")
        if signed.signer not in book.voters:
            raise RemoteProtocolError("not-a-voter", f"{statement.TAG} of {short_id(signed.signer)}")
        if not self._verifier.verify(
            signed.signer, signing_preimage(statement.TAG, self._chain_id, signed.body), signed.signature
        ):
            raise RemoteProtocolError("bad-signature", f"{statement.TAG} of {short_id(signed.signer)}")

    def _add(self, book: Book, signed: Signed, statement: Statement, counts: bool = True) -> None:
        if signed.signer == self.me:
            self._recognise(statement)
        evidence = book.add(signed, statement) if counts else book.add_uncounted(signed, statement)
        if evidence is not None and evidence.culprit != self.me:
            self._records.append(evidence)

    def _recognise(self, statement: Statement) -> None:
        """A statement of mine came back. If my log lacks it, the log has lost its end, or another machine has my key."""
        if self._own.knows(statement) or statement.height < max(self._first_height, self.height - BOOKS_KEPT):
            return  # our votes of heights that were decided before this start, or long ago, are not kept
        if self._check.forgot(statement.height):
            self._records.append(Silence(self._check.silent_below))  # nobody may tell us again after another restart

    def _add_certified(self, book: Book, certificate: Certificate, vote: Prepare | Commit) -> None:
        """A certificate's votes are statements like others: they may contradict some, and may be what somebody forgot."""
        for signed in certified(certificate.vote, certificate.signatures):
            self._add(book, signed, vote)

    def _add_rival(self, book: Book, certificate: Certificate, vote: Commit) -> None:
        """A verified certificate of a block that is not taken: counted, its votes would decide it. Its liars are accused."""
        if self._is_below_anchor(book):
            return  # only the invitation's block tells which of the two histories is true
        book.rival = book.rival or vote
        for signed in certified(certificate.vote, certificate.signatures):
            self._add(book, signed, vote, counts=False)
        self._rivalry = self.rivalry or self._rivalry_in(book)

    def _adopt(self, book: Book, certificate: Certificate, vote: Prepare) -> bool:
        """(S4, S5) A prepare certificate is taken whole, whatever was prepared here, and is durable before it is acted on."""
        adopted = book.adopt_high(certificate, vote)
        if adopted:
            self._records.append(StoredCertificate(book.height, certificate))
        return adopted

    # Books -----------------------------------------------------------------------------------------------------------

    def _close_book(self, book: Book) -> None:
        self._rivalry = self._rivalry or self._rivalry_in(book)
        book.close(self.view)
        self._closed[book.height] = book
        self._closed = {height: kept for height, kept in self._closed.items() if height > book.height - BOOKS_KEPT}
        self._book = None

    def _enter_view(self, book: Book, view: int) -> None:
        self.view = view
        self._ask_application, self._ask_again, self.refusal = True, None, None
        self._pacemaker.enter_view(view)
        book.forget_below(view - VIEWS_AHEAD_MAX, offers_below=view)

    def _recover_certificate(self, book: Book) -> None:
        """(S3) Timeouts after a restart must name the certificate from before it, if these voters signed it."""
        if self._recovered is not None:
            vote = codec.decode_message(self._recovered.vote, (Prepare,))
            if vote.height == book.height and vote.voters == book.voters.hash:
                book.adopt_high(self._recovered, vote)
                self._add_certified(book, self._recovered, vote)

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
        for certificate, vote in ((book.commit, book.commit_vote), (book.high, book.high_vote)):
            if certificate is not None and vote is not None and vote.block not in self._blocks:
                return vote.block, self._after_me(tuple(certificate.signatures))
        offer = book.offers.get(self.view)
        if offer is None or offer.digest in self._blocks or not self._may_sign(book):
            return None
        leader = offer.propose.signer
        prepared = self._after_me(book.supporters(self.view, offer.digest))
        return offer.digest, (leader, *(key for key in prepared if key != leader))

    def _after_me(self, keys: tuple[bytes, ...]) -> tuple[bytes, ...]:
        """In an order that differs from voter to voter, so that not everybody asks the same one."""
        return tuple(sorted((key for key in keys if key != self.me), key=lambda key: (key < self.me, key)))

    def _proposal(self, offer: Offer) -> ProposeEnvelope:
        """The message of an offer whose block is here. Its short body is made anew: what came may have been anything."""
        short = self._application.condense(decode_block(self._blocks[offer.digest]).body)
        return ProposeEnvelope(offer.propose, offer.header, short, offer.justification)

    # What the rules stand on -----------------------------------------------------------------------------------------

    def _may_sign(self, book: Book) -> bool:
        is_voter = self.me in book.voters.members
        is_able = self._chain.divergence is None and not self._is_beyond(book.height)
        return is_voter and is_able and self._check.may_sign(self.me, book.height, book.voters)

    def _is_prepared(self, book: Book) -> bool:
        return book.high_vote is not None and book.high_vote.view == self.view

    def _may_judge(self, book: Book) -> bool:
        """(S2, S6) Blocks are proposed and prepared on an applied parent, and not in a view that was given up."""
        return self._may_sign(book) and self._chain.is_applied and self._own.timed_out(book.height) < self.view

    def _is_vouched_for(self) -> bool:
        """(L) Whether an honest voter is among those that prepared this view's block: no clock that is behind keeps it back."""
        book = self._book
        offer = book.offers.get(self.view) if book else None
        if book is None or offer is None or not self._may_judge(book):
            return False
        return len(book.supporters(self.view, offer.digest)) >= max(VOUCHERS_MIN, book.voters.faults_tolerated + 1)

    def _now_ms(self) -> int:
        return int(self._now * 1_000)

    # What goes out ---------------------------------------------------------------------------------------------------

    def _sign(self, book: Book, statement: Statement) -> Signed:
        voted = self._own.cast(statement)
        self._records.append(voted)
        self._add(book, voted.signed, statement)
        return voted.signed

    def _send(self, peer: bytes, message: Message) -> None:
        self._sends.append(Send((peer,), message))

    def _send_to(self, peers: tuple[bytes, ...], message: Message) -> None:
        self._sends.append(Send(peers, message))

    def _broadcast(self, book: Book, message: Message) -> None:
        others = tuple(key for key in book.voters.keys if key != self.me)
        if others:
            self._sends.append(Send(others, message))
