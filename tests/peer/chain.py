"""A ledger without consensus, on disk: a small chain with real keys, blocks, certificates, payloads and models; no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from consensus.effects import DecidedBlock
from ledger.blocks.application import LedgerApplication
from ledger.core.genesis import TRAINER, Founder, Genesis, ModuleVersion
from ledger.jobs import StartJob, job_id
from ledger.ledger_state import CurrentState, LedgerRules, core_modules
from protocol import codec as wire
from protocol.identity import Ed25519Verifier, Identity, Signed, sign_message
from protocol.messages import Ballot, Judgement, Proposal, Transaction, Vouch
from protocol.verdicts import Verdict
from rounds.round_state import OpenRoundState, RoundTimeouts
from storage.disk_blob_store import DiskBlobStore
from storage.ledger_store import LedgerStore
from tests.ledger.blocks import decided_after
from tests.ledger.world import MODULES
from training.job_spec import JobSpec
from training.model_store import JobModelStore
from training.objectives.registry import ScratchObjective
from training.replicated import error_feedback
from training.replicated.error_feedback import buffer_digest
from training.transformer import ModelSpec

MODEL = ModelSpec(vocabulary=16, context=8, width=8, layers=1, heads=2, kv_heads=1, hidden=8)
LANGUAGE = JobSpec(name="tiny", tokenizer=bytes(32), data=bytes(32), model=MODEL, rounds=2, byzantine_max=0)
SCRATCH = JobSpec(name="test", objective="scratch", rounds=1, byzantine_max=0)
TIMERS = RoundTimeouts(1.0, 1.0)


def identities(count: int) -> list[Identity]:
    return sorted((Identity(bytes([n + 1]) * 32) for n in range(count)), key=lambda identity: identity.public)


def genesis_of(
    founders: Sequence[Identity],
    roles: tuple[str, ...] = (),
    network: str = "test",
    modules: tuple[ModuleVersion, ...] = (),
) -> Genesis:
    """Return a genesis. Its modules default to those of a test network."""
    return Genesis(
        network, 1_000, bytes(16), {founder.public: Founder("founder", roles) for founder in founders}, modules or MODULES
    )


class Chain:
    """A chain of four voters, all of them trainers. All four decide every block."""

    def __init__(self, folder: Path) -> None:
        self.people = identities(4)
        self.genesis = genesis_of(self.people, (TRAINER,), "chain")
        self.id = self.genesis.chain_id
        folder.mkdir(exist_ok=True)
        self.store, self.blobs = LedgerStore(folder / "ledger.db", self.id), DiskBlobStore(folder / "blobs", folder / "buffers")
        self.host = JobModelStore(folder / "models")
        self.rules = LedgerRules(self.genesis, Ed25519Verifier(), core_modules(self.host))
        first = self.rules.genesis_state()
        self.ledger = LedgerApplication(self.rules, CurrentState(first), first.state_root)
        self._last: DecidedBlock | None = None

    # Agreement

    def decide(self, body: bytes | None = None) -> DecidedBlock:
        """Decide the next block with the ledger's own proposal (or `body`), signed by all voters; store and apply it."""
        state = self.ledger.state
        height = state.height + 1
        content = self.ledger.make_body(height, 0) if body is None else body
        assert content is not None and self.ledger.why_body_refused(height, content, b"") is None
        decided = decided_after(state, self._last, self.id, content, self.people)
        self.store.append_records([decided])
        self._apply(decided)
        self._last = decided
        return decided

    def _apply(self, decided: DecidedBlock) -> None:
        block = decided.decode()
        transition = self.rules.apply_block(self.ledger.state, block)
        roots = {
            job: self.host.create_model(job, transition.state.jobs.jobs[job].spec, self.blobs.read_range)
            for job in transition.started_jobs
        }
        roots |= {closed.job: self.host.apply_round(closed, self.blobs.read_range) for closed in transition.closed_rounds}
        state = transition.finish_state(roots)
        self.store.save_state(state.height, state.state_root, self.rules.encode_state(state), tables=state.tables)
        self.ledger.advance_state(state, block.state_root)
        self.ledger.mempool.prune_transactions(self.rules, state)
        self.ledger.rounds.clear()
        for key, job in state.jobs.running().items():
            self.ledger.rounds[key] = OpenRoundState(job.round_terms(key), None, 0.0, TIMERS)

    def settle(self) -> None:
        while self.ledger.has_work():
            self.decide()

    # Jobs

    def start(self, spec: JobSpec) -> bytes:
        return job_id(self.people[0].public, self.say(self.people[0], "job/start", StartJob(spec.encode())))

    def say(self, author: Identity, kind: str, content: object) -> Transaction:
        """Decide a transaction in the next block and return it."""
        transaction = Transaction(
            self.ledger.state.members.members[author.public].nonce + 1, self.ledger.state.height + 50, kind, wire.encode(content)
        )
        self.ledger.mempool.add_transaction(sign_message(author, self.id, transaction))
        self.decide()
        return transaction

    def proposal(self, key: bytes, trainer: Identity) -> Signed:
        """Return a signed proposal with a real payload of a known update, kept as a blob."""
        job = self.ledger.state.jobs.jobs[key]
        model = self.host.open_model(key, job.round)
        m = ScratchObjective().deterministic_update(key, job.round, trainer.public, model.layout.size).astype(np.float32)
        buffer = error_feedback.make_buffer(m, model.header(trainer.public), model.spec)
        assert buffer is not None
        payload = self.blobs.add_bytes(model.encode_payload(trainer.public, buffer.dequantize()))
        size = self.blobs.size(payload)
        assert size is not None
        return sign_message(
            trainer, self.id, Proposal(key, job.round, job.model_root, payload, size, buffer_digest(buffer), None)
        )

    def play(self, key: bytes, rejected: int = 0, reason: Verdict = Verdict.REPLAY) -> None:
        """Play one round: everybody proposes, vouches and votes, and the round is closed. The last `rejected` trainers are
        refused.
        """
        job, book = self.ledger.state.jobs.jobs[key], self.ledger.rounds[key]
        by_key = {person.public: person for person in self.people}
        judgements = []
        for place, trainer in enumerate(job.trainers):
            signed = self.proposal(key, by_key[trainer])
            book.add_proposal(signed, wire.decode_message(signed.body, (Proposal,)))
            verdict = Verdict.ACCEPT if place < len(job.trainers) - rejected else reason
            judgements.append(Judgement(trainer, hashlib.sha256(signed.body).digest(), verdict))
        for person in self.people:
            if person.public in book.terms.reexecutors:
                vouch = Vouch(key, job.round, tuple(judgements))
                book.add_vouch(sign_message(person, self.id, vouch), vouch, 0.0)
            message = Ballot(key, job.round, job.model_root, tuple(judgements))
            book.add_ballot(sign_message(person, self.id, message), message, 0.0)
        self.decide()

    def close(self) -> None:
        self.store.close()


def lived(folder: Path) -> Chain:
    """Return a chain with a language job of two rounds (one trainer is rejected in the first), a scratch job, and the closing
    block.
    """
    chain = Chain(folder)
    language = chain.start(LANGUAGE)
    chain.play(language, rejected=1)
    chain.play(chain.start(SCRATCH))
    chain.play(language)
    chain.settle()
    return chain


def unfinished(folder: Path) -> Chain:
    """Return a chain whose last block closes a round. No block has certified the round's effect yet."""
    chain = Chain(folder)
    language = chain.start(replace(LANGUAGE, rounds=9))
    for _ in range(2):
        chain.play(language)
    return chain
