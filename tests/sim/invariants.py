"""Safety invariants, checked after every event under any network and any liars.

Written apart from the code it checks: nothing here comes from `consensus`, quorums and digests are computed anew. Records of the
journal are recognized by their class names.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from protocol import codec
from protocol.errors import RemoteProtocolError
from protocol.identity import Signed, Verifier, short_id, signing_preimage
from protocol.limits import BLOCK_BYTES_MAX, CLOCK_AHEAD_SECONDS
from protocol.messages import (
    Ballot,
    Certificate,
    Commit,
    CutOff,
    Decision,
    EvidenceMessage,
    GossipEnvelope,
    Prepare,
    Prepared,
    Proposal,
    Propose,
    ProposeEnvelope,
    Timeout,
    TimeoutCertificate,
    TimeoutEnvelope,
    ViewEnded,
    Vote,
    Vouch,
)

# Heights between a transaction's arrival and its block, in a network without faults but with f liars. Let s be the last decided
# height. A voter gives notice of the transaction in s + 1, or in s + 2 if delivery took longer than a height. After f + 1 notices
# in k − 2 it must be in k, so in s + 4 at the latest. One more height is for notices in transit. Seen: 2 in all seeds.
PASSED_OVER_MAX = 4
AGREED = (Propose, Prepare, Commit, Timeout)
ROUND_TAGS = frozenset(kind.TAG for kind in (Proposal, Ballot, Vouch, CutOff))
Keys = tuple[bytes, ...]
Slot = tuple[Any, ...]


class Violation(AssertionError):
    """The protocol broke a promise. `rule` is the invariant's name: a shrunk history must break the same one."""

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule = rule


def faults_tolerated(n: int) -> int:
    return (n - 1) // 3


def quorum(n: int) -> int:
    """The smallest q of which any two share more than f voters: 2q − n > f."""
    return (n + faults_tolerated(n)) // 2 + 1


def set_hash(keys: Iterable[bytes]) -> bytes:
    return hashlib.sha256(b"folkmoot/voters\x00" + codec.encode(list(keys))).digest()


def honest_payload(job: bytes, number: int, trainer: bytes, model_root: bytes, brief: bytes = b"") -> bytes:
    """Return the digest of the update that an honest trainer computes in the simulator. `brief` is that of a client's step."""
    return hashlib.sha256(b"update" + job + number.to_bytes(8, "big") + trainer + model_root + brief).digest()


def block_digest(plain: list[Any]) -> bytes:
    """Return the digest of a decoded block. The header holds the body's digest in place of the body."""
    return hashlib.sha256(b"folkmoot/block\x00" + codec.encode([*plain[:9], hashlib.sha256(plain[9]).digest()])).digest()


def round_statements(body: bytes) -> dict[Slot, bytes]:
    """Return the statements of a round's message by slot. A vouch fills one slot for each of its trainers."""
    tag, *fields = codec.unpack(body, len(body))
    if tag not in ROUND_TAGS:
        return {}
    if tag == Vouch.TAG:
        return {(tag, fields[0], fields[1], said[0]): codec.encode(list(said)) for said in fields[2]}
    return {(tag, fields[0], fields[1]): body}


@dataclass
class Durable:
    """Records of undecided heights that one peer's disk is known to hold."""

    votes: dict[Slot, bytes] = field(default_factory=dict)
    blocks: set[bytes] = field(default_factory=set)
    prepared: set[tuple[int, int, bytes]] = field(default_factory=set)
    accepted: set[bytes] = field(default_factory=set)  # digests of proposals that own ballots accept


@dataclass
class Invariants:
    """Checks of all that honest peers decide, apply, write and send, across restarts.

    `reference(height, block)` returns the problem of a decided body on the state below it, and the state root after it.
    """

    founders: Keys
    chain_id: bytes
    verifier: Verifier
    honest: set[bytes]
    reference: Callable[[int, bytes], tuple[str | None, bytes]]
    on_block: Callable[[int, bytes], None] = lambda height, body: None  # each decided block once, in order
    latest_clock: Callable[[], float] = lambda: float("inf")  # of any honest peer, seconds
    waits: Callable[[Signed], bool] = lambda signed: True  # whether a transaction still could be decided
    may_go: set[bytes] = field(default_factory=set)  # honest voters that asked to leave, or to change their key
    heirs: set[bytes] = field(default_factory=set)  # keys that liars rotated to: one and the same person, who may be expelled
    excused: set[bytes] = field(default_factory=set)  # restored from an old disk: they may have signed forgotten statements
    decided: dict[int, bytes] = field(default_factory=dict)
    views: dict[int, int] = field(default_factory=dict)  # height -> the view in which it was decided first
    roots: dict[int, bytes] = field(default_factory=dict)  # after each height
    sets: dict[int, Keys] = field(default_factory=dict)
    _blocks: dict[int, list[Any]] = field(default_factory=dict)
    _bytes: dict[int, bytes] = field(default_factory=dict)
    _certified: dict[tuple[str, int, int], bytes] = field(default_factory=dict)
    _committed: dict[tuple[int, int, bytes], set[bytes]] = field(default_factory=dict)
    _locked: dict[int, tuple[int, bytes]] = field(default_factory=dict)  # height -> highest (view, block) that may be decided
    _signed: dict[tuple[bytes, Slot], bytes] = field(default_factory=dict)
    _given_up: dict[tuple[bytes, int], int] = field(default_factory=dict)
    _highest: dict[int, int] = field(default_factory=dict)  # height -> the last view that an honest peer has given up
    _silent: dict[bytes, int] = field(default_factory=dict)  # peer -> height below which it has promised to sign nothing
    _last: dict[bytes, int] = field(default_factory=dict)
    _applied: dict[bytes, int] = field(default_factory=dict)
    _durable: dict[bytes, Durable] = field(default_factory=dict)
    _evidence: int = 0  # decided so far
    _wishes: dict[bytes, tuple[bytes, bool]] = field(default_factory=dict)  # voter -> (member to retire, whether f may fall)
    _retired: dict[bytes, bool] = field(default_factory=dict)  # retired member -> whether the quorum allowed f to fall
    _nonces: dict[bytes, int] = field(default_factory=dict)
    _rounds: dict[bytes, int] = field(default_factory=dict)
    _audited: set[bytes] = field(default_factory=set)  # jobs whose proposals are re-executed before the vote
    _briefs: dict[bytes, bytes] = field(default_factory=dict)  # job of a client run -> the brief of its last step
    _job_records: Any = None  # the jobs whose records were checked last
    _good: set[tuple[bytes, bytes]] = field(default_factory=set)  # certificates that were checked
    _heard: dict[bytes, dict[Slot, tuple[bytes, set[bytes]]]] = field(default_factory=dict)
    _remembered: dict[bytes, dict[Slot, bytes]] = field(default_factory=dict)
    _wrong: dict[bytes, int] = field(default_factory=dict)  # peer with a wrong state -> its first wrong height
    _told: dict[bytes, int] = field(default_factory=dict)  # such a peer -> last height whose state its node was told
    _waiting: dict[bytes, tuple[int, Signed, int]] = field(default_factory=dict)  # author -> (nonce, transaction, height then)
    longest_wait: int = 0  # heights, of any transaction
    justified: int = 0  # prepares in later views whose justification was checked
    unseen: int = 0  # prepares without a known justification: the leader crashed before it sent its proposal
    _opened: set[tuple[bytes, int, bytes]] = field(default_factory=set)  # losses: (job, round, trainer)
    _successors: dict[bytes, bytes] = field(default_factory=dict)  # a key that was rotated -> the next one
    _audits: Any = None  # the state of the audits that was checked last
    # Proposals that reached each honest peer, by height, view and block.
    _offered: dict[tuple[bytes, int, int, bytes], list[ProposeEnvelope]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sets = dict.fromkeys((0, 1, 2), self.founders)

    # Decisions -------------------------------------------------------------------------------------------------------

    def on_decided(self, peer: bytes, decided: Any) -> None:
        last = self._last.get(peer, 0)
        if decided.height != last + 1:
            raise Violation("contiguous", f"{short_id(peer)} decided height {decided.height} after {last}")
        self._last[peer] = decided.height
        vote = self._on_certificate(decided.certificate, Commit)
        self._agrees(decided)
        if self._bytes.setdefault(decided.height, decided.block) != decided.block:
            raise Violation("validity", f"{short_id(peer)} holds other bytes of the block of height {decided.height}")
        if (vote.height, vote.block) != (decided.height, decided.digest):
            raise Violation("certificate", f"height {decided.height} decided by a certificate of something else")

    def on_restart(self, peer: bytes, height: int, applied: int, records: Iterable[Any]) -> None:
        """Note the disk's last height and the records above it. An interrupted append may be complete."""
        self._last[peer], self._applied[peer] = height, applied
        self.on_durable(peer, records)

    def on_restored(self, peer: bytes, decisions: Iterable[Any], height: int, root: bytes) -> None:
        """Note that a snapshot replaced the decisions up to `height`."""
        for decided in decisions:  # the last one proves the state below it, and may be new here: a liar can decide first
            self._on_certificate(decided.certificate, Commit)
            self._agrees(decided)
            self._last[peer] = max(decided.height, self._last.get(peer, 0))
        if self.roots.get(height) != root:
            raise Violation("roots", f"{short_id(peer)} restored another state of height {height}")
        if height <= self._applied.get(peer, 0) and (peer not in self._wrong or height < self._wrong[peer]):
            raise Violation("applied once", f"{short_id(peer)} restored height {height} after {self._applied[peer]}")
        self._applied[peer] = height
        self._wrong.pop(peer, None)
        self._told.pop(peer, None)

    def _agrees(self, decided: Any) -> None:
        known = self.decided.get(decided.height)
        if known is None:
            self._first(decided.height, decided.digest, decided.block)
            self.views[decided.height] = codec.decode_message(decided.certificate.vote, (Commit,)).view
            self._check_turn(decided.height)
        elif known != decided.digest:
            raise Violation("agreement", f"two blocks decided at height {decided.height}")

    def _first(self, height: int, digest: bytes, block: bytes) -> None:
        plain = codec.unpack(block, BLOCK_BYTES_MAX)
        self.decided[height], self._blocks[height] = digest, plain
        number, parent, time_ms, proposer, voters, next_voters, root, parent_certificate, _, body = plain
        if block_digest(plain) != digest:
            raise Violation("validity", f"height {height}: the digest is of other bytes")
        if number != height or parent != self.decided.get(height - 1, self.chain_id):
            raise Violation("validity", f"height {height} does not follow from the block below it")
        if height > 1 and time_ms <= self._blocks[height - 1][2]:
            raise Violation("validity", f"height {height} is not later than the one below it")
        if time_ms > (self.latest_clock() + CLOCK_AHEAD_SECONDS) * 1_000:
            raise Violation("validity", f"height {height} is dated ahead of every honest clock")
        if proposer not in self.sets[height]:
            raise Violation("validity", f"height {height} was made by somebody who does not vote")
        if height > 1 and next(iter(codec.unpack(parent_certificate[0], 256)[4:])) != self.decided[height - 1]:
            raise Violation("validity", f"height {height} carries a certificate of another parent")
        if height > 1:
            self._on_certificate(Certificate(parent_certificate[0], dict(parent_certificate[1])), Commit)
        self._check_sets(height, voters, next_voters)
        self._check_body(height, body)
        problem, after = self.reference(height, block)
        if problem is not None:
            raise Violation("validity", f"height {height}: {problem}")
        if root != self.roots.get(height - 1, root):
            raise Violation("roots", f"height {height} names another root than the peers found after {height - 1}")
        if self.roots.setdefault(height, after) != after:
            raise Violation("roots", f"the reference has another root after height {height}")
        self._check_waiting(height)
        self.on_block(height, body)

    def on_rolled_back_job(self, job: bytes, number: int) -> None:
        """Note that the job continues with the round `number`."""
        self._rounds[job] = number

    def on_submitted(self, signed: Signed, height: int) -> None:
        """Note that an honest author's only transaction begins to wait while `height` is the last decided height."""
        _, nonce, *_ = codec.unpack(signed.body, len(signed.body))
        self._waiting[signed.signer] = (nonce, signed, height)

    def _check_waiting(self, height: int) -> None:
        for author, (nonce, signed, since) in list(self._waiting.items()):
            if self._nonces.get(author, 0) >= nonce or not self.waits(signed):
                del self._waiting[author]
            elif height > since + PASSED_OVER_MAX:
                raise Violation(
                    "passed over", f"a transaction of {short_id(author)} has waited since height {since}, this is {height}"
                )
            else:
                self.longest_wait = max(self.longest_wait, height - since)

    def _check_turn(self, height: int) -> None:
        """Check that the leader's turn skips only the recorded failed leaders, and that the record of them is right."""
        plain, below, voters = self._blocks[height], self._blocks.get(height - 1), self.sets[height]
        proposer, certificate, failed = plain[3], plain[7], dict(plain[8])
        before = dict(below[8]) if below else {}
        turn = voters[height % len(voters)]
        if self.views[height] == 0 and turn not in before and proposer != turn:
            raise Violation("turns", f"{short_id(proposer)} made height {height}, it was the turn of {short_id(turn)}")
        lost = codec.decode_message(certificate[0], (Commit,)).view if certificate else 0
        if len(failed.keys() - before.keys()) > lost or not failed.keys() <= set(voters):
            raise Violation("turns", f"height {height} says that {len(failed)} failed, {lost} views were lost below it")
        if certificate and any(until <= height and key in dict(certificate[1]) for key, until in failed.items()):
            raise Violation("turns", f"height {height} leaves out somebody who is there again")

    def _check_sets(self, height: int, voters: bytes, next_voters: bytes) -> None:
        if voters != set_hash(self.sets[height]):
            raise Violation("voter sets", f"height {height} was decided by another set than was announced")
        if height > 1 and voters != self._blocks[height - 1][5]:
            raise Violation("voter sets", f"height {height} has another set than the block below it says")
        if height + 1 in self.sets and next_voters != set_hash(self.sets[height + 1]):
            raise Violation("voter sets", f"height {height} announces another set than follows from {height - 1}")

    def _check_body(self, height: int, body: bytes) -> None:
        closings, evidence, transactions = codec.unpack(body, len(body))
        for signed in transactions:
            self._check_transaction(height, *signed)
        for first, second in evidence:
            self._check_evidence(height, first, second)
            self._evidence += 1
        self._count_wishes(height)
        for job, number, ballots, cut_offs, proposals, vouches in closings:
            expected = self._rounds.get(job, 0)
            if number != expected:
                raise Violation("validity", f"height {height} closes round {number}, {expected} is open")
            self._rounds[job] = number + 1
            for tag, parts in (("ballot", ballots), ("proposal", proposals)):
                signers = [signer for _, signer, _ in parts]
                if len(set(signers)) != len(signers):
                    raise Violation("validity", f"height {height} counts one {tag} twice")
                for data, signer, signature in parts:
                    self._require_signature(height, tag, data, signer, signature)
            persons = [self._current(signer) for _, signer, _ in proposals]
            if len(set(persons)) != len(persons):
                raise Violation("rounds", f"height {height} accepts two proposals of one member, by two of its keys")
            if set(self.sets.values()) == {self.founders} and not evidence and not self._evidence:
                self._check_vouches(height, vouches)
                if job in self._audited:
                    self._check_work(height, proposals)
                self._check_outcome(height, ballots, cut_offs, proposals, vouches if job in self._audited else None)
            if len(ballots) < quorum(len(self.sets[height])) - faults_tolerated(len(self.sets[height])) - 1:
                raise Violation("validity", f"height {height} closes a round with {len(ballots)} ballots")

    def _count_wishes(self, height: int) -> None:
        """Derive from blocks alone the members that the voters of a height may retire."""
        voters = self.sets[height]
        for subject in {subject for subject, _ in self._wishes.values()}:
            said = [lowers for voter, (of, lowers) in self._wishes.items() if of == subject and voter in voters]
            if len(said) >= quorum(len(voters)):
                self._retired[subject] = sum(said) >= quorum(len(voters))

    def _check_vouches(self, height: int, vouches: list[Any]) -> None:
        said = dict[Slot, bytes]()
        for data, signer, signature in vouches:
            self._require_signature(height, Vouch.TAG, data, signer, signature)
            for slot, statement in round_statements(data).items():
                if said.setdefault((signer, *slot), statement) != statement and signer in self.honest - self.excused:
                    raise Violation("one per slot", f"height {height} holds two vouches of {short_id(signer)}")

    def _check_work(self, height: int, proposals: list[Any]) -> None:
        """Check that, with at most f liars, an update re-executed before the vote is accepted only if it is honest."""
        if len(set(self.founders) - self.honest) > faults_tolerated(len(self.founders)):
            return
        for data, trainer, _ in proposals:
            _, job, number, root, payload, *_ = codec.unpack(data, len(data))
            if payload != honest_payload(job, number, trainer, root, self._briefs.get(job, b"")):
                raise Violation("false work", f"height {height} accepts what {short_id(trainer)} did not compute")

    def _check_outcome(
        self, height: int, ballots: list[Any], cut_offs: list[Any], proposals: list[Any], vouches: list[Any] | None
    ) -> None:
        """Check, while the founders are the members, that an update with q accepts and its vouches is accepted, and that no
        missing ballot could change that.

        `vouches` is None where nothing is re-executed before the vote.
        """
        n, accepts = len(self.founders), dict[tuple[bytes, bytes], int]()
        vouched = dict[tuple[bytes, bytes], set[bytes]]()
        for data, signer, _ in vouches or ():
            for trainer, proposal, verdict in codec.unpack(data, len(data))[3]:
                if verdict == 0 and signer != trainer and signer in self.founders:
                    vouched.setdefault((trainer, proposal), set()).add(signer)

        def is_sure(trainer: bytes, proposal: bytes) -> bool:
            needed = max(1, faults_tolerated(n)) if trainer in self.founders else faults_tolerated(n) + 1
            enough = vouches is None or n == 1 or len(vouched.get((trainer, proposal), ())) >= needed
            return enough and accepts[trainer, proposal] >= quorum(n)

        for data, _, _ in ballots:
            for trainer, proposal, verdict in codec.unpack(data, len(data))[4]:
                accepts[trainer, proposal] = accepts.get((trainer, proposal), 0) + (verdict == 0)
        accepted = sorted(trainer for trainer, proposal in accepts if is_sure(trainer, proposal))
        if [signer for _, signer, _ in proposals] != accepted:
            raise Violation("rounds", f"height {height} accepts {len(proposals)} proposals, {len(accepted)} have all they need")
        settled = all(is_sure(*of) or len(ballots) - count > n - quorum(n) for of, count in accepts.items())
        if len(ballots) < quorum(n) or (not settled and len(cut_offs) <= faults_tolerated(n)):
            raise Violation("rounds", f"height {height} closes a round that further ballots could change")

    def _current(self, key: bytes) -> bytes:
        while key in self._successors:
            key = self._successors[key]
        return key

    def _check_transaction(self, height: int, data: bytes, signer: bytes, signature: bytes) -> None:
        _, nonce, expires, kind, content = codec.unpack(data, len(data))
        if nonce != self._nonces.get(signer, 0) + 1:
            raise Violation("validity", f"height {height}: nonce {nonce} of {short_id(signer)} ({kind}) is out of turn")
        self._nonces[signer] = nonce
        if expires < height:
            raise Violation("validity", f"height {height} holds an expired transaction")
        self._require_signature(height, "transaction", data, signer, signature)
        if kind == "member/retire":
            subject, lowers, _ = codec.unpack(content, len(content))
            self._wishes[signer] = (subject, lowers)
        if kind == "member/rotate":
            self._successors[signer] = codec.unpack(content, len(content))[0]
        if kind == "job/start" and codec.unpack(content, len(content))[0].startswith(b"audited"):
            self._audited.add(hashlib.sha256(b"folkmoot/job\x00" + signer + data).digest())
        if kind == "client/open":  # a run's updates are all re-executed before the vote
            self._audited.add(hashlib.sha256(b"folkmoot/job\x00" + signer + data).digest())
        if kind == "client/step":
            job, brief = codec.unpack(content, len(content))
            self._briefs[job] = codec.encode(brief)
        if kind == "audit/open-loss":
            job, number, trainer, *_ = codec.unpack(content, len(content))
            if (job, number, trainer) in self._opened:
                raise Violation("opened twice", f"height {height} opens the loss of {short_id(trainer)} again")
            self._opened.add((job, number, trainer))
        if kind == "audit/report":
            job, number, trainer, *_ = codec.unpack(content, len(content))
            if (job, number, trainer) in self._opened:
                raise Violation("opened early", f"height {height} holds a report on a loss that is open")

    def _check_evidence(self, height: int, first: list[bytes], second: list[bytes]) -> None:
        if first[1] in self.honest and first[1] not in self.excused:
            raise Violation("honest accused", f"{short_id(first[1])} in the block of height {height}")
        if first[1] != second[1] or first[0] == second[0]:
            raise Violation("validity", f"height {height} holds evidence that proves nothing")
        for data, signer, signature in (first, second):
            self._require_signature(height, codec.unpack(data, len(data))[0], data, signer, signature)

    def _require_signature(self, height: int, tag: str, data: bytes, signer: bytes, signature: bytes) -> None:
        if not self.verifier.verify(signer, signing_preimage(tag, self.chain_id, data), signature):
            raise Violation("validity", f"height {height} holds a {tag} that {short_id(signer)} did not sign")

    def on_applied(self, peer: bytes, height: int, root: bytes, sets: tuple[Keys, Keys, Keys], expelled: Iterable[bytes]) -> None:
        last = self._applied.get(peer, 0)
        if height != last + 1:
            raise Violation("applied once", f"{short_id(peer)} applied height {height} after {last}")
        self._applied[peer] = height
        if self.roots.setdefault(height, root) != root:
            raise Violation("roots", f"{short_id(peer)} has another state after height {height}")
        for of, keys in enumerate(sets, height):
            if self.sets.setdefault(of, keys) != keys:
                raise Violation("voter sets", f"{short_id(peer)} has other voters for height {of}")
        self._check_change(sets[1], sets[2], height)
        for key in expelled:
            if key in self.honest and key not in self.excused | self.heirs:
                raise Violation("honest expelled", f"{short_id(key)} at height {height}")

    def on_audits(self, audits: Any) -> None:
        """Check after each block that no lie about an audit hurts an honest member."""
        if audits is self._audits:
            return
        self._audits = audits
        for job in audits.jobs.values():
            for key in job.suspended.keys() & self.honest - self.heirs:
                raise Violation("honest suspended", f"{short_id(key)} until round {job.suspended[key]}")
        for key, standing in audits.member_records.items():
            if standing.refuted and key in self.honest - self.heirs:
                raise Violation("honest refuted", f"{short_id(key)} challenged a false proposal, and is held for a liar")

    def on_job_records(self, jobs: Any) -> None:
        """Check after each block that no vouch of a liar suspends an honest re-executor or trainer."""
        if jobs is self._job_records:
            return
        self._job_records = jobs
        for job in jobs.values():
            for key, record in job.vouch_records.items():
                if record.suspended_until and key in self.honest - self.heirs:
                    raise Violation("honest suspended", f"{short_id(key)} vouches for nobody until {record.suspended_until}")
            for key in job.trainer_records.keys() & self.honest - self.heirs:
                raise Violation("honest suspended", f"re-executors found an update of {short_id(key)} false")

    def _check_change(self, before: Keys, after: Keys, height: int) -> None:
        gone, new = set(before) - set(after), set(after) - set(before)
        if max(len(gone), len(new)) > max(1, faults_tolerated(len(before))):
            raise Violation("voter sets", f"{len(gone)} left and {len(new)} joined at once after height {height}")
        for key in gone:
            if key in self.honest and key not in self.may_go | self.excused | self.heirs | self._retired.keys():
                raise Violation("honest expelled", f"{short_id(key)} does not vote any more after height {height}")

        unsaid = [key for key in gone & self.honest - self.may_go if not self._retired.get(key, True)]
        if unsaid and faults_tolerated(len(after)) < faults_tolerated(len(before)):
            raise Violation("tolerance", f"{short_id(unsaid[0])} was retired by voters that did not all say that f may fall")

    # Statements ------------------------------------------------------------------------------------------------------

    def on_durable(self, peer: bytes, records: Iterable[Any]) -> None:
        durable = self._durable.setdefault(peer, Durable())
        for record in records:
            match type(record).__name__:
                case "OwnStatement":
                    if record.slot not in durable.votes:
                        self._check_given_up(peer, record.slot)
                        self._check_silent(peer, record.slot)
                    durable.votes[record.slot] = record.signed.body
                case "OwnRoundStatement":
                    durable.votes.update(round_statements(record.signed.body))
                    durable.accepted.update(hashlib.sha256(proposal.body).digest() for proposal in record.accepted)
                case "StoredBlock":
                    durable.blocks.add(record.digest)
                case "StoredCertificate":
                    vote = codec.decode_message(record.certificate.vote, (Prepare,))
                    durable.prepared.add((vote.height, vote.view, vote.block))
                case "VotePause":
                    self._silent[peer] = max(record.below, self._silent.get(peer, 0))
                case "Evidence":
                    self.on_accused(peer, record.first.signer)

    def _check_given_up(self, peer: bytes, slot: Slot) -> None:
        """Check in the order of the disk: messages that a crash held back are sent after the restart, timeouts first."""
        tag, height, view = slot
        given_up = self._given_up.get((peer, height), -1)
        if tag == Timeout.TAG:
            self._given_up[peer, height] = max(given_up, view)
            highest = self._highest.get(height, -1)
            if view > highest + 1:  # at least f + 1 voters led there, and one of them is honest
                raise Violation(
                    "views", f"{short_id(peer)} gives up view {view} of height {height}, no honest voter {highest + 1}"
                )
            self._highest[height] = max(highest, view)
        elif tag in (Propose.TAG, Prepare.TAG, Commit.TAG) and given_up >= view and peer not in self.excused:
            raise Violation("timed out", f"{tag} at {height}.{view} after giving up view {given_up}")

    def _check_silent(self, peer: bytes, slot: Slot) -> None:
        """Check that a peer with a recorded loss of memory signs nothing below the recorded height, even after restarts."""
        if slot[1] < self._silent.get(peer, 0):
            raise Violation("silence", f"{short_id(peer)} signs {slot}, and is silent below {self._silent[peer]}")

    def on_accused(self, by: bytes, culprit: bytes) -> None:
        if culprit in self.honest and culprit not in self.excused:
            raise Violation("honest accused", f"{short_id(by)} holds evidence against {short_id(culprit)}")

    def on_dropped(self, by: bytes, peer: bytes, error: RemoteProtocolError) -> None:
        if peer in self.honest and not {by, peer} & self._wrong.keys():
            raise Violation("honest dropped", f"{short_id(by)} dropped {short_id(peer)}: {error}")

    def on_sent(self, peer: bytes, message: object) -> None:
        match message:
            case Vote(vote):
                self._on_signed(peer, vote)
            case GossipEnvelope(signed):
                if signed.signer == peer:
                    self._on_round(peer, signed)
            case ProposeEnvelope():
                self._on_signed(peer, message.propose)
                self._offer(peer, message)
                if message.justification is not None:
                    self._on_prepared(message.justification.high)
            case TimeoutEnvelope(timeout, high):
                self._on_signed(peer, timeout)
                self._on_prepared(high)
                self._check_shown(timeout, high)
            case Prepared(certificate):
                self._on_prepared(certificate)
            case ViewEnded(certificate):
                self._on_prepared(certificate.high)
            case Decision(_, certificate):
                self._on_certificate(certificate, Commit)
            case EvidenceMessage(first, _):
                self.on_accused(peer, first.signer)

    def _on_prepared(self, certificate: Certificate | None) -> None:
        if certificate is not None:
            self._on_certificate(certificate, Prepare)

    def _on_certificate(self, certificate: Certificate, kind: type[Any]) -> Any:
        vote = codec.decode_message(certificate.vote, (kind,))
        if self._certified.setdefault((kind.TAG, vote.height, vote.view), vote.block) != vote.block:
            raise Violation("one certificate", f"two {kind.TAG} certificates at {vote.height}.{vote.view}")
        problem = self._certificate_problem(certificate, vote)
        if problem is not None:
            raise Violation("certificate", f"{problem} at {vote.height}.{vote.view}")
        return vote

    def _certificate_problem(self, certificate: Certificate, vote: Any) -> str | None:
        voters = self.sets.get(vote.height)
        key = (certificate.vote, b"".join(certificate.signatures.values()))
        if voters is None or key in self._good:
            return None
        if vote.voters != set_hash(voters) or not set(voters).issuperset(certificate.signatures):
            return f"{vote.TAG} by others than its voters"
        if len(certificate.signatures) < quorum(len(voters)):
            return f"{vote.TAG} by {len(certificate.signatures)} of {len(voters)}"
        signed = signing_preimage(vote.TAG, self.chain_id, certificate.vote)
        if not all(self.verifier.verify(signer, signed, signature) for signer, signature in certificate.signatures.items()):
            return f"{vote.TAG} with a wrong signature"
        self._good.add(key)
        return None

    def _on_signed(self, peer: bytes, signed: Signed) -> None:
        if signed.signer != peer:
            return  # passed on
        statement: Any = codec.decode_message(signed.body, AGREED)
        slot = (statement.TAG, statement.height, statement.view)
        if not self._is_new(peer, slot, signed.body):
            return
        self._check_durable(peer, slot, signed, statement)
        if isinstance(statement, Prepare) and statement.view > 0:
            self._check_justified(peer, statement)
        if peer not in self.excused:
            self._check_lock(peer, statement)

    def is_under_way(self, height: int) -> bool:
        """Return True if an honest peer has signed a statement at this height."""
        return any(slot[1] == height for _, slot in self._signed)

    def gave_up(self, peer: bytes, height: int) -> int:
        """Return the highest view of `height` that this peer has given up, or −1."""
        return self._given_up.get((peer, height), -1)

    def _check_shown(self, signed: Signed, certificate: Certificate | None) -> None:
        """Check that a timeout is sent with the certificate that it names, or with a higher one."""
        timeout = codec.decode_message(signed.body, (Timeout,))
        high = codec.decode_message(certificate.vote, (Prepare,)) if certificate is not None else None
        if (high.view if high else -1) < timeout.high_view or (high is not None and high.height != timeout.height):
            raise Violation("certificate", f"a timeout of {timeout.height}.{timeout.view} without the certificate it names")

    def _check_lock(self, peer: bytes, statement: Any) -> None:
        """Check that honest peers do not give up a block that all liars together could still get decided.

        Once the honest voters that committed a block form a quorum with all liars, every other quorum has one of these voters. No
        other block can be justified in a later view.
        """
        voters = self.sets.get(statement.height, ())
        if isinstance(statement, Commit):
            slot = (statement.height, statement.view, statement.block)
            committed = self._committed.setdefault(slot, set())
            committed.add(peer)
            liars = sum(key not in self.honest or key in self.excused for key in voters)
            if len(committed.intersection(voters)) >= quorum(len(voters)) - liars and liars <= faults_tolerated(len(voters)):
                self._locked[statement.height] = max(self._locked.get(statement.height, (-1, b"")), slot[1:])
        elif isinstance(statement, Prepare):
            view, block = self._locked.get(statement.height, (statement.view, statement.block))
            if view < statement.view and block != statement.block:
                raise Violation(
                    "lock", f"another block is prepared in {statement.height}.{statement.view} than may be decided in {view}"
                )

    def on_offered(self, peer: bytes, data: bytes) -> None:
        """Note a proposal, valid or not, that reached an honest peer."""
        with contextlib.suppress(RemoteProtocolError):
            self._offer(peer, codec.decode_message(data, (ProposeEnvelope,)))

    def _offer(self, peer: bytes, message: ProposeEnvelope) -> None:
        proposed = codec.decode_message(message.propose.body, (Propose,))
        if proposed.view > 0:
            known = self._offered.setdefault((peer, proposed.height, proposed.view, proposed.block), [])
            if all(message.justification != other.justification for other in known):
                known.append(message)

    def _check_justified(self, peer: bytes, prepare: Prepare) -> None:
        """Check that in a later view a peer prepares only a justified proposal: a quorum gave up the view before."""
        offers = self._offered.get((peer, prepare.height, prepare.view, prepare.block), [])
        if not offers and (Propose.TAG, prepare.height, prepare.view) in self._durable[peer].votes:
            self.unseen += 1
            return
        problems = [self._unjustified(prepare, offer.justification) for offer in offers]
        if None not in problems:
            why = problems[0] if problems else "what nobody proposed to it"
            raise Violation("justification", f"{short_id(peer)} prepares in {prepare.height}.{prepare.view} {why}")
        self.justified += 1
        self._on_prepared(offers[problems.index(None)].justification.high)  # type: ignore[union-attr]

    def _unjustified(self, prepare: Prepare, justification: TimeoutCertificate | None) -> str | None:
        """Return the problem of a justification, or None. Liars send proposals, too."""
        try:
            return self._problem_of_justification(prepare, justification)
        except RemoteProtocolError as error:
            return f"because of bytes that mean nothing: {error}"

    def _problem_of_justification(self, prepare: Prepare, justification: TimeoutCertificate | None) -> str | None:
        if justification is None:
            return "although nobody gave up the view before"
        voters, signers = self.sets[prepare.height], set()
        high = codec.decode_message(justification.high.vote, (Prepare,)) if justification.high else None
        for signed in justification.timeouts:
            timeout = codec.decode_message(signed.body, (Timeout,))
            if (timeout.height, timeout.view, timeout.voters) != (prepare.height, prepare.view - 1, set_hash(voters)):
                return f"because of timeouts of {timeout.height}.{timeout.view}"
            if timeout.high_view > (high.view if high else -1):
                return f"without the certificate of view {timeout.high_view}"
            if self.verifier.verify(signed.signer, signing_preimage(Timeout.TAG, self.chain_id, signed.body), signed.signature):
                signers.add(signed.signer)
        if len(signers.intersection(voters)) < quorum(len(voters)):
            return f"because of {len(signers.intersection(voters))} timeouts"
        if justification.high is None or high is None:
            return None
        if (high.height, high.block) != (prepare.height, prepare.block):
            return "another block than was prepared"
        return self._certificate_problem(justification.high, high)

    def _check_durable(self, peer: bytes, slot: Slot, signed: Signed, statement: Any) -> None:
        durable = self._durable.get(peer, Durable())
        if durable.votes.get(slot) != signed.body:
            raise Violation("durable", f"{slot} was sent before it was on the disk")
        if isinstance(statement, Prepare) and statement.block not in durable.blocks:
            raise Violation("durable", f"{slot} was sent before the block was on the disk")
        if isinstance(statement, Commit) and (statement.height, statement.view, statement.block) not in durable.prepared:
            raise Violation("durable", f"{slot} was sent before its prepare certificate was on the disk")

    def _on_round(self, peer: bytes, signed: Signed) -> None:
        statements = round_statements(signed.body)
        new = [slot for slot, statement in statements.items() if self._is_new(peer, slot, statement)]
        if not new:
            return
        tag, *fields = codec.unpack(signed.body, len(signed.body))
        durable = self._durable.get(peer, Durable())
        if any(durable.votes.get(slot) != statements[slot] for slot in new):
            raise Violation("durable", f"a {tag} was sent before it was on the disk")
        # A closing needs the proposals that it accepts, and all their holders may be restarting.
        judgements = fields[3] if tag == Ballot.TAG else ()
        accepted = {digest for trainer, digest, verdict in judgements if verdict == 0 and trainer != peer}
        if peer not in self.excused and not durable.accepted.issuperset(accepted):
            raise Violation("durable", "a ballot was sent before the proposals that it accepts were on the disk")

    def _is_new(self, peer: bytes, slot: Slot, body: bytes) -> bool:
        first = self._signed.get((peer, slot))
        if first == body:
            return False
        remembered = self._remembered_of(peer) if peer in self.excused else None
        if first is None:
            self._signed[peer, slot] = body
            return True
        if remembered is None:
            raise Violation("one per slot", f"{short_id(peer)} signed two things for {slot}")
        if remembered.get(slot) not in (None, body):
            raise Violation("rolled back", f"{short_id(peer)} signed again for {slot} what others had heard")
        return False

    # A state that is wrong -------------------------------------------------------------------------------------------

    def on_wrong(self, peer: bytes, height: int) -> None:
        """Note that the peer's result for `height` differs from the decided one."""
        self._wrong[peer] = self._applied[peer] = height

    def on_wrong_turn(self, peer: bytes, records: Iterable[Any], told: int) -> None:
        """Check that a peer signs nothing once a decided block shows its wrong state. `told`: its node's last height."""
        wrong, last = self._wrong.get(peer), self._last.get(peer, 0)
        if wrong is None:
            return
        for record in records:
            kind = type(record).__name__
            if kind in ("OwnStatement", "OwnRoundStatement") and last > wrong and self._told.get(peer, 0) >= wrong:
                raise Violation("wrong state", f"{short_id(peer)} signs with a wrong state of height {wrong}, and could know it")
            last = record.height if kind == "DecidedBlock" else last
        self._told[peer] = told

    # A disk that was restored ----------------------------------------------------------------------------------------

    def watch(self, peer: bytes) -> None:
        """Start to record the receivers of this peer's messages: it will return with an old disk."""
        self._heard[peer] = {}

    def on_delivered(self, sender: bytes, receiver: bytes, message: object) -> None:
        heard = self._heard.get(sender)
        if heard is None or sender in self.excused or receiver not in self.honest:
            return
        signed = message.vote if isinstance(message, Vote) else message.timeout if isinstance(message, TimeoutEnvelope) else None
        signed = message.propose if isinstance(message, ProposeEnvelope) else signed
        if signed is not None and signed.signer == sender:
            statement: Any = codec.decode_message(signed.body, AGREED)
            self._remember(sender, receiver, (statement.TAG, statement.height, statement.view), signed.body)
        elif isinstance(message, GossipEnvelope) and message.signed.signer == sender:
            for slot, statement in round_statements(message.signed.body).items():
                self._remember(sender, receiver, slot, statement)

    def on_forgotten(self, receiver: bytes) -> None:
        """Forget the messages that a restarted peer had in memory."""
        for heard in self._heard.values():
            for _, receivers in heard.values():
                receivers.discard(receiver)

    def _remember(self, sender: bytes, receiver: bytes, slot: Slot, body: bytes) -> None:
        self._heard[sender].setdefault(slot, (body, set()))[1].add(receiver)

    def on_rolled_back(self, peer: bytes) -> None:
        self.excused.add(peer)

    def _remembered_of(self, peer: bytes) -> dict[Slot, bytes]:
        """Return the statements that must not be contradicted: in every quorum a voter remembers them.

        The peer asks these voters before it signs again, and they must remember until then. Other peers are not asked.
        """
        if peer not in self._remembered:
            last = max(self.decided, default=0)
            sets = [set(voters) for height, voters in self.sets.items() if height >= min(last + 1, max(self.sets))]
            self._remembered[peer] = {
                slot: body
                for slot, (body, receivers) in self._heard.get(peer, {}).items()
                if all(len(receivers & voters) > len(voters) - quorum(len(voters)) for voters in sets)
            }
        return self._remembered[peer]

    # Memory ----------------------------------------------------------------------------------------------------------

    def on_sample(self, peer: bytes, sizes: Mapping[str, int], limits: Mapping[str, int]) -> None:
        for what, size in sizes.items():
            if size > limits[what]:
                raise Violation("memory", f"{short_id(peer)} holds {size} in {what}, at most {limits[what]} are expected")

    def on_kept(self, peer: bytes, senders: Iterable[bytes]) -> None:
        """Check that unverified messages are kept only of current and recent voters: the number of other peers is unbounded."""
        for sender in senders:
            if not any(sender in voters for voters in self.sets.values()):
                raise Violation("memory", f"{short_id(peer)} keeps for later what {short_id(sender)} says, who has never voted")
