"""The replica: PBFT with two phases, one height at a time, certificates carried through view changes.

Inputs are handled into facts (a verified statement, a certificate, a claim); then the rules run until none has anything to do.

Safety, as the comments below name it:
(S1) One Propose, Prepare, Commit and Timeout per (height, view), durable before it is sent, over restarts too.
(S2) No Prepare or Commit in a view after a Timeout for it or a later one.
(S3) A proposal of view v > 0 carries a timeout certificate of exactly v − 1; the prepared block in it is proposed again unjudged.
(S4) Block bytes are durable before the Prepare, the prepare certificate before the Commit.
(S5) A Timeout counts with its certificate only; certificates are taken whole; a commit certificate of any view decides.
(S6) Who has not applied the parent prepares nothing; who finds another state than a decided block names signs nothing.
(L) marks what liveness needs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

from consensus.application import Application
from consensus.block import block_digest
from consensus.book import Book, Offer
from consensus.catchup import FUTURE_HEIGHTS_MAX, BlockFetch, CatchUp, Future
from consensus.chain import DECIDED_AHEAD_MAX, Chain, decided_record
from consensus.events import Applied, Connected, Disconnected, Event, Message, Received, Tick, WorkChanged
from consensus.evidence import Statement
from consensus.pacemaker import Pacemaker
from consensus.signing import OwnVotes
from consensus.turn import (
    NEVER_VOTED,
    Fault,
    Record,
    Restart,
    Send,
    SendBlock,
    SendDecisions,
    StoredBlock,
    StoredCertificate,
    Turn,
)
from consensus.voters import CachingVerifier, covers, verify_certificate, verify_timeout_certificate
from protocol import codec
from protocol.errors import RemoteProtocolError
from protocol.identity import Signed, Signer, Verifier, preimage, short_id
from protocol.limits import DECISIONS_PER_REPLY_MAX, VIEWS_AHEAD_MAX
from protocol.messages import (
    NO_VIEW,
    BlockBytes,
    Certificate,
    Commit,
    Decision,
    GetBlock,
    GetDecisions,
    Prepare,
    Prepared,
    Propose,
    Proposed,
    Status,
    TimedOut,
    Timeout,
    TimeoutCertificate,
    ViewEnded,
    Vote,
)

S = TypeVar("S", Propose, Prepare, Commit, Timeout)

BLOCKS_HELD_MAX = 8  # undecided blocks in memory, 4 MiB each; an older one that is needed again is fetched from its signers


class Replica:
    """One voter's, or observer's, part in the agreement. Pure: time is an argument, effects are returned.

    `now` is seconds since the Unix epoch, and never goes backwards during a replica's life: the daemon adds a monotonic
    clock to the wall time at its start. `applied` is the last height the application has applied; decided heights above it that
    are in `restart` must follow as `Applied` events, as for every `Turn.decided`.
    """

    def __init__(
        self,
        signer: Signer,
        chain_id: bytes,
        verifier: Verifier,
        application: Application,
        applied: Applied,
        restart: Restart = NEVER_VOTED,
    ) -> None:
        self.me = signer.public
        self.refusal: str | None = None  # why the current view's block is not prepared here
        self._chain_id = chain_id
        self._verifier = CachingVerifier(verifier)
        self._application = application
        self._chain = Chain(chain_id, application, applied, restart)
        self._own = OwnVotes(signer, chain_id, restart.votes)
        self._pacemaker = Pacemaker()
        self._catch_up, self._fetch, self._future = CatchUp(), BlockFetch(), Future()
        self._links: set[bytes] = set()
        self._lost: dict[bytes, float] = {}  # peers whose link broke, and when; those that we never had are not among them
        self._recovered = restart.prepared  # adopted when the book of its height opens
        self._blocks: OrderedDict[bytes, bytes] = OrderedDict((stored.digest, stored.block) for stored in restart.blocks)
        self._stored = set(self._blocks)
        self._now = 0.0
        self._ask_application = True  # its answers may have changed since it was asked
        self._records: list[Record] = []
        self._sends: list[Send | SendDecisions | SendBlock] = []
        self._faults: list[Fault] = []
        self._rules: tuple[Callable[[Book], bool], ...] = (
            self._decide,
            self._collect_prepares,
            self._follow,
            self._join_timeouts,
            self._vouch,
            self._propose,
            self._prepare,
            self._commit,
        )
        self.view = 0
        self._book: Book | None = None
        self._open_height()

    @property
    def height(self) -> int:
        """The next height to be decided."""
        return self._chain.height

    @property
    def divergence(self) -> str | None:
        """Why this replica signs nothing any more: a decided block names another state than it has. Restore, then build anew."""
        return self._chain.divergence

    @property
    def is_voter(self) -> bool:
        return self._book is not None and self.me in self._book.voters

    @property
    def leader(self) -> bytes | None:
        """Who leads the current view; None while that is not known yet."""
        schedule = self._chain.schedule(self.height)
        return schedule.leader(self.view) if schedule else None

    # One step --------------------------------------------------------------------------------------------------------

    def step(self, event: Event, now: float) -> Turn:
        """Handles one input. The turn must be executed, or merged with later ones and executed, before the next wait."""
        self._now = max(now, self._now)
        match event:
            case Received(peer, message):
                self._receive(peer, message)
            case Connected(peer):
                self._links.add(peer)
                self._lost.pop(peer, None)
                self._greet(peer)
            case Disconnected(peer):
                self._links.discard(peer)
                self._lost[peer] = self._now
                self._catch_up.forget(peer)
                self._future.forget(peer)
            case Applied():
                self._chain.add_applied(event)
                self._ask_application = True
                self._open_height()
            case WorkChanged():
                self._ask_application = True
            case Tick():
                pass
        self._settle()
        self._run_timers()
        return self._finish()

    def _finish(self) -> Turn:
        turn = Turn(tuple(self._records), tuple(self._sends), self._deadline(), tuple(self._faults))
        self._records, self._sends, self._faults = [], [], []
        return turn

    def _settle(self) -> None:
        while self._book is not None and any(rule(self._book) for rule in self._rules):
            pass
        self._ask_application = False

    # Inputs ----------------------------------------------------------------------------------------------------------

    def _receive(self, peer: bytes, message: Message) -> None:
        try:
            self._handle(peer, message)
        except RemoteProtocolError as error:
            self._faults.append(Fault(peer, error))

    def _handle(self, peer: bytes, message: Message) -> None:
        match message:
            case Proposed():
                self._on_proposed(peer, message)
            case Vote():
                self._on_vote(peer, message)
            case TimedOut():
                self._on_timed_out(peer, message)
            case Prepared():
                self._on_prepared(peer, message)
            case ViewEnded():
                self._on_view_ended(peer, message)
            case Decision():
                self._on_decision(peer, message)
            case Status():
                self._on_status(peer, message)
            case GetDecisions():
                self._sends.append(SendDecisions(peer, message.first, message.count))
            case GetBlock():
                self._on_get_block(peer, message)
            case BlockBytes():
                self._on_block_bytes(message)

    def _on_proposed(self, peer: bytes, message: Proposed) -> None:
        propose = codec.decode_message(message.propose.body, (Propose,))
        book = self._book_for(peer, propose.height, message)
        if book is None or not self._in_window(propose.view) or self._is_known_offer(book, propose, message):
            return
        self._verify(book, message.propose, propose)
        schedule = self._chain.schedule(self.height)
        if schedule is None:
            return
        if message.propose.signer != schedule.leader(propose.view):
            raise RemoteProtocolError("not-the-leader", f"{short_id(message.propose.signer)} in {propose.height}.{propose.view}")
        if block_digest(message.block) != propose.block:
            raise RemoteProtocolError("wrong-block", f"the bytes beside the proposal of {propose.height}.{propose.view}")
        obligation = self._justify(book, propose, message)
        self._add(book, message.propose, propose)
        if propose.view >= self.view and propose.view not in book.offers:
            book.offers[propose.view] = Offer(message, propose.block, obligation)
            self._ask_application = True

    def _is_known_offer(self, book: Book, propose: Propose, message: Proposed) -> bool:
        offer = book.offers.get(propose.view)
        return offer is not None and offer.message.propose == message.propose

    def _justify(self, book: Book, propose: Propose, message: Proposed) -> Prepare | None:
        """(S3) A later view's proposal carries the timeouts of the view before, and keeps to the certificate among them."""
        certificate = message.justification
        if (certificate is None) != (propose.view == 0):
            raise RemoteProtocolError("bad-justification", f"of {propose.height}.{propose.view}")
        if certificate is None:
            return None
        high = self._take_timeouts(book, certificate, propose.view - 1)
        if high is not None and high.block != propose.block:
            raise RemoteProtocolError("bad-justification", "another block was prepared and must be proposed again")
        return high

    def _take_timeouts(self, book: Book, certificate: TimeoutCertificate, view: int) -> Prepare | None:
        high = verify_timeout_certificate(certificate, book.height, view, book.voters, self._chain_id, self._verifier)
        if certificate.high is not None and high is not None:
            self._adopt(book, certificate.high, high)
        for signed in certificate.timeouts:
            self._add(book, signed, codec.decode_message(signed.body, (Timeout,)))
        return high

    def _on_view_ended(self, peer: bytes, message: ViewEnded) -> None:
        timeout = codec.decode_message(message.certificate.timeouts[0].body, (Timeout,))
        book = self._book_for(peer, timeout.height, message)
        if book is not None and timeout.view >= self.view:
            self._take_timeouts(book, message.certificate, timeout.view)

    def _on_vote(self, peer: bytes, message: Vote) -> None:
        vote: Prepare | Commit = codec.decode_message(message.vote.body, (Prepare, Commit))  # type: ignore[assignment]
        if isinstance(vote, Commit) and vote.height == self.height - 1:
            self._on_late_commit(message.vote, vote)
        book = self._book_for(peer, vote.height, message)
        if book is not None and self._in_window(vote.view):
            self._verify(book, message.vote, vote)
            self._add(book, message.vote, vote)

    def _on_late_commit(self, signed: Signed, vote: Commit) -> None:
        parent, voters = self._chain.parent, self._chain.voters(vote.height)
        if parent is None or voters is None or vote != parent.vote or signed.signer in parent.certificate.signatures:
            return
        if signed.signer in voters:
            self._verify_signature(signed, vote)
            parent.add_commit(signed.signer, signed.signature)

    def _on_timed_out(self, peer: bytes, message: TimedOut) -> None:
        timeout = codec.decode_message(message.timeout.body, (Timeout,))
        if timeout.height < self.height:
            self._sends.append(Send((peer,), Status(self.height, self.view)))
        book = self._book_for(peer, timeout.height, message)
        if book is None or not self._in_window(timeout.view):
            return
        self._verify(book, message.timeout, timeout)
        high = None
        if message.high is not None:
            high = self._prepare_vote(book, message.high)
            self._adopt(book, message.high, high)
        if not covers(high, timeout) or timeout.high_view > timeout.view:
            # (S5) A timeout counts only with its certificate.
            raise RemoteProtocolError("bad-timeout", f"the certificate of view {timeout.high_view} is missing")
        self._add(book, message.timeout, timeout)

    def _on_prepared(self, peer: bytes, message: Prepared) -> None:
        height = codec.decode_message(message.certificate.vote, (Prepare,)).height
        book = self._book_for(peer, height, message)
        if book is not None:
            self._adopt(book, message.certificate, self._prepare_vote(book, message.certificate))

    def _prepare_vote(self, book: Book, certificate: Certificate) -> Prepare:
        vote = verify_certificate(certificate, Prepare, book.voters, self._chain_id, self._verifier)
        if vote.height != book.height:
            raise RemoteProtocolError("wrong-height", f"prepare certificate of {vote.height} at {book.height}")
        return vote

    def _on_decision(self, peer: bytes, message: Decision) -> None:
        height = codec.decode_message(message.certificate.vote, (Commit,)).height
        if height > self.height:
            self._catch_up.claim(peer, height + 1)
            if height < self.height + DECISIONS_PER_REPLY_MAX:
                self._future.keep_decision(peer, height, message)
        if self._book is None or height != self.height or self.height - self._chain.applied > DECIDED_AHEAD_MAX:
            return
        vote = verify_certificate(message.certificate, Commit, self._book.voters, self._chain_id, self._verifier)
        if block_digest(message.block) != vote.block:
            raise RemoteProtocolError("wrong-block", f"the bytes beside the certificate of {height}")
        self._hold(vote.block, message.block)
        self._book.adopt_commit(message.certificate, vote)

    def _on_status(self, peer: bytes, message: Status) -> None:
        if message.height > self.height:
            self._catch_up.claim(peer, message.height)
        elif message.height < self.height:
            self._sends.append(Send((peer,), Status(self.height, self.view)))
        elif self._book is not None and message.view < self.view and peer in self._book.voters:
            self._repeat_to((peer,), self._book)

    def _on_get_block(self, peer: bytes, message: GetBlock) -> None:
        if message.height < self.height:
            self._sends.append(SendDecisions(peer, message.height, 1))
        elif message.block in self._stored:
            self._sends.append(SendBlock(peer, message.height, message.block))

    def _on_block_bytes(self, message: BlockBytes) -> None:
        digest = block_digest(message.block)
        if digest == self._missing_block():
            self._hold(digest, message.block)

    # Facts -----------------------------------------------------------------------------------------------------------

    def _book_for(self, peer: bytes, height: int, message: Message) -> Book | None:
        """The book this message belongs to; None if it is of another height, or nothing can be verified yet."""
        if height > self.height:
            self._catch_up.claim(peer, height)
        if height == self.height and self._book is not None:
            return self._book
        if self.height <= height <= self.height + FUTURE_HEIGHTS_MAX and self._chain.is_known_voter(peer):
            self._future.keep(peer, height, message)
        return None

    def _in_window(self, view: int) -> bool:
        return abs(view - self.view) <= VIEWS_AHEAD_MAX

    def _verify(self, book: Book, signed: Signed, statement: Statement) -> None:
        if statement.voters != book.voters.hash:
            raise RemoteProtocolError("foreign-voters", f"{statement.TAG} at height {statement.height}")
        if signed.signer not in book.voters:
            raise RemoteProtocolError("not-a-voter", f"{statement.TAG} of {short_id(signed.signer)}")
        self._verify_signature(signed, statement)

    def _verify_signature(self, signed: Signed, statement: Statement) -> None:
        if not self._verifier.verify(signed.signer, preimage(statement.TAG, self._chain_id, signed.body), signed.signature):
            raise RemoteProtocolError("bad-signature", f"{statement.TAG} of {short_id(signed.signer)}")

    def _add(self, book: Book, signed: Signed, statement: Statement) -> None:
        evidence = book.add(signed, statement)
        if evidence is not None:
            self._records.append(evidence)

    def _adopt(self, book: Book, certificate: Certificate, vote: Prepare) -> bool:
        """(S4, S5) A prepare certificate is taken whole, whatever was prepared here, and is durable before it is acted on."""
        adopted = book.adopt_high(certificate, vote)
        if adopted:
            self._records.append(StoredCertificate(book.height, certificate))
        return adopted

    def _hold(self, digest: bytes, block: bytes) -> None:
        self._blocks[digest] = block
        self._blocks.move_to_end(digest)
        if len(self._blocks) > BLOCKS_HELD_MAX:
            self._blocks.popitem(last=False)

    def _bytes_of(self, book: Book, digest: bytes) -> bytes | None:
        offered = (offer.message.block for offer in book.offers.values() if offer.digest == digest)
        return self._blocks.get(digest) or next(offered, None)

    def _missing_block(self) -> bytes | None:
        """The block that a certificate names and that is not here."""
        book = self._book
        vote = (book.commit_vote or book.high_vote) if book else None
        return vote.block if book and vote and self._bytes_of(book, vote.block) is None else None

    # Rules: each does one thing if its time has come and says whether it did ------------------------------------------

    def _decide(self, book: Book) -> bool:
        """(S5) A commit certificate decides, from whatever view it is."""
        if book.commit is None or book.commit_vote is None:
            return False
        block = self._bytes_of(book, book.commit_vote.block)
        if block is None:
            return False
        if book.commit_vote.view == self.view:
            self._pacemaker.decided(self._now)
        decided = decided_record(block, book.commit, book.commit_vote)
        self._records.append(decided)
        schedule = self._chain.schedule(self.height)
        self._chain.add_decided(decided)
        self._tell_observers(book, Decision(block, book.commit), schedule.leader(book.commit_vote.view) if schedule else None)
        self._own.forget_below(self.height)
        self._blocks.clear()
        self._stored.clear()
        self._book = None
        self._open_height()
        return True

    def _tell_observers(self, book: Book, decision: Decision, leader: bytes | None) -> None:
        observers = tuple(sorted(peer for peer in self._links if peer not in book.voters))
        if observers and self.me in book.voters:
            # The leader sends the block; the others only say that there is one, in case the leader lies.
            self._sends.append(Send(observers, decision if leader == self.me else Status(self.height, 0)))

    def _open_height(self) -> None:
        """Starts the book of the current height, once its voters are known."""
        voters = self._chain.voters(self.height)
        self._catch_up.reached(self.height, self._now)
        if voters is None or self._book is not None:
            return
        self._book = book = Book(self.height, voters)
        self._lost = {peer: at for peer, at in self._lost.items() if peer in voters}
        self.view = self._own.view(self.height)
        self._pacemaker.enter_view(self.view)
        self._ask_application, self.refusal = True, None
        for signed, statement in self._own.statements(self.height):
            book.add(signed, statement)
        self._recover_certificate(book)
        for peer, message in self._future.take(self.height):
            self._receive(peer, message)

    def _recover_certificate(self, book: Book) -> None:
        """(S3) What was prepared before a restart must stand in the timeouts after it."""
        if self._recovered is not None:
            vote = codec.decode_message(self._recovered.vote, (Prepare,))
            if vote.height == book.height:
                book.adopt_high(self._recovered, vote)

    def _collect_prepares(self, book: Book) -> bool:
        prepared = book.take_prepared()
        return prepared is not None and self._adopt(book, *prepared)

    def _follow(self, book: Book) -> bool:
        """(L) Any certificate of a later view takes us there."""
        prepared_view = book.high_vote.view if book.high_vote else NO_VIEW
        target = max(prepared_view, book.timed_out_view + 1)
        if target <= self.view:
            return False
        self._enter_view(book, target)
        return True

    def _enter_view(self, book: Book, view: int) -> None:
        self.view = view
        self._ask_application, self.refusal = True, None
        self._pacemaker.enter_view(view)
        book.forget_offers_below(view)

    def _join_timeouts(self, book: Book) -> bool:
        """(L) More voters than there can be liars gave up this view, or a later one: so do I."""
        view = book.join_view()
        if view < self.view or not self._may_sign(book) or self._own.timed_out(book.height) >= view:
            return False
        if view > self.view:
            self._enter_view(book, view)
        self._give_up(book, self.view)
        return True

    def _vouch(self, book: Book) -> bool:
        """(L) Who is in a view and holds no certificate that shows why (it restarted, or joined) gives up the view before.

        Otherwise it could be the one voter that the others need to follow it, and none of its messages would count for them.
        """
        before = self.view - 1
        if before < 0 or not self._may_sign(book) or self._own.get(Timeout.TAG, book.height, before):
            return False
        if book.timeout_certificate(before) or self._is_prepared(book):
            return False
        self._give_up(book, before)
        return True

    def _give_up(self, book: Book, view: int) -> None:
        high = book.high_vote
        high_view, high_block = (high.view, high.block) if high else (NO_VIEW, None)
        signed = self._sign(book, Timeout(book.voters.hash, book.height, view, high_view, high_block))
        self._broadcast(book, TimedOut(signed, book.high))

    def _propose(self, book: Book) -> bool:
        """(S3) The leader of a later view needs the timeouts of the view before and keeps to the certificate they carry."""
        if not self._may_judge(book) or self.leader != self.me or self.view in book.offers:
            return False
        justification = None if self.view == 0 else book.timeout_certificate(self.view - 1)
        if self.view > 0 and justification is None:
            return False
        obligation = book.high_vote if justification else None
        if obligation is not None and obligation.view >= self.view:
            return False  # this view's block was prepared before a restart: it goes on without being proposed again
        block = self._block_to_propose(book, obligation)
        if block is None:
            return False
        digest = block_digest(block)
        signed = self._own.get(Propose.TAG, book.height, self.view)
        if signed is None:
            signed = self._sign(book, Propose(book.voters.hash, book.height, self.view, digest))
        self._store(book.height, digest, block)
        message = Proposed(signed, block, justification)
        book.offers[self.view] = Offer(message, digest, obligation)
        self._broadcast(book, message)
        return True

    def _block_to_propose(self, book: Book, obligation: Prepare | None) -> bytes | None:
        signed = self._own.get(Propose.TAG, book.height, self.view)
        if signed is not None:
            # (S1) Signed before a restart: the same block, unless the timeouts now oblige to another one.
            digest = codec.decode_message(signed.body, (Propose,)).block
            return None if obligation and obligation.block != digest else self._bytes_of(book, digest)
        if obligation is not None:
            return self._bytes_of(book, obligation.block)
        if not self._ask_application:
            return None
        body = self._application.propose(book.height, self._now_ms())
        return None if body is None else self._chain.build(body, self.me, self._now_ms())

    def _prepare(self, book: Book) -> bool:
        offer = book.offers.get(self.view)
        if offer is None or not self._may_judge(book) or self._own.get(Prepare.TAG, book.height, self.view):
            return False
        if offer.obligation is None and not self._is_sound(offer):
            return False
        self._store(book.height, offer.digest, offer.message.block)
        self._vote(book, Prepare(book.voters.hash, book.height, self.view, offer.digest))
        return True

    def _is_sound(self, offer: Offer) -> bool:
        """Judges a fresh block; one that was prepared before is judged by nobody again (S3)."""
        if self._ask_application:
            proposer = offer.message.propose.signer
            self.refusal = self._chain.problem(offer.message.block, proposer, self._now_ms(), self._verifier)
            return self.refusal is None
        return False

    def _commit(self, book: Book) -> bool:
        high = book.high_vote
        if high is None or not self._is_prepared(book) or not self._may_sign(book):
            return False
        if self._own.timed_out(book.height) >= self.view or self._own.get(Commit.TAG, book.height, self.view):
            return False
        self._vote(book, Commit(book.voters.hash, book.height, self.view, high.block))
        return True

    # What the rules stand on -----------------------------------------------------------------------------------------

    def _may_sign(self, book: Book) -> bool:
        return self.me in book.voters and self.divergence is None

    def _is_prepared(self, book: Book) -> bool:
        return book.high_vote is not None and book.high_vote.view == self.view

    def _may_judge(self, book: Book) -> bool:
        """(S2, S6) Blocks are proposed and prepared on an applied parent, and not in a view that was given up."""
        return self._may_sign(book) and self._chain.is_applied and self._own.timed_out(book.height) < self.view

    def _sign(self, book: Book, statement: Statement) -> Signed:
        voted = self._own.cast(statement)
        self._records.append(voted)
        self._add(book, voted.signed, statement)
        return voted.signed

    def _vote(self, book: Book, vote: Prepare | Commit) -> None:
        self._broadcast(book, Vote(self._sign(book, vote)))

    def _store(self, height: int, digest: bytes, block: bytes) -> None:
        """(S4) Block bytes are durable before anything about them is signed: the record goes in the same turn."""
        self._hold(digest, block)
        if digest not in self._stored:
            self._stored.add(digest)
            self._records.append(StoredBlock(height, digest, block))

    def _broadcast(self, book: Book, message: Message) -> None:
        others = tuple(key for key in book.voters.keys if key != self.me)
        if others:
            self._sends.append(Send(others, message))

    def _now_ms(self) -> int:
        return int(self._now * 1_000)

    # Time ------------------------------------------------------------------------------------------------------------

    def _is_working(self) -> bool:
        """(L) A timer runs only while there is known work that this voter could judge."""
        book = self._book
        if book is None or not self._may_sign(book) or not self._chain.is_applied:
            return False
        return self._application.has_work() or book.is_active() or self._own.has_voted(book.height)

    def _run_timers(self) -> None:
        book, now = self._book, self._now
        self._pacemaker.run(self._is_working(), now)
        if book is not None and _is_due(self._view_deadline(), now):
            self._give_up(book, self.view)
            self._settle()
        elif book is not None and _is_due(self._pacemaker.repeat_deadline(), now):
            self._pacemaker.repeated(now)
            self._repeat_to(tuple(key for key in book.voters.keys if key != self.me), book)
            self._broadcast(book, Status(self.height, self.view))
        self._ask_for_block()
        self._ask_for_decisions()

    def _view_deadline(self) -> float | None:
        """(L) A leader that is known to be gone is not waited for as long as a silent one."""
        if self._own.timed_out(self.height) >= self.view:
            return None
        return self._pacemaker.view_deadline(self._lost.get(self.leader or b""))

    def _ask_for_decisions(self) -> None:
        if self.height - self._chain.applied <= DECIDED_AHEAD_MAX and _is_due(self._catch_up.deadline(self._now), self._now):
            peer, request = self._catch_up.ask(self._now)
            self._sends.append(Send((peer,), request))

    def _ask_for_block(self) -> None:
        self._fetch.want(self._missing_block(), self._now)
        certificate = (self._book.commit or self._book.high) if self._book else None
        if certificate is not None and _is_due(self._fetch.deadline(), self._now):
            holders = tuple(key for key in certificate.signatures if key != self.me)
            peer, request = self._fetch.ask(self.height, holders, self._now)
            self._sends.append(Send((peer,), request))

    def _deadline(self) -> float | None:
        self._pacemaker.run(self._is_working(), self._now)
        self._fetch.want(self._missing_block(), self._now)
        catch_up = self._catch_up.deadline(self._now) if self.height - self._chain.applied <= DECIDED_AHEAD_MAX else None
        times = (self._view_deadline(), self._pacemaker.repeat_deadline(), self._fetch.deadline(), catch_up)
        return min((time for time in times if time is not None), default=None)

    def _greet(self, peer: bytes) -> None:
        self._sends.append(Send((peer,), Status(self.height, self.view)))
        if self._book is not None and peer in self._book.voters:
            self._repeat_to((peer,), self._book)

    def _repeat_to(self, peers: tuple[bytes, ...], book: Book) -> None:
        """What this voter has signed last, the best certificate, and the proposal for those that seem to miss it."""
        offer = book.offers.get(self.view)
        unheard = tuple(key for key in book.silent_in(self.view) if key in peers)
        if offer is not None and unheard:
            self._sends.append(Send(unheard, offer.message))
        ended = book.timeout_certificate(self.view - 1)
        if book.high is not None:
            self._sends.append(Send(peers, Prepared(book.high)))
        if ended is not None and unheard and not self._is_prepared(book):
            self._sends.append(Send(unheard, ViewEnded(ended)))
        given_up = (self._own.get(Timeout.TAG, book.height, view) for view in (self.view - 1, self.view))
        self._sends.extend(Send(peers, TimedOut(signed, book.high)) for signed in given_up if signed is not None)
        votes = (self._own.get(tag, book.height, self.view) for tag in (Prepare.TAG, Commit.TAG))
        self._sends.extend(Send(peers, Vote(signed)) for signed in votes if signed is not None)


def _is_due(deadline: float | None, now: float) -> bool:
    return deadline is not None and deadline <= now
