"""Bugs in how one height is decided: quorums, certificates, views, votes."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

from consensus import voter_set
from consensus.block import Block, block_digest, decode_block, encode_block
from consensus.effects import DecidedBlock, OwnStatement
from consensus.evidence import AGREEMENT_STATEMENT_TYPES
from consensus.pbft import block_sync, chain, message_handlers, pacemaker, replica
from consensus.pbft.chain import Chain, LeaderSchedule, make_leader_schedule, update_failed_leaders
from consensus.pbft.message_handlers import ReplicaMessageHandlers
from consensus.pbft.own_votes import OwnVotes
from consensus.pbft.replica import Replica
from consensus.pbft.replica_state import ReplicaState
from consensus.pbft.vote_set import HeightVoteSet
from consensus.voter_set import VoterSet, faults_tolerated, quorum, verify_certificate, verify_timeout_certificate
from protocol import codec
from protocol.errors import RemoteProtocolError
from protocol.identity import CachingVerifier, open_signed, sign_message, signing_preimage
from protocol.messages import Certificate, Commit, Decision, Prepare, Timeout
from tests.sim.mutants.planting import Mutant, Planter
from tests.sim.mutants.scenarios import Scenario, Splits

LOST = Scenario(seconds=6.0, lost=0.6, blocks=10, jobs=False)
DEAF = Scenario(seconds=8.0, lost=1.0, blocks=6, jobs=False)  # nothing is decided, and half of what ends views is lost, too
REAL_CERTIFICATE, REAL_TIMEOUTS = verify_certificate, verify_timeout_certificate
REAL_SCHEDULE, REAL_FAILED = make_leader_schedule, update_failed_leaders


def with_liar(name: str, **settings: Any) -> Scenario:
    return Scenario(liars=(name,), **settings)


def lossy(*liars: str, **settings: Any) -> Scenario:
    return dataclasses.replace(LOST, liars=liars, **settings)


# Quorums and certificates --------------------------------------------------------------------------------------------


def _small_quorum(planter: Planter) -> None:
    planter.replace(VoterSet, "quorum", property(lambda self: quorum(len(self)) - 1))


def _two_f_plus_one(planter: Planter) -> None:
    planter.replace(VoterSet, "quorum", property(lambda self: 2 * faults_tolerated(len(self)) + 1))


def _votes_counted_twice(planter: Planter) -> None:
    real, counts = HeightVoteSet.add_statement, dict[Any, int]()

    def add(self: HeightVoteSet, signed: Any, statement: Any) -> Any:
        said = self._statements.get(signed.signer, {}).get((statement.TAG, statement.view))
        evidence = real(self, signed, statement)
        tally = self._tallies.get((statement.TAG, statement.view, signed.body))
        if said is not None and tally and not isinstance(statement, Timeout) and self.decided_view is None:
            again = counts[self.height, id(self), signed.body] = counts.get((self.height, id(self), signed.body), 0) + 1
            if len(tally) + again >= self.voters.quorum:
                certificate = Certificate(signed.body, {key: tally[key].signature for key in sorted(tally)})
                if isinstance(statement, Commit):
                    self.adopt_commit_certificate(certificate, statement)
                elif isinstance(statement, Prepare):
                    self._prepared.append((certificate, statement))
        return evidence

    planter.replace(HeightVoteSet, "add_statement", add)


def _timeouts_counted_twice(planter: Planter) -> None:
    def verify(certificate: Any, height: int, view: int, of: VoterSet, chain_id: bytes, verifier: Any) -> Any:
        if len(certificate.timeouts) < of.quorum:
            raise RemoteProtocolError("no-quorum", "")
        distinct = {signed.signer: signed for signed in certificate.timeouts}
        if len(distinct) == len(certificate.timeouts):
            return REAL_TIMEOUTS(certificate, height, view, of, chain_id, verifier)
        return None

    planter.everywhere(REAL_TIMEOUTS, verify)


def _strangers_counted(planter: Planter) -> None:
    def verify(certificate: Any, kind: Any, of: VoterSet, chain_id: bytes, verifier: Any) -> Any:
        vote = codec.decode_message(certificate.vote, (kind,))
        data = signing_preimage(kind.TAG, chain_id, certificate.vote)
        if vote.voters != of.hash or len(certificate.signatures) < of.quorum:
            raise RemoteProtocolError("no-quorum", "")
        if not all(verifier.verify(key, data, signature) for key, signature in certificate.signatures.items()):
            raise RemoteProtocolError("bad-signature", "")
        return vote

    planter.everywhere(REAL_CERTIFICATE, verify)


def _too_few_counted(planter: Planter) -> None:
    def verify(certificate: Any, kind: Any, of: VoterSet, chain_id: bytes, verifier: Any) -> Any:
        class Lenient(VoterSet):
            quorum = 1  # type: ignore[assignment]

        return REAL_CERTIFICATE(certificate, kind, Lenient(of.keys), chain_id, verifier)

    planter.everywhere(REAL_CERTIFICATE, verify)


def _quorum_of_the_connected(planter: Planter) -> None:
    real = Replica._open_height

    def open_height(self: Replica) -> None:
        real(self)
        if self._book is not None and self._lost:
            gone = len(self._lost)

            class Fewer(VoterSet):
                quorum = property(lambda self: quorum(max(1, len(self.keys) - gone)))  # type: ignore[assignment]

            self._book.voters = Fewer(self._book.voters.keys)

    planter.replace(Replica, "_open_height", open_height)


# What is signed ------------------------------------------------------------------------------------------------------


def _unsigned(position: int) -> Any:
    """Signatures leave out one field of a statement (0: its kind, 1: the voters, 2: the height, 3: the view)."""

    def plant(planter: Planter) -> None:
        tags = {kind.TAG for kind in AGREEMENT_STATEMENT_TYPES}

        def lenient(domain: str, chain_id: bytes, body: bytes) -> bytes:
            fields = codec.unpack(body, len(body)) if domain in tags else None
            if fields is None:
                return signing_preimage(domain, chain_id, body)
            fields[position] = 0
            return signing_preimage("" if position == 0 else domain, chain_id, codec.encode(fields))

        planter.everywhere(signing_preimage, lenient)

    return plant


def _unsigned_chain(planter: Planter) -> None:
    planter.everywhere(signing_preimage, lambda domain, chain_id, body: signing_preimage(domain, bytes(32), body))


def _any_chain(planter: Planter) -> None:
    real = CachingVerifier.verify

    def verify(self: CachingVerifier, public: bytes, data: bytes, signature: bytes) -> bool:
        at = data.index(b"\x00") + 1
        elsewhere = data[:at] + bytes(31) + b"\x01" + data[at + 32 :]
        return real(self, public, data, signature) or real(self, public, elsewhere, signature)

    planter.replace(CachingVerifier, "verify", verify)


def _unverified(planter: Planter) -> None:
    planter.replace(CachingVerifier, "verify", lambda *_: True)
    planter.everywhere(open_signed, lambda signed, chain_id, verifier, kinds: codec.decode_message(signed.body, kinds))


def _far_timeouts_unverified(planter: Planter) -> None:
    real = ReplicaMessageHandlers._verify

    def verify(self: ReplicaMessageHandlers, book: HeightVoteSet, signed: Any, statement: Any) -> None:
        if not isinstance(statement, Timeout) or self._in_window(statement.view):
            real(self, book, signed, statement)

    planter.replace(ReplicaMessageHandlers, "_verify", verify)


def _cache_without_bytes(planter: Planter) -> None:
    """Once a signature was good, it is good under anything."""

    def verify(self: CachingVerifier, public: bytes, data: bytes, signature: bytes) -> bool:
        if public + signature not in self._good and not self._verifier.verify(public, data, signature):
            return False
        self._good[public + signature] = None
        return True

    planter.replace(CachingVerifier, "verify", verify)


# Views ---------------------------------------------------------------------------------------------------------------


def _no_carry_over(planter: Planter) -> None:
    propose, justify = Replica._block_to_propose, ReplicaMessageHandlers._justify

    def careless(self: ReplicaMessageHandlers, book: HeightVoteSet, proposed: Any, message: Any) -> None:
        try:
            justify(self, book, proposed, message)
        except RemoteProtocolError as error:
            if "prepared" not in str(error):
                raise

    planter.replace(ReplicaMessageHandlers, "_justify", careless)
    planter.replace(Replica, "_block_to_propose", lambda self, book, obligation: propose(self, book, None))


def _first_certificate(planter: Planter) -> None:
    first: dict[Any, Any] = {}
    adopt, certify, propose = HeightVoteSet.adopt_prepare_certificate, HeightVoteSet.timeout_certificate, Replica._propose

    def of(book: HeightVoteSet) -> Any:
        return first.get((id(book), book.height))

    def remember(self: HeightVoteSet, certificate: Any, vote: Any) -> bool:
        first.setdefault((id(self), self.height), (certificate, vote))
        return adopt(self, certificate, vote)

    def with_first(self: HeightVoteSet, view: int) -> Any:
        made = certify(self, view)
        return dataclasses.replace(made, high=of(self)[0]) if made is not None and of(self) else made

    def propose_first(self: Replica, book: HeightVoteSet) -> bool:
        kept = (book.highest_prepare_certificate, book.high_vote)
        if self.view and of(book):
            book.highest_prepare_certificate, book.high_vote = of(book)
        try:
            return propose(self, book)
        finally:
            book.highest_prepare_certificate, book.high_vote = kept

    planter.replace(HeightVoteSet, "adopt_prepare_certificate", remember)
    planter.replace(HeightVoteSet, "timeout_certificate", with_first)
    planter.replace(Replica, "_propose", propose_first)
    planter.everywhere(voter_set.covers_timeout, lambda *_: True)


def _prepares_after_timeout(planter: Planter) -> None:
    planter.replace(OwnVotes, "sign_statement", _cast_anything)
    planter.replace(ReplicaState, "_may_judge", lambda self, book: self._may_sign(book) and self._chain.is_applied)


def _proposes_after_timeout(planter: Planter) -> None:
    real = Replica._propose

    def propose_late(self: Replica, book: HeightVoteSet) -> bool:
        if self._own.highest_timed_out_view(book.height) < self.view:
            return False
        with mock.patch.object(self, "_may_judge", lambda of: self._may_sign(of) and self._chain.is_applied):
            return real(self, book)

    planter.replace(Replica, "_propose", propose_late)


def _cast_anything(self: OwnVotes, message: Any) -> OwnStatement:
    slot = (message.TAG, message.height, message.view)
    signed = self._signed[slot] = sign_message(self._signer, self._chain_id, message)
    return OwnStatement(slot, signed)


def _commits_after_timeout(planter: Planter) -> None:
    def commit(self: Replica, book: HeightVoteSet) -> bool:
        high = book.high_vote
        if high is None or not self._is_prepared(book) or not self._may_sign(book):
            return False
        if self._own.get_vote(Commit.TAG, book.height, self.view):
            return False
        self._vote(book, Commit(book.voters.hash, book.height, self.view, high.block))
        return True

    planter.replace(OwnVotes, "sign_statement", _cast_anything)
    planter.replace(Replica, "_commit", commit)


def _commits_unprepared(planter: Planter) -> None:
    def commit(self: Replica, book: HeightVoteSet) -> bool:
        prepared = self._own.get_vote(Prepare.TAG, book.height, self.view)
        if prepared is None or not self._may_sign(book) or self._own.get_vote(Commit.TAG, book.height, self.view):
            return False
        block = codec.decode_message(prepared.body, (Prepare,)).block
        self._vote(book, Commit(book.voters.hash, book.height, self.view, block))
        return True

    planter.replace(Replica, "_commit", commit)


def _bare_timeouts(planter: Planter) -> None:
    planter.replace(message_handlers, "covers_timeout", lambda *_: True)


def _timeouts_of_any_view(planter: Planter) -> None:
    def verify(certificate: Any, height: int, view: int, of: VoterSet, chain_id: bytes, verifier: Any) -> Any:
        timeout = codec.decode_message(certificate.timeouts[0].body, (Timeout,))
        return REAL_TIMEOUTS(certificate, timeout.height, timeout.view, of, chain_id, verifier)

    planter.everywhere(REAL_TIMEOUTS, verify)


def _certificates_of_any_height(planter: Planter) -> None:
    def take(self: ReplicaMessageHandlers, book: HeightVoteSet, certificate: Certificate) -> Any:
        vote = verify_certificate(certificate, Prepare, book.voters, self._chain_id, self._verifier)
        if self._adopt(book, certificate, vote):
            self._add_certified(book, certificate, vote)
        return vote

    planter.replace(ReplicaMessageHandlers, "_take_prepared", take)


def _leader_by_certificate(planter: Planter) -> None:
    real = Chain.leader_schedule

    def schedule(self: Chain, height: int) -> Any:
        made, parent = real(self, height), self._past.get(height - 1)
        if made is None or parent is None:
            return made
        shift = parent.vote.view % len(made.voters)
        return LeaderSchedule(height, made.voters[shift:] + made.voters[:shift], made.eligible)

    planter.replace(Chain, "leader_schedule", schedule)


def _unseen_lose_turns(planter: Planter) -> None:
    def unseen(height: int, voters: VoterSet, parent: Block | None) -> LeaderSchedule:
        made = REAL_SCHEDULE(height, voters, parent)
        shown = parent.parent_certificate.signatures if parent and parent.parent_certificate else voters.keys
        return LeaderSchedule(height, voters.keys, tuple(key for key in made.eligible if key in shown) or made.eligible)

    planter.everywhere(REAL_SCHEDULE, unseen)


def _failures_never_end(planter: Planter) -> None:
    def failed(height: int, voters: VoterSet, parent: Block, leaders: LeaderSchedule, view: int, signers: Any) -> Any:
        return REAL_FAILED(height, voters, parent, leaders, view, ())

    planter.everywhere(REAL_FAILED, failed)


def _no_repeats(planter: Planter) -> None:
    planter.replace(ReplicaMessageHandlers, "_repeat_to", lambda *_: None)


def _no_join(planter: Planter) -> None:
    planter.replace(Replica, "_join_timeouts", lambda *_: False)


def _no_follow(planter: Planter) -> None:
    planter.replace(Replica, "_follow", lambda *_: False)


def _old_commits_ignored(planter: Planter) -> None:
    real = Replica._decide

    def decide(self: Replica, book: HeightVoteSet) -> bool:
        return book.commit_vote is not None and book.commit_vote.view == self.view and real(self, book)

    planter.replace(Replica, "_decide", decide)


def _timer_without_work(planter: Planter) -> None:
    planter.replace(Replica, "awaits_decision", property(lambda self: self._book is not None and self._may_sign(self._book)))


def _others_words_are_work(planter: Planter) -> None:
    def is_working(self: Replica) -> bool:
        book = self._book
        if book is None or not self._may_sign(book) or not self._chain.is_applied:
            return False
        return bool(book.proposals) or book.is_active() or self._own.has_voted(book.height) or self._application.has_work()

    planter.replace(Replica, "awaits_decision", property(is_working))


def _refused_is_repeated(planter: Planter) -> None:
    real = Replica._may_be_missed

    def may_be_missed(self: Replica) -> bool:
        book = self._book
        return real(self) or (book is not None and self._takes_part(book) and bool(book.proposals))

    planter.replace(Replica, "_may_be_missed", may_be_missed)


# Blocks and decisions ------------------------------------------------------------------------------------------------


def _unasserted(data: bytes, certificate: Certificate, vote: Commit) -> DecidedBlock:
    return DecidedBlock(vote.height, vote.block, data, certificate)


def _short_body_unchecked(planter: Planter) -> None:
    def assemble(header: Any, body: bytes) -> bytes:
        made = decode_block(encode_block(_block_of(header, body)))
        return encode_block(made)

    planter.replace(replica, "assemble_block", assemble)
    planter.replace(replica, "make_decided_block", _unasserted)


def _block_of(header: Any, body: bytes) -> Any:
    fields = {field.name: getattr(header, field.name) for field in dataclasses.fields(header)}
    return Block(**{**fields, "body": body})


def _decision_unchecked(check_certificate: bool) -> Any:
    def plant(planter: Planter) -> None:
        real = ReplicaMessageHandlers._on_decision

        def on_decision(self: ReplicaMessageHandlers, peer: bytes, message: Decision) -> None:
            vote = codec.decode_message(message.certificate.vote, (Commit,))
            if self._book is None or vote.height != self.height:
                real(self, peer, message)
                return
            if check_certificate:
                verify_certificate(message.certificate, Commit, self._book.voters, self._chain_id, self._verifier)
            elif block_digest(message.block) != vote.block:
                raise RemoteProtocolError("wrong-block", "")
            self._hold(vote.block, message.block)
            self._book.adopt_commit_certificate(message.certificate, vote)

        planter.replace(ReplicaMessageHandlers, "_on_decision", on_decision)
        planter.replace(replica, "make_decided_block", _unasserted)

    return plant


def _parent_certificate_unchecked(planter: Planter) -> None:
    planter.replace(Chain, "_check_parent_certificate", lambda *_: None)


def _time_unchecked(planter: Planter) -> None:
    planter.replace(chain, "CLOCK_AHEAD_SECONDS", 1e9)


def _vouched_for_by_one(planter: Planter) -> None:
    def vouched_for(self: ReplicaState) -> bool:
        offer = self._book.proposals.get(self.view) if self._book else None
        return self._book is not None and offer is not None and bool(self._book.preparers(self.view, offer.digest))

    planter.replace(ReplicaState, "_is_vouched_for", vouched_for)


def _no_answers(planter: Planter) -> None:
    planter.replace(ReplicaMessageHandlers, "_answer", lambda *_: None)
    planter.replace(Replica, "_tell_observers", lambda *_: None)


def _unbounded_future(planter: Planter) -> None:
    planter.replace(block_sync, "FUTURE_MESSAGES_MAX", 10**9)
    planter.replace(block_sync, "FUTURE_BYTES_MAX", 10**12)
    planter.replace(message_handlers, "FUTURE_HEIGHTS_MAX", 10**9)


def _impatient(planter: Planter) -> None:
    planter.replace(pacemaker, "VIEW_SECONDS_MIN", 0.1)
    planter.replace(pacemaker, "TAIL_FACTOR", 0.0)


def _strangers_kept(planter: Planter) -> None:
    planter.replace(Chain, "is_known_voter", lambda self, key: True)


AGREEMENT = (
    Mutant("small-quorum", "a quorum is one voter too small", ("certificate",), _small_quorum),
    Mutant("two-f-plus-one", "q = 2f+1 where n is not 3f+1", ("certificate",), _two_f_plus_one, Scenario(n=6)),
    Mutant(
        "votes-counted-twice",
        "a vote that comes twice counts twice",
        ("certificate",),
        _votes_counted_twice,
        with_liar("signs-again"),
    ),
    Mutant(
        "timeouts-counted-twice",
        "one voter's timeout counts as often as the certificate has it",
        ("justification", "lock"),
        _timeouts_counted_twice,
        lossy("doubled-timeouts", seconds=10.0),
    ),
    Mutant(
        "strangers-counted",
        "signatures of non-members count in certificates",
        ("certificate",),
        _strangers_counted,
        with_liar("false-certificates"),
    ),
    Mutant(
        "too-few-counted",
        "a certificate with one signature is taken",
        ("certificate",),
        _too_few_counted,
        with_liar("false-certificates"),
    ),
    Mutant(
        "quorum-of-the-connected",
        "a lost link lowers n and q",
        ("certificate",),
        _quorum_of_the_connected,
        Scenario(crashes=4, breaks=4, seconds=3.0),
    ),
    Mutant("unsigned-phase", "the kind of a vote is not signed", ("certificate",), _unsigned(0)),
    Mutant("unsigned-epoch", "the voter set is not signed", ("certificate",), _unsigned(1)),
    Mutant("unsigned-height", "the height is not signed", ("certificate",), _unsigned(2)),
    Mutant("unsigned-view", "the view is not signed", ("certificate",), _unsigned(3), LOST),
    Mutant("unsigned-chain", "the chain id is not signed", ("certificate", "validity"), _unsigned_chain),
    Mutant("any-chain", "signatures for another chain are good", ("certificate",), _any_chain, with_liar("cross-chain")),
    Mutant(
        "unverified",
        "the agreement verifies no signature",
        ("certificate", "agreement", "honest accused"),
        _unverified,
        with_liar("altered-votes"),
    ),
    Mutant(
        "far-timeouts-unverified",
        "the signature of a Timeout far above the views that are kept is not checked",
        ("views",),
        _far_timeouts_unverified,
        with_liar("far-timeouts", jobs=False),
    ),
    Mutant(
        "cache-without-bytes",
        "a signature that was good once is good under anything",
        ("certificate", "honest accused", "honest dropped", "validity", "crash"),
        _cache_without_bytes,
        with_liar("forged-names"),
    ),
    Mutant("no-carry-over", "a later view may decide any block", ("justification", "lock", "agreement"), _no_carry_over, LOST),
    Mutant(
        "first-certificate",
        "the first prepare certificate obliges, not the highest",
        ("justification", "lock", "agreement"),
        _first_certificate,
        LOST,
    ),
    Mutant("proposes-after-timeout", "a leader proposes in a view that it gave up", ("timed out",), _proposes_after_timeout),
    Mutant("prepares-after-timeout", "a voter prepares in a view that it gave up", ("timed out",), _prepares_after_timeout, LOST),
    Mutant("commits-after-timeout", "a voter commits in a view that it gave up", ("timed out",), _commits_after_timeout, LOST),
    Mutant("commits-unprepared", "a voter commits what it prepared, without a certificate", ("durable",), _commits_unprepared),
    Mutant(
        "bare-timeouts",
        "a timeout counts without the certificate it names",
        ("honest dropped", "justification"),
        _bare_timeouts,
        lossy("lying-high"),
    ),
    Mutant(
        "timeouts-of-any-view",
        "timeouts of another view justify a proposal",
        ("justification", "lock", "certificate"),
        _timeouts_of_any_view,
        lossy("stale-timeouts"),
    ),
    Mutant(
        "certificates-of-any-height",
        "a prepare certificate of another height is taken",
        ("certificate",),
        _certificates_of_any_height,
        lossy("lying-high"),
    ),
    Mutant(
        "leader-by-certificate",
        "the leaders follow from the view of one's own commit certificate",
        ("honest dropped", "progress"),
        _leader_by_certificate,
        LOST,
    ),
    Mutant(
        "unseen-lose-turns",
        "whose commit a leader does not show does not lead next",
        ("turns",),
        _unseen_lose_turns,
        with_liar("turn-thief"),
    ),
    Mutant(
        "failures-never-end",
        "who failed never leads again, although it is there",
        ("turns",),
        _failures_never_end,
        Scenario(crashes=3, blocks=24, jobs=False),
    ),
    Mutant("no-repeats", "nothing is said again", ("progress",), _no_repeats, DEAF),
    Mutant(
        "no-join",
        "f+1 timeouts of a later view move nobody",
        ("join",),
        _no_join,
        dataclasses.replace(LOST, crashes=4),
    ),
    Mutant("no-follow", "certificates of a later view move nobody", ("progress",), _no_follow, DEAF),
    Mutant(
        "old-commits-ignored",
        "a commit certificate of an earlier view does not decide",
        ("progress",),
        _old_commits_ignored,
        LOST,
    ),
    Mutant(
        "timer-without-work",
        "views are given up although there is nothing to do",
        ("idle",),
        _timer_without_work,
        Scenario(jobs=False),
    ),
    Mutant(
        "others-words-are-work",
        "whatever others say is waited for, although nobody decides it",
        ("idle",),
        _others_words_are_work,
        with_liar("shown-to-one", jobs=False),
    ),
    Mutant(
        "refused-is-repeated",
        "a proposal that was refused keeps a voter talking although nobody decides it",
        ("idle",),
        _refused_is_repeated,
        with_liar("shown-to-one", jobs=False),
    ),
    Mutant(
        "short-body-unchecked",
        "the digest of a body put together from parts is not checked",
        ("validity",),
        _short_body_unchecked,
        with_liar("wrong-bytes"),
    ),
    Mutant(
        "decision-bytes-unchecked",
        "the block beside a commit certificate is not checked",
        ("validity",),
        _decision_unchecked(True),
        lossy("wrong-bytes"),
    ),
    Mutant(
        "decision-certificate-unchecked",
        "a decision is taken on anybody's word",
        ("certificate", "agreement", "validity"),
        _decision_unchecked(False),
        with_liar("false-certificates"),
    ),
    Mutant(
        "parent-certificate-unchecked",
        "the parent's certificate in a block is not checked",
        ("certificate",),
        _parent_certificate_unchecked,
        with_liar("bad-blocks", blocks=14),
    ),
    Mutant("time-unchecked", "a block may be dated hours ahead", ("validity",), _time_unchecked, with_liar("future-clock")),
    Mutant(
        "vouched-for-by-one",
        "a block's time is right if one other voter, perhaps its leader, says so",
        ("validity",),
        _vouched_for_by_one,
        with_liar("future-clock"),
    ),
    Mutant(
        "no-answers",
        "who asks for decisions or blocks gets no answer",
        ("progress",),
        _no_answers,
        dataclasses.replace(LOST, crashes=3),
    ),
    Mutant(
        "impatient",
        "views are a tenth of a second at first, and how long they take is not measured from decisions",
        ("healed",),
        _impatient,
        Splits(),
    ),
    Mutant(
        "unbounded-future",
        "messages for later heights are kept without bound",
        ("memory",),
        _unbounded_future,
        with_liar("deluge", blocks=18, jobs=False),
    ),
    Mutant(
        "strangers-kept",
        "messages for later heights are kept of everybody",
        ("memory",),
        _strangers_kept,
        Scenario(stranger="flood", blocks=50, jobs=False),
    ),
)
