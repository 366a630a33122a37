"""The replicated state and its one transition: what a decided block does to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any

from consensus.ballots import Closing, check_closing, outcome
from consensus.block import BODY_BYTES_MAX, Block
from ledger import members as membership
from ledger.genesis import Genesis
from ledger.jobs import RUNNING_MAX, UNBUILT, ClosedRound, Job, JobRules, JobsModule, JobsState, bounded
from ledger.members import MembersModule, MembersState
from ledger.transactions import Context, Module, Refused
from protocol import codec, merkle
from protocol.codec import Count, Digest, Length
from protocol.errors import RemoteProtocolError
from protocol.identity import Signed, Verifier, open_signed
from protocol.limits import TRANSACTION_LIFETIME_HEIGHTS, TRANSACTIONS_PER_BLOCK_MAX
from protocol.messages import Ballot, CutOff, Proposal, Transaction


@dataclass(frozen=True, slots=True)
class Body:
    """What this ledger puts into blocks."""

    closings: Annotated[tuple[Closing, ...], Length(0, RUNNING_MAX)]
    transactions: Annotated[tuple[Signed, ...], Length(0, TRANSACTIONS_PER_BLOCK_MAX)]


EMPTY_BODY = codec.encode(Body((), ()))


def decode_body(data: bytes) -> Body:
    return codec.decode(Body, data, BODY_BYTES_MAX)


@dataclass(frozen=True)
class State:
    """After the block of `height`. The root leaves the height out: an empty block changes nothing."""

    height: int
    time_ms: int
    modules: Mapping[str, Any]
    certified_roots: Mapping[int, bytes]  # of the last heights, from the blocks; not under the root, which they contain

    @cached_property
    def root(self) -> bytes:
        leaves = [merkle.leaf_hash(name.encode() + b"\x00" + codec.encode(value)) for name, value in sorted(self.modules.items())]
        return merkle.root(leaves)

    @property
    def members(self) -> MembersState:
        value: MembersState = self.modules["members"]
        return value

    @property
    def jobs(self) -> JobsState:
        value: JobsState = self.modules["jobs"]
        return value

    def with_modules(self, **changes: Any) -> State:
        return replace(self, modules={**self.modules, **changes})


CERTIFIED_ROOTS_KEPT = 100  # how old the root may be that a candidate shows to prove it has caught up


@dataclass(frozen=True, slots=True)
class Transition:
    """A block's effect before the models have followed: `state` still has the old model roots of stepping jobs."""

    state: State
    started: tuple[bytes, ...]  # jobs whose model is to be made
    closed: tuple[ClosedRound, ...]

    def finish(self, model_roots: Mapping[bytes, bytes]) -> State:
        """The state with the models' new roots: exactly those of `started` and `closed`."""
        assert model_roots.keys() == {*self.started, *(closed.job for closed in self.closed)}
        jobs = self.state.jobs.jobs
        changed = {key: replace(jobs[key], model_root=root) for key, root in model_roots.items()}
        return self.state.with_modules(jobs=JobsState({**jobs, **changed}))


MODULE_BYTES_MAX = 512 << 20  # far above what the bounds inside the modules allow: job specifications are the largest, 18 MB


@dataclass(frozen=True, slots=True)
class StoredState:
    """A `State` on disk."""

    height: Count
    time_ms: Count
    modules: dict[str, Annotated[bytes, Length(0, MODULE_BYTES_MAX)]]
    certified_roots: dict[Count, Digest]


class Rules:
    """The transition rules with what they need injected; `modules` lists the features that take part."""

    def __init__(self, genesis: Genesis, verifier: Verifier, job_rules: JobRules, features: Sequence[Module] = ()) -> None:
        self.genesis = genesis
        self.chain_id = genesis.chain_id
        self.verifier = verifier
        self.jobs = JobsModule(job_rules)
        modules: list[Module] = [MembersModule(), self.jobs, *features]
        self.modules = {module.name: module for module in modules}
        self._by_kind = {kind: module for module in self.modules.values() for kind in module.kinds}

    def first_state(self) -> State:
        modules = {name: module.genesis(self.genesis) for name, module in self.modules.items()}
        return State(0, self.genesis.created_ms, modules, {})

    def encode_state(self, state: State) -> bytes:
        modules = {name: codec.encode(value) for name, value in state.modules.items()}
        return codec.encode(StoredState(state.height, state.time_ms, modules, dict(state.certified_roots)))

    def decode_state(self, data: bytes) -> State:
        stored = codec.decode(StoredState, data, len(data))
        values: dict[str, Any] = {
            name: codec.decode(self.modules[name].state_type(), value, len(value)) for name, value in stored.modules.items()
        }
        return State(stored.height, stored.time_ms, values, stored.certified_roots)

    # Transactions

    def apply_transaction(self, state: State, signed: Signed, height: int) -> State:
        """Raises `Refused` or `RemoteProtocolError` if this transaction cannot be the next one."""
        transaction = self.open_transaction(signed)
        module = self._by_kind.get(transaction.kind)
        if module is None:
            raise RemoteProtocolError("unknown-transaction", transaction.kind)
        if not height <= transaction.expires <= height + TRANSACTION_LIFETIME_HEIGHTS:
            raise Refused(f"{transaction.kind} expires at height {transaction.expires}, this is {height}")
        state = state.with_modules(members=membership.use_nonce(state.members, transaction, signed.signer))
        context = Context(self.chain_id, height, self.verifier, state.certified_roots)
        return state.with_modules(**{module.name: module.apply(state.modules, transaction, signed.signer, context)})

    def open_transaction(self, signed: Signed) -> Transaction:
        return open_signed(signed, self.chain_id, self.verifier, (Transaction,))

    # Rounds

    def open_closing(self, closing: Closing) -> tuple[dict[bytes, Ballot], dict[bytes, CutOff], dict[bytes, Proposal]]:
        """The verified messages of a closing by signer; `RemoteProtocolError` if one is not what it should be."""

        def opened(parts: tuple[Signed, ...], kind: type) -> dict[bytes, Any]:
            return {part.signer: open_signed(part, self.chain_id, self.verifier, (kind,)) for part in parts}

        return opened(closing.ballots, Ballot), opened(closing.cut_offs, CutOff), opened(closing.proposals, Proposal)

    def close(self, state: State, closing: Closing) -> ClosedRound:
        """Raises `Refused` or `RemoteProtocolError` if this closing does not close an open round of `state`."""
        job = state.jobs.running().get(closing.job)
        if job is None or job.round != closing.round:
            raise Refused(f"round {closing.round} of job {closing.job.hex()[:8]} is not open")
        terms = job.terms(closing.job)
        ballots, cut_offs, proposals = self.open_closing(closing)
        problem = check_closing(terms, closing, ballots, cut_offs, proposals)
        if problem:
            raise Refused(f"round {closing.round}: {problem}")
        return ClosedRound(closing.job, closing.round, outcome(terms, ballots), closing.proposals, tuple(sorted(ballots)))

    # Blocks

    def transition(self, state: State, height: int, time_ms: int, certified_root: bytes, body: Body) -> Transition:
        """What a block with this body does. Raises `Refused` or `RemoteProtocolError` if it may not follow `state`."""
        assert height == state.height + 1
        closed = [self.close(state, closing) for closing in body.closings]
        if len({(item.job) for item in closed}) < len(closed):
            raise Refused("one round of a job a block")
        after = state
        for signed in body.transactions:
            after = self.apply_transaction(after, signed, height)
        after = after.with_modules(members=membership.end_block(after.members, height))
        jobs: dict[bytes, Job] = dict(after.jobs.jobs)
        for item in closed:
            jobs[item.job] = self.jobs.close_round(jobs[item.job], after.members, height, item.outcome)
        started = tuple(sorted(key for key, job in jobs.items() if job.model_root == UNBUILT))
        for key in started:  # other transactions of this block may have changed who votes and trains
            jobs[key] = self.jobs.open_round(jobs[key], after.members, height, None)
        roots = {h: root for h, root in state.certified_roots.items() if h >= height - CERTIFIED_ROOTS_KEPT}
        roots[height - 1] = certified_root
        after = replace(after, height=height, time_ms=time_ms, certified_roots=roots).with_modules(jobs=JobsState(bounded(jobs)))
        return Transition(after, started, tuple(closed))

    def apply(self, state: State, block: Block) -> Transition:
        return self.transition(state, block.height, block.time_ms, block.state_root, decode_body(block.body))

    def problem(self, state: State, body: bytes) -> str | None:
        """Why a body may not be decided after `state`; None if it may."""
        try:
            self.transition(state, state.height + 1, state.time_ms, state.root, decode_body(body))
        except (Refused, RemoteProtocolError) as error:
            return str(error)
        return None
