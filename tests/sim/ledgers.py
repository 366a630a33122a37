"""The real ledger, with a counter as the subject of decisions, and chains of hashes as models."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

from clients.ledger.clients_module import MODULE, OBJECTIVE, ClientsModule
from consensus.block import BODY_BYTES_MAX, Block, encode_block
from curation.ledger.curation_module import ANNOTATOR_ROLE, CurationModule
from ledger.core.genesis import TRAINER, Founder, Genesis
from ledger.core.module import BlockContext, DecodedTransaction, Module, Refused, StateChange, StateReader
from ledger.jobs import AuditTerms, ClosedRound, JobRolledBack, JobTerms, ModelReference
from ledger.ledger_state import LedgerRules, LedgerState, StateTransition, core_modules, newest_module_versions
from ledger.tables import Table
from protocol import codec
from protocol.codec import Count, Digest, Key, Length
from protocol.errors import RemoteProtocolError
from protocol.identity import Signed, Verifier
from tests.ledger.blocks import with_rows_of

CREATED_MS = 1_000_000
PROPOSAL_SECONDS = 4.0  # virtual; the most that a lying or stopped trainer adds to a round
ADDED_MAX = 1_000
ADDS_KEPT = 7  # of one author; then all are deleted at once
TRAINING, CLIENT = (b"audited", b"sampled", b"plain"), b"client"  # kinds of jobs
AUDITS = AuditTerms(rate=1.0, auditors=2, window=4, suspension_rounds=5, response_ms=300, serving_ms_per_reexecutor=100)


@dataclass(frozen=True, slots=True)
class Add:
    """`counter/add`"""

    amount: Count


@dataclass(frozen=True, slots=True)
class Added:
    amount: Count
    height: Count


@dataclass(frozen=True, slots=True)
class CounterState:
    total: Count = 0
    by: Annotated[dict[Key, Count], Length(0, 10_000)] = field(default_factory=dict)
    log: Digest = bytes(32)  # hash chain of all added numbers: the order matters
    adds: Table[Added] = field(default_factory=lambda: Table(Added))  # the last of each author


class CounterModule(Module[CounterState]):
    name = "counter"
    contents: ClassVar[Mapping[str, type]] = {"counter/add": Add}
    state_type = CounterState

    def genesis_state(self, genesis: Genesis) -> CounterState:
        return CounterState()

    def apply_transaction(
        self, state: CounterState, said: DecodedTransaction, view: StateReader, context: BlockContext
    ) -> StateChange:
        add, author = said.content, said.author
        if add.amount > ADDED_MAX:
            raise Refused(f"{add.amount} is more than {ADDED_MAX}")
        log = hashlib.sha256(state.log + author + said.transaction.content).digest()
        count = state.by.get(author, 0) + 1
        adds = state.adds.with_rows({author + b"%d" % count: Added(add.amount, context.height)})
        if count % ADDS_KEPT == 0:
            adds = adds.with_rows({author + b"%d" % old: None for old in range(count - ADDS_KEPT, count)})
        return StateChange(CounterState(state.total + add.amount, {**state.by, author: count}, log, adds))


class CountingJobs:
    """Jobs with the specification `audited:rounds`, `sampled:rounds`, `plain:rounds` or `client:rounds`.

    The first three are re-executed before the ballot, after it, or never. With `:alone` only the author trains, beside another
    job. The last one is the job of a client run. With `:job:round:root`, in hexadecimal, it continues from a saved model.
    """

    def terms_of_spec(self, spec: bytes) -> JobTerms:
        kind, _, rest = spec.partition(b":")
        rounds, _, who = rest.partition(b":")
        if kind == CLIENT and rounds.isdigit():
            before = continued_model(spec)
            return JobTerms(
                "run", OBJECTIVE, int(rounds), True, True, PROPOSAL_SECONDS, continues=before, anchor_rounds=4, on_request=True
            )
        if kind not in TRAINING or not rounds.isdigit() or who not in (b"", b"alone"):
            raise RemoteProtocolError("bad-job", repr(spec))
        audits = AUDITS if kind == b"sampled" else None
        return JobTerms("count", "scratch", int(rounds), kind == b"audited", not who, PROPOSAL_SECONDS, audits, anchor_rounds=4)

    def why_continuation_refused(self, before: bytes, spec: bytes) -> str | None:
        return None


def continued_model(spec: bytes) -> ModelReference | None:
    """Return the saved model with which a run continues; None: the job begins with a model of its own."""
    kind, _, *named = spec.split(b":")
    if kind != CLIENT or not named:
        return None
    job, number, root = named
    return ModelReference(bytes.fromhex(job.decode()), int(number), bytes.fromhex(root.decode()))


def genesis_of(keys: Sequence[bytes], salt: bytes = bytes(16), curates: bool = False, has_runs: bool = False) -> Genesis:
    """Return the genesis. In a network with curation all founders but the last one serve annotators."""
    *first, last = sorted(keys)
    roles = (ANNOTATOR_ROLE, TRAINER) if curates else (TRAINER,)
    founders = {key: Founder("founder", roles) for key in first} | {last: Founder("founder", (TRAINER,))}
    left_out = {CurationModule.name: not curates, MODULE: not has_runs}
    running = [module for module in modules() if not left_out.get(module.name, False)]
    return Genesis("simulated", CREATED_MS, salt, founders, newest_module_versions(running))


def modules() -> tuple[Module[Any], ...]:
    """Return all modules. A network runs those that its genesis names."""
    return *core_modules(CountingJobs()), CounterModule(), CurationModule(), ClientsModule(CountingJobs())


def rules_of(genesis: Genesis, verifier: Verifier) -> LedgerRules:
    return LedgerRules(genesis, verifier, modules())


def finish(transition: StateTransition, before: LedgerState) -> LedgerState:
    """Compute model roots: a hash of the job at first, then of the last root and the accepted updates.

    A run that continues from a saved model begins with its root. A round on request that accepts nothing keeps the root.
    """
    roots = {job: hashlib.sha256(b"model" + job).digest() for job in transition.started_jobs}
    for job in transition.started_jobs:
        saved = continued_model(transition.state.jobs.jobs[job].spec)
        roots[job] = saved.root if saved is not None else roots[job]
    for closed in transition.model_steps:
        root = before.jobs.jobs[closed.job].model_root
        roots[closed.job] = _stepped(root, closed) if closed.outcome.accepted or not closed.brief else root
    for job, back in transition.rolled_back.items():
        roots[job] = rolled_back(back)
    return transition.finish_state(roots)


def rolled_back(back: JobRolledBack) -> bytes:
    """Return the root of the anchor's model under another round's number."""
    is_same = back.round == back.anchor.round
    return back.anchor.root if is_same else hashlib.sha256(b"back" + back.anchor.root + back.round.to_bytes(8, "big")).digest()


def _stepped(root: bytes, closed: ClosedRound) -> bytes:
    return hashlib.sha256(root + b"".join(closed.outcome.accepted[key] for key in sorted(closed.outcome.accepted))).digest()


def read_again(state: LedgerState, before: LedgerState) -> LedgerState:
    """Return the state as `decode_state` would, if `before` is such a state. Unchanged modules are reused."""
    modules = {
        name: value if value is before.modules[name] else codec.decode(type(value), state.encoded_module(name), BODY_BYTES_MAX)
        for name, value in state.modules.items()
    }
    return with_rows_of(replace(state, modules=modules), state)


def with_wrong_bit(state: LedgerState, model: bool) -> LedgerState:
    """Return the state after a memory fault in the counter, or in the model of each running job."""
    running = state.jobs.running()
    if model and running:
        other = {key: replace(job, model_root=hashlib.sha256(job.model_root).digest()) for key, job in running.items()}
        return state.with_modules(jobs=replace(state.jobs, jobs={**state.jobs.jobs, **other}))
    counter: CounterState = state.modules[CounterModule.name]
    return state.with_modules(counter=replace(counter, total=counter.total ^ 1))


class SharedRules(LedgerRules):
    """Rules that compute each transition once for all peers: equal states and bodies give the identical new state.

    Its references keep states alive, so that comparing identities is safe.
    """

    def __init__(self, genesis: Genesis, verifier: Verifier) -> None:
        super().__init__(genesis, verifier, modules())
        self._applied: dict[tuple[int, bytes, bytes], tuple[StateTransition, LedgerState, LedgerState]] = {}
        self._problems: dict[tuple[int, bytes, bytes], str | None] = {}
        self._next: dict[tuple[int, bytes, bytes], tuple[LedgerState, Any]] = {}

    def apply_block(self, state: LedgerState, block: Block) -> StateTransition:
        return self.applied(state, block, b"")[0]

    def applied(self, state: LedgerState, block: Block, digest: bytes) -> tuple[StateTransition, LedgerState]:
        key = (state.height, state.state_root, digest or encode_block(block))
        known = self._applied.get(key)
        if known is None:
            transition = super().apply_block(state, block)
            known = self._applied[key] = (transition, finish(transition, state), state)
        return known[0], known[1]

    def why_body_refused(self, state: LedgerState, body: bytes) -> str | None:
        key = (state.height, state.state_root, body)
        if key not in self._problems:
            self._problems[key] = super().why_body_refused(state, body)
        return self._problems[key]

    def apply_transaction(self, state: LedgerState, signed: Signed) -> LedgerState:
        key = (id(state), signed.body, signed.signature)
        known = self._next.get(key)
        if known is None:
            try:
                after: Any = super().apply_transaction(state, signed)
            except (Refused, RemoteProtocolError) as error:
                after = error
            known = self._next[key] = (state, after)
        if isinstance(known[1], Exception):
            raise known[1].with_traceback(None)
        return known[1]  # type: ignore[no-any-return]

    def forget_below(self, height: int) -> None:
        """Drop cached results below `height`, as a bound. A later request computes its result again."""
        self._applied = {key: value for key, value in self._applied.items() if key[0] >= height}
        self._problems = {key: value for key, value in self._problems.items() if key[0] >= height}
        self._next = {key: value for key, value in self._next.items() if value[0].height >= height}
