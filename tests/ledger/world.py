"""Ledger without consensus: founders, newcomers, and blocks that the test decides."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from consensus.evidence import Evidence
from ledger.audits.loss_commitments import commit_loss
from ledger.audits.sortition import commit_nonce
from ledger.blocks.application import LedgerApplication
from ledger.core.genesis import TRAINER, Founder, Genesis
from ledger.core.module import Module
from ledger.jobs import AuditTerms, Job, JobTerms, StartJob, job_id
from ledger.ledger_state import (
    BlockBody,
    CurrentState,
    LedgerRules,
    LedgerState,
    core_modules,
    decode_body,
    newest_module_versions,
)
from ledger.members import AdmitMember, Invitation, RotateKey, StandAsVoter, rotation_preimage, token_preimage
from protocol import codec
from protocol.errors import RemoteProtocolError
from protocol.identity import Signed, sign_message
from protocol.messages import Ballot, CutOff, Judgement, Prepare, Proposal, Transaction, Vouch
from protocol.verdicts import Verdict
from rounds.round_state import OpenRoundState, RoundCertificate, RoundTimeouts
from rounds.round_terms import signed_body_digest
from tests.ledger.blocks import compute_transition, stepped
from tests.sim.keys import FastSigner, FastVerifier

PEOPLE = sorted((FastSigner(f"person {i}") for i in range(12)), key=lambda signer: signer.public)
BY_KEY = {person.public: person for person in PEOPLE}
LANGUAGE, SCRATCH, UNAUDITED, SAMPLED = b"language", b"scratch", b"unaudited", b"sampled"
SAMPLED_SCRATCH, CLIENT = b"sampled-scratch", b"client"
AUDITS = AuditTerms(rate=2.0, auditors=2, window=3, suspension_rounds=4)  # 1 in early rounds
LOSS = 2_000_000
TOKEN = FastSigner("token")
FAR_MS = 10**15  # when invitations expire unless a test says otherwise
TIMERS = RoundTimeouts(proposals_max_seconds=1.0, replay_seconds=1.0)


def nonce_of(voter: bytes, number: int) -> bytes:
    return hashlib.sha256(b"nonce" + voter + bytes([number])).digest()[:16]


def secret_of(trainer: bytes, number: int) -> bytes:
    return hashlib.sha256(b"losses" + trainer + bytes([number])).digest()


class PlainJobs:
    """Specifications are `kind` or `kind:rounds`."""

    def __init__(self, audits: AuditTerms = AUDITS, anchor_rounds: int = 8) -> None:
        self.audits, self.anchor_rounds = audits, anchor_rounds

    def terms_of_spec(self, spec: bytes) -> JobTerms:
        kind, _, rounds = spec.partition(b":")
        if kind not in (LANGUAGE, SCRATCH, UNAUDITED, SAMPLED, SAMPLED_SCRATCH, CLIENT):
            raise RemoteProtocolError("bad-job", repr(spec))
        name = kind.decode()
        return JobTerms(
            name,
            name,
            int(rounds or 2),
            audited=kind in (LANGUAGE, SCRATCH, CLIENT),
            needs_worker=kind not in (SCRATCH, SAMPLED_SCRATCH),
            proposal_seconds=1.0,
            audits=self.audits if kind in (SAMPLED, SAMPLED_SCRATCH) else None,
            anchor_rounds=self.anchor_rounds,
            on_request=kind == CLIENT,
        )

    def why_base_refused(self, base: bytes, spec: bytes) -> str | None:
        return None

    def why_read_model_refused(self, read: bytes, spec: bytes) -> str | None:
        return None

    def why_continuation_refused(self, before: bytes, spec: bytes) -> str | None:
        return None


MODULES = newest_module_versions(core_modules(PlainJobs()))


class World:
    """The first `voters` people are founders; the first `trainers` of them train."""

    def __init__(
        self,
        voters: int = 4,
        trainers: int = 3,
        audits: AuditTerms = AUDITS,
        modules: tuple[Module[Any], ...] = (),
        anchor_rounds: int = 8,
    ) -> None:
        founders = {p.public: Founder("founder", (TRAINER,) if i < trainers else ()) for i, p in enumerate(PEOPLE[:voters])}
        known = *core_modules(PlainJobs(audits, anchor_rounds)), *modules
        self.losses: dict[bytes, int | None] = {}  # losses of trainers that commit to another loss, or to none
        self.start_chain(Genesis("world", 1_000, bytes(16), founders, newest_module_versions(known)), known)

    def start_chain(self, genesis: Genesis, modules: Sequence[Module[Any]]) -> None:
        """Create the chain of this genesis with a program that has these modules."""
        self.genesis, self.chain = genesis, genesis.chain_id
        self.rules = LedgerRules(genesis, FastVerifier(), tuple(modules))
        state = self.rules.genesis_state()
        self.ledger = LedgerApplication(self.rules, CurrentState(state), state.state_root)

    @property
    def state(self) -> LedgerState:
        return self.ledger.state

    # Transactions

    def nonce(self, person: FastSigner) -> int:
        member = self.state.members.members.get(person.public)
        return member.nonce if member else 0

    def tx(self, person: FastSigner, kind: str, content: Any, ahead: int = 1, expires: int | None = None) -> Signed:
        last = self.state.height + 10 if expires is None else expires
        return sign_message(person, self.chain, Transaction(self.nonce(person) + ahead, last, kind, codec.encode(content)))

    def admission(
        self,
        newcomer: FastSigner,
        by: FastSigner = PEOPLE[0],
        token: FastSigner = TOKEN,
        expires: int = FAR_MS,
        holder: FastSigner | None = None,
    ) -> Signed:
        """Admit a newcomer. `holder` is the intended owner of the token, if it is another one."""
        invitation = self.invitation(by, token, expires)
        signature = token.sign(token_preimage(self.chain, (holder or newcomer).public))
        return self.tx(newcomer, "member/admit", AdmitMember(invitation, signature, "newcomer", ()))

    def invitation(self, by: FastSigner = PEOPLE[0], token: FastSigner = TOKEN, expires: int = FAR_MS) -> Signed:
        return sign_message(by, self.chain, Invitation(token.public, expires))

    def rotation(self, person: FastSigner, new: FastSigner, ahead: int = 1) -> Signed:
        return self.tx(
            person, "member/rotate", RotateKey(new.public, new.sign(rotation_preimage(self.chain, person.public))), ahead
        )

    def double(self, person: FastSigner, height: int = 1) -> Evidence:
        """Return a proof that this person signed two prepares for one slot."""
        first, second = (sign_message(person, self.chain, Prepare(bytes(32), height, 0, block * 32)) for block in (b"a", b"b"))
        return Evidence(first, second)

    def start(self, author: FastSigner = PEOPLE[0], spec: bytes = LANGUAGE) -> bytes:
        """Start a job and return its id."""
        signed = self.tx(author, "job/start", StartJob(spec))
        self.decide(signed)
        return job_id(author.public, self.rules.open_transaction(signed))

    # Blocks

    def decide(
        self,
        *transactions: Signed,
        closings: tuple[RoundCertificate, ...] = (),
        evidence: tuple[Evidence, ...] = (),
        empty_after: int = 0,
    ) -> LedgerState:
        """Decide one block, then `empty_after` empty ones."""
        self.decide_body(codec.encode(BlockBody(closings, evidence, transactions)))
        self.decide_empty(empty_after)
        return self.state

    def decide_empty(self, count: int) -> None:
        for _ in range(count):
            self.decide()

    def decide_body(self, body: bytes, after_ms: int = 1) -> LedgerState:
        """Apply a decided body, as every peer does. The new model roots are arbitrary hashes."""
        before = self.state
        transition = compute_transition(
            self.rules, before, before.height + 1, before.time_ms + after_ms, before.state_root, decode_body(body)
        )
        self.failures = transition.failures
        roots = {job: self.new_root(transition.state.jobs.jobs[job], job) for job in stepped(transition)}
        cut = {key: back.anchor.root for key, back in transition.rolled_back.items() if back.round == back.anchor.round}
        state = transition.finish_state(roots | cut)
        self.keep(before, state, body)
        self.ledger.advance_state(state, before.state_root)
        self.follow()
        return self.state

    def new_root(self, job: Job, key: bytes) -> bytes:
        return hashlib.sha256(key + self.state.state_root).digest()

    def keep(self, before: LedgerState, after: LedgerState, body: bytes) -> None:
        """Keep nothing of a decided block."""

    def follow(self) -> None:
        """Keep books of exactly the open rounds, as `peer.node.open_rounds` does."""
        running = self.state.jobs.running()
        books = {
            key: book for key, book in self.ledger.rounds.items() if key in running and book.terms.round == running[key].round
        }
        for key, job in running.items():
            terms = job.round_terms(key)
            old = books.get(key)
            if old is None or old.terms != terms:
                books[key] = OpenRoundState(terms, PEOPLE[0].public, 0.0, TIMERS)
            if old is not None and old.terms != terms and old.terms.model_root == terms.model_root:
                books[key].import_from(old)
        self.ledger.rounds.clear()
        self.ledger.rounds.update(books)

    def read_back(self) -> LedgerState:
        """Return the state after encoding and decoding."""
        return self.rules.decode_state(self.rules.encode_state(self.state))

    def problem(
        self, *transactions: Signed, closings: tuple[RoundCertificate, ...] = (), evidence: tuple[Evidence, ...] = ()
    ) -> str | None:
        return self.rules.why_body_refused(self.state, codec.encode(BlockBody(closings, evidence, transactions)))

    # Rounds

    def job(self, key: bytes) -> Job:
        return self.state.jobs.jobs[key]

    def proposal(self, key: bytes, trainer: bytes) -> Signed:
        job = self.job(key)
        loss = None
        if key in self.state.audits.jobs and (said := self.losses.get(trainer, LOSS)) is not None:
            loss = commit_loss(key, job.round, trainer, secret_of(trainer, job.round), said)
        proposal = Proposal(key, job.round, job.model_root, trainer, 1, trainer, None, loss=loss)
        return sign_message(BY_KEY[trainer], self.chain, proposal)

    def ballot(self, key: bytes, voter: bytes, verdicts: Mapping[bytes, Verdict]) -> Signed:
        job = self.job(key)
        judged = self.judgements(key, verdicts)
        return sign_message(BY_KEY[voter], self.chain, Ballot(key, job.round, job.model_root, judged, *self.nonces(key, voter)))

    def judgements(self, key: bytes, verdicts: Mapping[bytes, Verdict]) -> tuple[Judgement, ...]:
        return tuple(Judgement(t, signed_body_digest(self.proposal(key, t)), v) for t, v in sorted(verdicts.items()))

    def nonces(self, key: bytes, voter: bytes) -> tuple[bytes | None, bytes | None]:
        """Return an honest voter's revealed nonce and its commitment, or (None, None) if audits are not sampled."""
        audits = self.state.audits.jobs.get(key)
        if audits is None:
            return None, None
        known = audits.commitments.get(voter)
        return nonce_of(voter, known.round) if known else None, commit_nonce(nonce_of(voter, self.job(key).round))

    def vote(self, key: bytes, verdicts: Mapping[bytes, Verdict], voters: tuple[bytes, ...] | None = None) -> None:
        """Record proposals, vouches of all re-executors, and ballots of `voters` (default: all), with the same verdicts."""
        terms = self.ledger.rounds[key].terms
        vouched = {trainer: verdict for trainer, verdict in verdicts.items() if trainer in terms.trainers_to_vouch_for}
        self.vouch(key, dict.fromkeys(terms.reexecutors if vouched else (), vouched))
        self.cast(key, verdicts, voters)

    def vouch(self, key: bytes, verdicts: Mapping[bytes, Mapping[bytes, Verdict]]) -> None:
        """Record vouches, given the verdicts of each re-executor."""
        for voter, judged in verdicts.items():
            said = Vouch(key, self.job(key).round, self.judgements(key, judged))
            self.ledger.rounds[key].add_vouch(sign_message(BY_KEY[voter], self.chain, said), said, 0.0)

    def cast(self, key: bytes, verdicts: Mapping[bytes, Verdict], voters: tuple[bytes, ...] | None = None) -> None:
        """Record proposals of these trainers, and ballots of `voters` (default: all)."""
        book = self.ledger.rounds[key]
        for trainer in verdicts:
            signed = self.proposal(key, trainer)
            book.add_proposal(signed, codec.decode_message(signed.body, (Proposal,)))
        for voter in voters if voters is not None else self.job(key).voters:
            signed = self.ballot(key, voter, verdicts)
            book.add_ballot(signed, codec.decode_message(signed.body, (Ballot,)), 0.0)

    def closing(self, key: bytes, verdicts: Mapping[bytes, Verdict] | None = None) -> RoundCertificate:
        self.vote(key, dict.fromkeys(self.job(key).trainers, Verdict.ACCEPT) if verdicts is None else verdicts)
        closing = self.ledger.rounds[key].certificate()
        assert closing is not None
        return closing

    def cut_off(self, key: bytes, voter: bytes) -> Signed:
        return sign_message(BY_KEY[voter], self.chain, CutOff(key, self.job(key).round, ()))


def world_with_job(spec: bytes = LANGUAGE, author: FastSigner = PEOPLE[0], **terms: Any) -> tuple[World, bytes]:
    world = World(**terms)
    return world, world.start(author, spec)


NEW, OTHER = PEOPLE[5], PEOPLE[6]


def admitted(world: World, person: FastSigner, token: str = "token") -> None:
    world.decide(world.admission(person, token=FastSigner(token)))


def stood(world: World, person: FastSigner = NEW) -> None:
    admitted(world, person, f"token of {person.public.hex()}")
    height = world.state.height - 1
    world.decide(world.tx(person, "member/stand", StandAsVoter(height, world.state.certified_roots[height])))
