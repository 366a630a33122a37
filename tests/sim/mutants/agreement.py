"""Bugs in the decision of one height: quorums, certificates, views, votes."""

from __future__ import annotations

import dataclasses
from functools import partial
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
from protocol.messages import Certificate, Commit, Decision, Prepare, Timeout, Vote
from tests.sim.mutants.planting import Mutant, Plant, Planter, everywhere, replaced, together, wrapped
from tests.sim.mutants.scenarios import Scenario, Splits

LOST = Scenario(seconds=6.0, lost=0.6, blocks=10, jobs=False)
DEAF = Scenario(seconds=8.0, lost=1.0, blocks=6, jobs=False)  # nothing is decided, and half of the timeouts are lost, too


def with_liar(name: str, **settings: Any) -> Scenario:
    return Scenario(liars=(name,), **settings)


def lossy(*liars: str, **settings: Any) -> Scenario:
    return dataclasses.replace(LOST, liars=liars, **settings)


# Quorums and certificates --------------------------------------------------------------------------------------------


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


@partial(everywhere, verify_timeout_certificate)
def _timeouts_counted_twice(certificate: Any, height: int, view: int, of: VoterSet, chain_id: bytes, verifier: Any) -> Any:
    if len(certificate.timeouts) < of.quorum:
        raise RemoteProtocolError("no-quorum", "")
    distinct = {signed.signer: signed for signed in certificate.timeouts}
    if len(distinct) == len(certificate.timeouts):
        return verify_timeout_certificate(certificate, height, view, of, chain_id, verifier)
    return None


@partial(everywhere, verify_certificate)
def _strangers_counted(certificate: Any, kind: Any, of: VoterSet, chain_id: bytes, verifier: Any) -> Any:
    vote = codec.decode_message(certificate.vote, (kind,))
    data = signing_preimage(kind.TAG, chain_id, certificate.vote)
    if vote.voters != of.hash or len(certificate.signatures) < of.quorum:
        raise RemoteProtocolError("no-quorum", "")
    if not all(verifier.verify(key, data, signature) for key, signature in certificate.signatures.items()):
        raise RemoteProtocolError("bad-signature", "")
    return vote


@partial(everywhere, verify_certificate)
def _too_few_counted(certificate: Any, kind: Any, of: VoterSet, chain_id: bytes, verifier: Any) -> Any:
    class Lenient(VoterSet):
        quorum = 1  # type: ignore[assignment]

    return verify_certificate(certificate, kind, Lenient(of.keys), chain_id, verifier)


@partial(wrapped, Replica, "_open_height")
def _quorum_of_the_connected(real: Any, self: Replica) -> None:
    real(self)
    if self._book is not None and self._lost:
        gone = len(self._lost)

        class Fewer(VoterSet):
            quorum = property(lambda self: quorum(max(1, len(self.keys) - gone)))  # type: ignore[assignment]

        self._book.voters = Fewer(self._book.voters.keys)


# Signatures ----------------------------------------------------------------------------------------------------------


def _unsigned(position: int) -> Plant:
    """Plant: signatures omit one field of a statement (0: its kind, 1: the voters, 2: the height, 3: the view)."""
    tags = {kind.TAG for kind in AGREEMENT_STATEMENT_TYPES}

    def lenient(domain: str, chain_id: bytes, body: bytes) -> bytes:
        fields = codec.unpack(body, len(body)) if domain in tags else None
        if fields is None:
            return signing_preimage(domain, chain_id, body)
        fields[position] = 0
        return signing_preimage("" if position == 0 else domain, chain_id, codec.encode(fields))

    return everywhere(signing_preimage, lenient)


@partial(wrapped, CachingVerifier, "verify")
def _any_chain(real: Any, self: CachingVerifier, public: bytes, data: bytes, signature: bytes) -> bool:
    at = data.index(b"\x00") + 1
    elsewhere = data[:at] + bytes(31) + b"\x01" + data[at + 32 :]
    return real(self, public, data, signature) or real(self, public, elsewhere, signature)


@partial(wrapped, ReplicaMessageHandlers, "_verify")
def _far_timeouts_unverified(real: Any, self: ReplicaMessageHandlers, book: HeightVoteSet, signed: Any, statement: Any) -> None:
    if not isinstance(statement, Timeout) or self._in_window(statement.view):
        real(self, book, signed, statement)


@partial(replaced, CachingVerifier, "verify")
def _cache_without_bytes(self: CachingVerifier, public: bytes, data: bytes, signature: bytes) -> bool:
    """Plant: a signature that was valid once is valid under any statement."""
    if public + signature not in self._good and not self._verifier.verify(public, data, signature):
        return False
    self._good.add(public + signature)
    return True


# Views ---------------------------------------------------------------------------------------------------------------


@partial(wrapped, ReplicaMessageHandlers, "_justify")
def _takes_any_block(real: Any, self: ReplicaMessageHandlers, book: HeightVoteSet, proposed: Any, message: Any) -> None:
    try:
        real(self, book, proposed, message)
    except RemoteProtocolError as error:
        if "prepared" not in str(error):
            raise


PROPOSES_ANY_BLOCK = wrapped(Replica, "_block_to_propose", lambda real, self, book, obligation: real(self, book, None))


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


@partial(wrapped, Replica, "_propose")
def _proposes_after_timeout(real: Any, self: Replica, book: HeightVoteSet) -> bool:
    if self._own.highest_timed_out_view(book.height) < self.view:
        return False
    with mock.patch.object(self, "_may_judge", lambda of: self._may_sign(of) and self._chain.is_applied):
        return real(self, book)


@partial(replaced, OwnVotes, "sign_statement")
def _casts_anything(self: OwnVotes, message: Any) -> OwnStatement:
    slot = (message.TAG, message.height, message.view)
    signed = self._signed[slot] = sign_message(self._signer, self._chain_id, message)
    return OwnStatement(slot, signed)


@partial(replaced, Replica, "_commit")
def _commits_after_timeout(self: Replica, book: HeightVoteSet) -> bool:
    high = book.high_vote
    if high is None or not self._is_prepared(book) or not self._may_sign(book):
        return False
    if self._own.get_vote(Commit.TAG, book.height, self.view):
        return False
    self._broadcast(book, Vote(self._sign(book, Commit(book.voters.hash, book.height, self.view, high.block))))
    return True


@partial(replaced, Replica, "_commit")
def _commits_unprepared(self: Replica, book: HeightVoteSet) -> bool:
    prepared = self._own.get_vote(Prepare.TAG, book.height, self.view)
    if prepared is None or not self._may_sign(book) or self._own.get_vote(Commit.TAG, book.height, self.view):
        return False
    block = codec.decode_message(prepared.body, (Prepare,)).block
    self._broadcast(book, Vote(self._sign(book, Commit(book.voters.hash, book.height, self.view, block))))
    return True


@partial(everywhere, verify_timeout_certificate)
def _timeouts_of_any_view(certificate: Any, height: int, view: int, of: VoterSet, chain_id: bytes, verifier: Any) -> Any:
    timeout = codec.decode_message(certificate.timeouts[0].body, (Timeout,))
    return verify_timeout_certificate(certificate, timeout.height, timeout.view, of, chain_id, verifier)


@partial(replaced, ReplicaMessageHandlers, "_take_prepared")
def _certificates_of_any_height(self: ReplicaMessageHandlers, book: HeightVoteSet, certificate: Certificate) -> Any:
    vote = verify_certificate(certificate, Prepare, book.voters, self._chain_id, self._verifier)
    if self._adopt(book, certificate, vote):
        self._add_certified(book, certificate, vote)
    return vote


@partial(wrapped, Chain, "leader_schedule")
def _leader_by_certificate(real: Any, self: Chain, height: int) -> Any:
    made, parent = real(self, height), self._past.get(height - 1)
    if made is None or parent is None:
        return made
    shift = parent.vote.view % len(made.voters)
    return LeaderSchedule(height, made.voters[shift:] + made.voters[:shift], made.eligible)


@partial(everywhere, make_leader_schedule)
def _unseen_lose_turns(height: int, voters: VoterSet, parent: Block | None) -> LeaderSchedule:
    made = make_leader_schedule(height, voters, parent)
    shown = parent.parent_certificate.signatures if parent and parent.parent_certificate else voters.keys
    return LeaderSchedule(height, voters.keys, tuple(key for key in made.eligible if key in shown) or made.eligible)


@partial(everywhere, update_failed_leaders)
def _failures_never_end(height: int, voters: VoterSet, parent: Block, leaders: LeaderSchedule, view: int, signers: Any) -> Any:
    return update_failed_leaders(height, voters, parent, leaders, view, ())


@partial(wrapped, Replica, "_decide")
def _old_commits_ignored(real: Any, self: Replica, book: HeightVoteSet) -> bool:
    return book.commit_vote is not None and book.commit_vote.view == self.view and real(self, book)


@partial(replaced, Replica, "awaits_decision")
@property
def _others_words_are_work(self: Replica) -> bool:
    book = self._book
    if book is None or not self._may_sign(book) or not self._chain.is_applied:
        return False
    return bool(book.proposals) or book.is_active() or self._own.has_voted(book.height) or self._application.has_work()


@partial(wrapped, Replica, "_may_be_missed")
def _refused_is_repeated(real: Any, self: Replica) -> bool:
    book = self._book
    return real(self) or (book is not None and self._takes_part(book) and bool(book.proposals))


# Blocks and decisions ------------------------------------------------------------------------------------------------


@partial(replaced, replica, "make_decided_block")
def _unasserted(data: bytes, certificate: Certificate, vote: Commit) -> DecidedBlock:
    return DecidedBlock(vote.height, vote.block, data, certificate)


@partial(replaced, replica, "assemble_block")
def _short_body_unchecked(header: Any, body: bytes) -> bytes:
    fields = {field.name: getattr(header, field.name) for field in dataclasses.fields(header)}
    return encode_block(decode_block(encode_block(Block(**{**fields, "body": body}))))


def _decision_unchecked(check_certificate: bool) -> Plant:
    def on_decision(real: Any, self: ReplicaMessageHandlers, peer: bytes, message: Decision) -> None:
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

    return together(wrapped(ReplicaMessageHandlers, "_on_decision", on_decision), _unasserted)


@partial(replaced, ReplicaState, "_is_vouched_for")
def _vouched_for_by_one(self: ReplicaState) -> bool:
    offer = self._book.proposals.get(self.view) if self._book else None
    return self._book is not None and offer is not None and bool(self._book.preparers(self.view, offer.digest))


AGREEMENT = (
    Mutant(
        "small-quorum",
        "a quorum is one voter too small",
        ("certificate",),
        replaced(VoterSet, "quorum", property(lambda self: quorum(len(self)) - 1)),
    ),
    Mutant(
        "two-f-plus-one",
        "q = 2f+1 where n is not 3f+1",
        ("certificate",),
        replaced(VoterSet, "quorum", property(lambda self: 2 * faults_tolerated(len(self)) + 1)),
        Scenario(n=6),
    ),
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
    Mutant(
        "unsigned-chain",
        "the chain id is not signed",
        ("certificate", "validity"),
        everywhere(signing_preimage, lambda domain, chain_id, body: signing_preimage(domain, bytes(32), body)),
    ),
    Mutant("any-chain", "signatures for another chain are good", ("certificate",), _any_chain, with_liar("cross-chain")),
    Mutant(
        "unverified",
        "the agreement verifies no signature",
        ("certificate", "agreement", "honest accused"),
        together(
            replaced(CachingVerifier, "verify", lambda *_: True),
            everywhere(open_signed, lambda signed, chain_id, verifier, kinds: codec.decode_message(signed.body, kinds)),
        ),
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
    Mutant(
        "no-carry-over",
        "a later view may decide any block",
        ("justification", "lock", "agreement"),
        together(_takes_any_block, PROPOSES_ANY_BLOCK),
        LOST,
    ),
    Mutant(
        "first-certificate",
        "the first prepare certificate obliges, not the highest",
        ("justification", "lock", "agreement"),
        _first_certificate,
        LOST,
    ),
    Mutant("proposes-after-timeout", "a leader proposes in a view that it gave up", ("timed out",), _proposes_after_timeout),
    Mutant(
        "prepares-after-timeout",
        "a voter prepares in a view that it gave up",
        ("timed out",),
        together(
            _casts_anything,
            replaced(ReplicaState, "_may_judge", lambda self, book: self._may_sign(book) and self._chain.is_applied),
        ),
        LOST,
    ),
    Mutant(
        "commits-after-timeout",
        "a voter commits in a view that it gave up",
        ("timed out",),
        together(_casts_anything, _commits_after_timeout),
        LOST,
    ),
    Mutant("commits-unprepared", "a voter commits what it prepared, without a certificate", ("durable",), _commits_unprepared),
    Mutant(
        "bare-timeouts",
        "a timeout counts without the certificate it names",
        ("honest dropped", "justification"),
        replaced(message_handlers, "covers_timeout", lambda *_: True),
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
    Mutant(
        "no-repeats",
        "nothing is said again",
        ("progress",),
        replaced(ReplicaMessageHandlers, "_repeat_to", lambda *_: None),
        DEAF,
    ),
    Mutant(
        "no-join",
        "f+1 timeouts of a later view move nobody",
        ("join",),
        replaced(Replica, "_join_timeouts", lambda *_: False),
        dataclasses.replace(LOST, crashes=4),
    ),
    Mutant(
        "no-follow",
        "certificates of a later view move nobody",
        ("progress",),
        replaced(Replica, "_follow", lambda *_: False),
        DEAF,
    ),
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
        replaced(Replica, "awaits_decision", property(lambda self: self._book is not None and self._may_sign(self._book))),
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
        together(_short_body_unchecked, _unasserted),
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
        replaced(Chain, "_check_parent_certificate", lambda *_: None),
        with_liar("bad-blocks", blocks=14),
    ),
    Mutant(
        "time-unchecked",
        "a block may be dated hours ahead",
        ("validity",),
        replaced(chain, "CLOCK_AHEAD_SECONDS", 1e9),
        with_liar("future-clock"),
    ),
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
        together(
            replaced(ReplicaMessageHandlers, "_answer", lambda *_: None), replaced(Replica, "_tell_observers", lambda *_: None)
        ),
        dataclasses.replace(LOST, crashes=3),
    ),
    Mutant(
        "impatient",
        "views are a tenth of a second at first, and how long they take is not measured from decisions",
        ("healed",),
        together(replaced(pacemaker, "VIEW_SECONDS_MIN", 0.1), replaced(pacemaker, "TAIL_FACTOR", 0.0)),
        Splits(),
    ),
    Mutant(
        "unbounded-future",
        "messages for later heights are kept without bound",
        ("memory",),
        together(
            replaced(block_sync, "FUTURE_MESSAGES_MAX", 10**9),
            replaced(block_sync, "FUTURE_BYTES_MAX", 10**12),
            replaced(message_handlers, "FUTURE_HEIGHTS_MAX", 10**9),
        ),
        with_liar("deluge", blocks=18, jobs=False),
    ),
    Mutant(
        "strangers-kept",
        "messages for later heights are kept of everybody",
        ("memory",),
        replaced(Chain, "is_known_voter", lambda self, key: True),
        Scenario(stranger="flood", blocks=50, jobs=False),
    ),
)
