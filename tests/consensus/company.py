"""Consensus, one replica: the voters around it, of which f sign anything and the others follow the protocol. They agree among
themselves, with or without the replica, and remember all signed statements."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field

from consensus.block import block_digest, decode_block, encode_header, make_header
from consensus.effects import StoredBlock
from consensus.inputs import AgreementMessage, MessageInput
from consensus.pbft.replica import Replica
from consensus.voter_set import VoterSet, faults_tolerated
from protocol import codec
from protocol.identity import Signed, sign_message
from protocol.messages import (
    NO_VIEW,
    Certificate,
    Commit,
    Decision,
    Prepare,
    Prepared,
    Propose,
    ProposeEnvelope,
    Timeout,
    TimeoutCertificate,
    TimeoutEnvelope,
    ViewEnded,
    Vote,
)
from tests.consensus.certificates import certificate_of
from tests.consensus.counter import Log
from tests.sim.keys import FastSigner, FastVerifier

CHAIN_ID = bytes(range(32))


@dataclass
class Honest:
    """One honest voter at the frontier, reduced to the rules of signing."""

    signer: FastSigner
    view: int = 0
    timed_out: int = -1
    high: tuple[int, bytes, Certificate] | None = None
    prepared: set[int] = field(default_factory=set)

    def adopt(self, view: int, digest: bytes, certificate: Certificate) -> None:
        if self.high is None or view > self.high[0]:
            self.high = (view, digest, certificate)
        self.view = max(self.view, view)


class Company:
    def __init__(self, n: int, place: int) -> None:
        self.signers = sorted((FastSigner(f"voter {i}") for i in range(n)), key=lambda signer: signer.public)
        self.voters = VoterSet.from_keys(signer.public for signer in self.signers)
        self.me = self.signers.pop(place)
        self.liars = self.signers[: faults_tolerated(n)]
        self.now_ms = 1_000_000
        # An observer hears every decision. It knows the leaders and can make a valid block of the frontier.
        self._log = Log(self.voters)
        self._observer = Replica(FastSigner("observer"), CHAIN_ID, FastVerifier(), self._log, self._log.applied())
        self.decided: dict[int, Decision] = {}
        self.mail: list[tuple[bytes, AgreementMessage]] = []  # all valid statements, with their authors
        self.signed: dict[tuple[int, bytes], dict[bytes, Signed]] = {}  # (height, body) -> who signed it
        self.blocks: dict[bytes, bytes] = {}
        self._open()

    def _open(self) -> None:
        self.honest = [Honest(signer) for signer in self.signers[len(self.liars) :]]
        self.proposals: dict[int, list[ProposeEnvelope]] = {}
        self.ended: dict[int, TimeoutCertificate] = {}
        self.timeouts: dict[int, dict[bytes, TimeoutEnvelope]] = {}
        self.prepared: list[tuple[int, bytes, Certificate]] = []

    @property
    def height(self) -> int:
        """Return the frontier: the first height that no voter has decided."""
        return self._observer.height

    @property
    def keys(self) -> list[bytes]:
        return [signer.public for signer in self.signers]

    @property
    def view(self) -> int:
        """Return the latest view of an honest voter."""
        return max(voter.view for voter in self.honest)

    def leader(self, view: int) -> bytes:
        schedule = self._observer._chain.leader_schedule(self.height)
        assert schedule is not None
        return schedule.leader_of_view(view)

    # Statements ------------------------------------------------------------------------------------------------------

    def say(self, author: bytes, message: AgreementMessage) -> tuple[bytes, AgreementMessage]:
        self.mail.append((author, message))
        return self.mail[-1]

    def sign(self, signer: FastSigner, statement: Propose | Prepare | Commit | Timeout) -> Signed:
        signed = sign_message(signer, CHAIN_ID, statement)
        self.remember(signed, statement.height)
        return signed

    def remember(self, signed: Signed, height: int) -> None:
        self.signed.setdefault((height, signed.body), {})[signed.signer] = signed

    def is_liar(self, key: bytes) -> bool:
        return any(liar.public == key for liar in self.liars)

    def propose(self, view: int, item: int) -> tuple[bytes, AgreementMessage] | None:
        """Propose as the leader of this view: a new block, or the required one. A lying leader may propose again."""
        key = self.leader(view)
        honest = next((voter for voter in self.honest if voter.signer.public == key), None)
        before = self.proposals.setdefault(view, [])
        justification = self.ended.get(view - 1)
        if key == self.me.public or (view > 0) != (justification is not None) or len(before) > 2:
            return None
        if honest is not None and (before or honest.timed_out >= view or honest.view > view):
            return None
        obligation = justification.high if justification else None
        if obligation is not None:
            block = self.blocks[codec.decode_message(obligation.vote, (Prepare,)).block]
        else:
            block = self.build(codec.encode([item]), key)
        signer = next(signer for signer in self.signers if signer.public == key)
        signed = self.sign(signer, Propose(self.voters.hash, self.height, view, block_digest(block)))
        header = make_header(decode_block(block))
        message = ProposeEnvelope(
            signed, encode_header(header), self._log.make_compact_body(decode_block(block).body), justification
        )
        before.append(message)
        return self.say(key, message)

    def build(self, body: bytes, proposer: bytes) -> bytes:
        self.now_ms += 1
        block = self._observer._chain.build_block(body, proposer, self.now_ms)
        self.blocks[block_digest(block)] = block
        return block

    def prepare(self, honest: Honest, view: int, choice: int) -> tuple[bytes, AgreementMessage] | None:
        offered = self.proposals.get(view, [])
        if not offered or honest.timed_out >= view or view < honest.view or view in honest.prepared:
            return None
        honest.view = view
        honest.prepared.add(view)
        digest = codec.decode_message(offered[choice % len(offered)].propose.body, (Propose,)).block
        return self.say(
            honest.signer.public, Vote(self.sign(honest.signer, Prepare(self.voters.hash, self.height, view, digest)))
        )

    def commit(self, honest: Honest) -> tuple[bytes, AgreementMessage] | None:
        if honest.high is None or honest.high[0] != honest.view or honest.timed_out >= honest.view:
            return None
        commit = Commit(self.voters.hash, self.height, honest.view, honest.high[1])
        return self.say(honest.signer.public, Vote(self.sign(honest.signer, commit)))

    def time_out(self, honest: Honest) -> tuple[bytes, AgreementMessage] | None:
        if honest.timed_out < honest.view:
            honest.timed_out = honest.view
            self.timeouts.setdefault(honest.view, {})[honest.signer.public] = self.timeout(
                honest.signer, honest.view, honest.high
            )
        return self.say(honest.signer.public, self.timeouts[honest.view][honest.signer.public])

    def timeout(self, signer: FastSigner, view: int, high: tuple[int, bytes, Certificate] | None) -> TimeoutEnvelope:
        high_view, digest, certificate = high or (NO_VIEW, None, None)
        return TimeoutEnvelope(self.sign(signer, Timeout(self.voters.hash, self.height, view, high_view, digest)), certificate)

    # Certificates ----------------------------------------------------------------------------------------------------

    def certify(self, kind: type[Prepare] | type[Commit], view: int) -> tuple[bytes, AgreementMessage] | None:
        """Certify a block of this view with a quorum that includes the liars: a Prepared, or a Decision that ends the height."""
        for offer in self.proposals.get(view, []):
            digest = codec.decode_message(offer.propose.body, (Propose,)).block
            statement = kind(self.voters.hash, self.height, view, digest)
            by = {**self.signed.get((self.height, codec.encode(statement)), {})}
            by |= {liar.public: self.sign(liar, statement) for liar in self.liars}
            if len(by) < self.voters.quorum:
                continue
            certificate = Certificate(codec.encode(statement), {key: by[key].signature for key in sorted(by)})
            if kind is Commit:
                return self.decide(Decision(self.blocks[digest], certificate))
            self.prepared.append((view, digest, certificate))
            return self.say(self.keys[0], Prepared(certificate))
        return None

    def too_small(self, kind: type[Prepare] | type[Commit], view: int, item: int) -> AgreementMessage:
        """Return a certificate that lacks one signature. No honest voter signs it: it simulates more than f liars."""
        block = self.build(codec.encode([item]), self.leader(view))
        statement = kind(self.voters.hash, self.height, view, block_digest(block))
        certificate = certificate_of(CHAIN_ID, statement, self.signers[: self.voters.quorum - 1])
        return Prepared(certificate) if kind is Prepare else Decision(block, certificate)

    def decide(self, decision: Decision) -> tuple[bytes, AgreementMessage]:
        self.decided[self.height] = decision
        turn = self._observer.step(MessageInput(self.keys[0], decision), self.now_ms / 1_000)
        self._observer.step(self._log.apply(turn.decided_blocks[0]), self.now_ms / 1_000)
        self._open()
        return self.say(self.keys[0], decision)

    def end_view(self, view: int, with_lies: bool) -> tuple[bytes, AgreementMessage] | None:
        said = dict(self.timeouts.get(view, {}))
        for liar in self.liars:
            known = [entry for entry in self.prepared if entry[0] <= view]
            said.setdefault(liar.public, self.timeout(liar, view, None if with_lies or not known else known[-1]))
        if len(said) < self.voters.quorum:
            return None
        high = max((message.high for message in said.values() if message.high), key=self._view_of, default=None)
        certificate = TimeoutCertificate(tuple(said[key].timeout for key in sorted(said)), high)
        self.ended.setdefault(view, certificate)
        return self.say(self.keys[0], ViewEnded(certificate))

    def _view_of(self, certificate: Certificate) -> int:
        return codec.decode_message(certificate.vote, (Prepare,)).view

    def hear_me(self, message: AgreementMessage, block_of: dict[bytes, StoredBlock]) -> None:
        """Count a message of the replica under test for the other voters, if they are at its height."""
        match message:
            case Vote(vote=signed):
                statement: Prepare | Commit = codec.decode_message(signed.body, (Prepare, Commit))  # type: ignore[assignment]
                self.remember(signed, statement.height)
            case TimeoutEnvelope(timeout=signed):
                timeout = codec.decode_message(signed.body, (Timeout,))
                self.remember(signed, timeout.height)
                if timeout.height == self.height:
                    self.timeouts.setdefault(timeout.view, {})[signed.signer] = copy(message)
            case ProposeEnvelope(propose=signed) if signed.signer == self.me.public:
                propose = codec.decode_message(signed.body, (Propose,))
                self.remember(signed, propose.height)
                if propose.height == self.height and message not in self.proposals.setdefault(propose.view, []):
                    self.proposals[propose.view].append(message)
                    self.blocks[propose.block] = block_of[propose.block].block

    def heard_of_me(self) -> tuple[Signed, ...]:
        heights = (self.height - 2, self.height - 1, self.height)
        held = [by[self.me.public] for (height, _), by in self.signed.items() if height in heights and self.me.public in by]
        return tuple(dict.fromkeys(held))[-200:]
