"""The replicated state and its one transition: what a decided block does to it."""

from __future__ import annotations

import functools
import hashlib
import operator
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Any, TypeVar

from consensus.block import BODY_BYTES_MAX, Block
from consensus.evidence import KINDS, Evidence, verify_evidence
from ledger import members as membership
from ledger.audits.docket import AuditsModule, FirstAuditsModule
from ledger.audits.state import AuditsState
from ledger.core.genesis import Genesis, ModuleVersion
from ledger.core.module import Change, Context, Module, Refused, Replaced, Said
from ledger.jobs import (
    RUNNING_MAX,
    ClosedRound,
    JobRules,
    JobsModule,
    JobsOfEstimatesModule,
    JobsOfModelsModule,
    JobsState,
    JobStarted,
)
from ledger.members import Expelled, MembersModule, MembersState, Rekeyed
from ledger.network import NetworkModule, NetworkOfLimitsModule, NetworkState, Upgrade
from ledger.tables import Table, table_fields
from protocol import codec, merkle
from protocol.codec import Count, Digest, Length
from protocol.errors import RemoteProtocolError, StorageError, UserError
from protocol.identity import Signed, Verifier, open_signed
from protocol.limits import (
    EVIDENCE_PER_BLOCK_MAX,
    PLAIN_BLOB_BYTES_MAX,
    TRANSACTION_LIFETIME_HEIGHTS,
    TRANSACTIONS_PER_BLOCK_MAX,
)
from protocol.messages import Ballot, CutOff, Proposal, Transaction
from protocol.units import nth_round
from rounds.ballots import Closing, check_closing, outcome

M = TypeVar("M")
T = TypeVar("T")

OPENED_MAX = 512  # signed messages kept decoded: one round of VOTERS_MAX ballots and TRAINERS_MAX proposals; then about 20 MB


@dataclass(frozen=True, slots=True)
class Body:
    """The body of a block. It acts in the order of the fields."""

    closings: Annotated[tuple[Closing, ...], Length(0, RUNNING_MAX)]
    evidence: Annotated[tuple[Evidence, ...], Length(0, EVIDENCE_PER_BLOCK_MAX)]  # ascending by culprit, each once
    transactions: Annotated[tuple[Signed, ...], Length(0, TRANSACTIONS_PER_BLOCK_MAX)]


def module_digest(encoded: bytes) -> bytes:
    return hashlib.sha256(encoded).digest()


def root_over(modules: Mapping[str, bytes]) -> bytes:
    """The state root over the digests of all modules by name: their names and their number are bound as well."""
    return merkle.root([merkle.leaf_hash(name.encode() + b"\x00" + digest) for name, digest in sorted(modules.items())])


EMPTY_BODY = codec.encode(Body((), (), ()))


def decode_body(data: bytes) -> Body:
    return codec.decode(Body, data, BODY_BYTES_MAX)


@dataclass(frozen=True)
class State:
    """After the block of `height`. The root leaves the height out: an empty block changes nothing."""

    height: int
    time_ms: int
    modules: Mapping[str, Any]
    certified_roots: Mapping[int, bytes]  # of the last heights, from the blocks; not under the root, which they contain
    # The last encoding of each module, handed on from state to state: most blocks leave most modules as they are.
    _encoded: dict[str, tuple[Any, bytes]] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def root(self) -> bytes:
        return root_over({name: module_digest(self.encoded(name)) for name in self.modules})

    def encoded(self, name: str) -> bytes:
        """The bytes of one module's state."""
        value, data = self._encoded.get(name, (None, b""))
        if value is not self.modules[name]:
            value, data = self.modules[name], codec.encode(self.modules[name])
            self._encoded[name] = (value, data)
        return data

    @cached_property
    def tables(self) -> dict[str, Table[Any]]:
        """All that the modules hold, by module and field."""
        named = [(name, value, of) for name, value in self.modules.items() for of in table_fields(type(value))]
        return {f"{name}/{of}": getattr(value, of) for name, value, of in named}

    def with_rows_of(self, other: State) -> State:
        """The same state, its tables read as those of `other`, which has the same rows."""
        for name, table in self.tables.items():
            table.take(other.tables[name])
        return self

    @cached_property
    def _by_type(self) -> dict[type, Any]:
        return {type(value): value for value in self.modules.values()}

    def of(self, kind: type[T]) -> T:
        """The state of the module that has this state type."""
        value: T = self._by_type[kind]
        return value

    @property
    def members(self) -> MembersState:
        return self.of(MembersState)

    @property
    def jobs(self) -> JobsState:
        return self.of(JobsState)

    @property
    def audits(self) -> AuditsState:
        return self.of(AuditsState)

    def with_modules(self, **changes: Any) -> State:
        return State(self.height, self.time_ms, {**self.modules, **changes}, self.certified_roots, self._encoded)


TABLE_NAME_CHARACTERS_MAX = 40  # it is named together with a range of it where one is asked for
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
        return self.state.with_modules(jobs=replace(self.state.jobs, jobs={**jobs, **changed}))


STORED_MODULE_BYTES_MAX = (
    512 << 20
)  # far above what the bounds inside the modules allow: job specifications are the largest, 18 MB


@dataclass(frozen=True, slots=True)
class StoredState:
    """A `State` on disk."""

    height: Count
    time_ms: Count
    modules: dict[str, Annotated[bytes, Length(0, STORED_MODULE_BYTES_MAX)]]
    certified_roots: dict[Count, Digest]


def core_modules(job_rules: JobRules) -> tuple[Module[Any], ...]:
    """The modules of every network in all their versions, in their order inside a block."""
    jobs = JobsModule(job_rules), JobsOfEstimatesModule(job_rules), JobsOfModelsModule(job_rules)
    audits = FirstAuditsModule(job_rules), AuditsModule(job_rules)
    return MembersModule(), *jobs, *audits, NetworkModule(), NetworkOfLimitsModule()


def newest(modules: Iterable[Module[Any]]) -> tuple[ModuleVersion, ...]:
    """The last version of each module, in their order inside a block. A network is founded with these."""
    versions: dict[str, int] = {}
    for module in modules:
        versions[module.name] = max(module.version, versions.get(module.name, 0))
    return tuple(ModuleVersion(name, version) for name, version in versions.items())


class Unknown(Refused, UserError):
    """The network runs a version of a module that this program lacks; the text says which, and the way out."""


class Running:
    """The modules of one set of versions."""

    def __init__(self, modules: Sequence[Module[Any]]) -> None:
        self.modules = {module.name: module for module in modules}
        self.by_kind = {kind: module for module in modules for kind in module.contents}
        assert len(self.modules) == len({module.state_type for module in modules}) == len(modules), "one name, one type each"
        tables = [f"{module.name}/{of}" for module in modules for of in table_fields(module.state_type)]
        assert all(len(name) <= TABLE_NAME_CHARACTERS_MAX for name in tables)
        assert len(self.by_kind) == sum(len(module.contents) for module in modules), "a kind belongs to one module"


class Rules:
    """The transition rules of one network. `modules` are those that this program knows, in every version."""

    def __init__(self, genesis: Genesis, verifier: Verifier, modules: Sequence[Module[Any]]) -> None:
        self.genesis = genesis
        self.chain_id = genesis.chain_id
        self.verifier = verifier
        self._known = {ModuleVersion(module.name, module.version): module for module in modules}
        assert len(self._known) == len(modules), "each version once"
        self._running: tuple[tuple[ModuleVersion, ...], Running] | None = None
        self._begun: tuple[State, State] | None = None
        self._opened: OrderedDict[Signed, Any] = OrderedDict()
        self._judged: tuple[State, bytes, Transition | str] | None = None

    # Versions

    def running(self, versions: tuple[ModuleVersion, ...]) -> Running:
        """Raises `Unknown` if this program lacks one of them."""
        if self._running is None or self._running[0] != versions:
            for wanted in versions:
                self._require(wanted)
            self._running = (versions, Running([self._known[version] for version in versions]))
        return self._running[1]

    def _require(self, wanted: ModuleVersion, height: int = 0) -> Module[Any]:
        module = self._known.get(wanted)
        if module is None:
            known = sorted(version.version for version in self._known if version.name == wanted.name)
            knows = f"knows {', '.join(map(str, known))}" if known else "does not know it"
            goes_on, since = ("goes on with", f" from height {height}") if height else ("runs", "")
            what = f"this network {goes_on} {wanted.name} {wanted.version}{since}; this program {knows}"
            raise Unknown(f"{what}: install a newer one, and start this peer again")
        return module

    def knows_until(self, state: State) -> int | None:
        """The last height that this program can judge, as far as it is decided; None: it knows all that is due."""
        lacking = [upgrade.height for upgrade in state.of(NetworkState).due if _version(upgrade) not in self._known]
        return min(lacking) - 1 if lacking else None

    def why_unknown(self, state: State) -> str:
        """Which upgrade that is due this program lacks, for people; empty if none."""
        try:
            for upgrade in state.of(NetworkState).due:
                self._require(_version(upgrade), upgrade.height)
        except Unknown as error:
            return str(error)
        return ""

    def begun(self, state: State) -> State:
        """The state in which the next block acts: with the upgrades that its height begins with. Raises `Unknown`."""
        network = state.of(NetworkState)
        due = network.due_at(state.height + 1)
        if not due:
            return state
        if self._begun is None or self._begun[0] is not state:
            after = state
            for upgrade in due:
                module, old = self._require(_version(upgrade), upgrade.height), after.modules.get(upgrade.module)
                value = module.genesis(self.genesis) if old is None else module.upgraded(old, network.version(upgrade.module))
                network = network.moved_on(upgrade)
                after = after.with_modules(**{upgrade.module: value, NetworkModule.name: network})
            self._begun = (state, after)
        return self._begun[1]

    def blobs(self, state: State, seen: dict[str, Any]) -> Iterator[tuple[str, Mapping[bytes, int]]]:
        """Per module whose state has changed since `seen`: the blobs that every peer is to keep. `seen` is brought up to date."""
        for name, module in self._running_in(state).modules.items():
            if seen.get(name) is not state.modules[name]:
                seen[name] = state.modules[name]
                yield name, module.blobs(state.modules[name])

    def replaced(self, state: State, counts: dict[str, int]) -> Iterator[Replaced]:
        """Blobs that were replaced since `counts`, which is brought up to date."""
        for name, module in self._running_in(state).modules.items():
            found = module.replaced(state.modules[name], counts.get(name, 0))
            counts[name] = counts.get(name, 0) + len(found)
            yield from found

    def module(self, kind: type[M]) -> M:
        """The module of this class, and not of an earlier version's."""
        (found,) = (module for module in self._known.values() if type(module) is kind)
        return found

    @property
    def jobs(self) -> JobsModule:
        return self.module(JobsModule)

    @property
    def audits(self) -> AuditsModule:
        return self.module(AuditsModule)

    # States

    def first_state(self) -> State:
        modules = self.running(self.genesis.modules).modules.values()
        states = {module.name: in_order(module.genesis(self.genesis), None) for module in modules}
        return State(0, self.genesis.created_ms, dict(sorted(states.items())), {})

    def encode_state(self, state: State) -> bytes:
        modules = {name: state.encoded(name) for name in state.modules}
        return codec.encode(StoredState(state.height, state.time_ms, modules, dict(state.certified_roots)))

    def restored(self, encoded: bytes | None) -> State:
        """As the disk of this peer has it; the first one where there is none yet. Raises `Unknown`, and `StorageError`."""
        try:
            return self.decode_state(encoded) if encoded else self.first_state()
        except RemoteProtocolError as error:
            raise StorageError(
                f"the state on this disk cannot be read ({error.detail}): run the program that wrote it, or join the network "
                "again with a new data directory"
            ) from None

    def decode_state(self, data: bytes) -> State:
        """Raises `Unknown` for a version that this program lacks, `RemoteProtocolError` for what is no state."""
        stored = codec.decode(StoredState, data, len(data))
        encoded = stored.modules.get(NetworkModule.name, b"")
        network = codec.decode(NetworkState, encoded, len(encoded))
        running = self.running(network.modules).modules
        if stored.modules.keys() != running.keys():
            raise RemoteProtocolError("bad-state", f"modules {sorted(stored.modules)}, expected {sorted(running)}")
        values: dict[str, Any] = {}
        for name, value in stored.modules.items():
            try:
                values[name] = codec.decode(running[name].state_type, value, len(value))
            except RemoteProtocolError as error:
                raise RemoteProtocolError("bad-state", f"module {name} {running[name].version}: {error.detail}") from None
        return State(stored.height, stored.time_ms, values, stored.certified_roots)

    def open(self, signed: Signed, kinds: tuple[type[M], ...]) -> M:
        """`open_signed`, once for each message: a relayed message comes again in a block."""
        known = self._opened.get(signed)
        if known is not None and isinstance(known, kinds):
            return known
        message = self._opened[signed] = open_signed(signed, self.chain_id, self.verifier, kinds)
        if len(self._opened) > OPENED_MAX:
            self._opened.popitem(last=False)
        return message

    # Transactions

    def apply_transaction(self, state: State, signed: Signed) -> State:
        """Raises `Refused` or `RemoteProtocolError` if this transaction cannot be the next one."""
        return self._apply_transaction(self.begun(state), signed, self._context(state))[0]

    def _apply_transaction(self, state: State, signed: Signed, context: Context) -> tuple[State, tuple[Any, ...]]:
        """And the facts that follow from it."""
        transaction, height = self.open_transaction(signed), context.height
        module = self._running_in(state).by_kind.get(transaction.kind)
        if module is None:
            raise RemoteProtocolError("unknown-transaction", transaction.kind)
        if not height <= transaction.expires <= height + TRANSACTION_LIFETIME_HEIGHTS:
            raise Refused(f"{transaction.kind} expires at height {transaction.expires}, this is {height}")
        state = state.with_modules(members=membership.use_nonce(state.members, transaction, signed.signer))
        said = Said(signed.signer, codec.decode(module.contents[transaction.kind], transaction.content), transaction)
        change = module.apply(state.modules[module.name], said, state, context)
        return state.with_modules(**{module.name: change.state}), change.facts

    def open_transaction(self, signed: Signed) -> Transaction:
        return self.open(signed, (Transaction,))

    def patience(self, transaction: Transaction) -> tuple[bytes | None, bool]:
        """What `Module.can_wait` and `Module.lingers` say of a transaction."""
        module = next((module for module in self._known.values() if transaction.kind in module.contents), None)
        try:
            content = codec.decode(module.contents[transaction.kind], transaction.content) if module else None
        except RemoteProtocolError:
            return None, False  # it will be refused
        return (module.can_wait(content), module.lingers(content)) if module else (None, False)

    def _running_in(self, state: State) -> Running:
        return self.running(state.of(NetworkState).modules)

    def _context(self, state: State) -> Context:
        return Context(self.chain_id, state.height + 1, state.time_ms, self.verifier, state.certified_roots)

    # Evidence

    def expel(self, state: State, evidence: Evidence) -> State:
        """Raises `Refused` or `RemoteProtocolError` if the evidence proves nothing, or nothing that would change anything."""
        culprit = verify_evidence(evidence, self.chain_id, self.verifier)
        _require_known(state, (codec.decode_message(part.body, KINDS) for part in (evidence.first, evidence.second)))
        return state.with_modules(members=membership.expel(state.members, culprit, state.height + 1))

    def expel_all(self, state: State, evidence: Sequence[Evidence]) -> State:
        if any(left.culprit >= right.culprit for left, right in pairwise(evidence)):
            raise Refused("evidence must ascend by culprit, each once")
        for item in evidence:
            state = self.expel(state, item)
        return state

    # Rounds

    def open_closing(self, closing: Closing) -> tuple[dict[bytes, Ballot], dict[bytes, CutOff], dict[bytes, Proposal]]:
        """The verified messages of a closing by signer; `RemoteProtocolError` if one is not what it should be."""

        def opened(parts: tuple[Signed, ...], kind: type) -> dict[bytes, Any]:
            return {part.signer: self.open(part, (kind,)) for part in parts}

        return opened(closing.ballots, Ballot), opened(closing.cut_offs, CutOff), opened(closing.proposals, Proposal)

    def close(self, state: State, closing: Closing) -> ClosedRound:
        """Raises `Refused` or `RemoteProtocolError` if this closing does not close an open round of `state`."""
        job = state.jobs.running().get(closing.job)
        if job is None or job.round != closing.round:
            raise Refused(f"round {nth_round(closing.round)} of job {closing.job.hex()[:8]} is not open")
        terms = job.terms(closing.job)
        ballots, cut_offs, proposals = self.open_closing(closing)
        _require_known(state, proposals.values())
        problem = check_closing(terms, closing, ballots, cut_offs, proposals)
        if problem:
            raise Refused(f"round {nth_round(closing.round)}: {problem}")
        return ClosedRound(
            closing.job,
            closing.round,
            outcome(terms, ballots),
            closing.proposals,
            tuple(sorted(ballots)),
            reveals={voter: ballot.reveal for voter, ballot in ballots.items() if ballot.reveal is not None},
            commitments={voter: ballot.commitment for voter, ballot in ballots.items() if ballot.commitment is not None},
        )

    # Blocks

    def transition(self, state: State, height: int, time_ms: int, certified_root: bytes, body: Body) -> Transition:
        """What a block with this body does. Raises `Refused` or `RemoteProtocolError` if it may not follow `state`."""
        assert height == state.height + 1
        return _dated(self._effect(state, body), time_ms, certified_root)

    def apply(self, state: State, block: Block) -> Transition:
        """Raises `Refused` if the block may not follow `state`."""
        assert block.height == state.height + 1
        judged = self._judge(state, block.body)
        if isinstance(judged, str):
            raise Refused(judged)
        return _dated(judged, block.time_ms, block.state_root)

    def problem(self, state: State, body: bytes) -> str | None:
        """Why a body may not be decided after `state`; None if it may."""
        judged = self._judge(state, body)
        return judged if isinstance(judged, str) else None

    def _judge(self, state: State, body: bytes) -> Transition | str:
        """The last answer is kept: a body is judged, perhaps more than once, and then applied."""
        if self._judged is None or self._judged[0] is not state or self._judged[1] != body:
            try:
                self._judged = (state, body, self._effect(state, decode_body(body)))
            except (Refused, RemoteProtocolError) as error:
                self._judged = (state, body, str(error))
        return self._judged[2]

    def _effect(self, state: State, body: Body) -> Transition:
        """The effect of a body, whatever the block around it says.

        Closings are judged by the state before the block. Evidence expels. Transactions apply one after the other, after the
        evidence. Then every module takes its steps: the table of `ledger.core.module`.
        """
        before, state = state, self.begun(state)
        modules = self._running_in(state).modules
        closed = tuple(self.close(state, closing) for closing in body.closings)
        if len({item.job for item in closed}) < len(closed):
            raise Refused("one round of a job a block")
        after = self.expel_all(state, body.evidence)
        context = replace(self._context(state), facts=(*closed, *(Expelled(item.culprit) for item in body.evidence)))
        for signed in body.transactions:
            after, facts = self._apply_transaction(after, signed, context)
            context = replace(context, facts=(*context.facts, *facts))
        if context.of(Rekeyed):
            current = after.members.current
            after = after.with_modules(**{name: module.rekeyed(after.modules[name], current) for name, module in modules.items()})
        for step in (Module.settle.__name__, Module.end_block.__name__):
            for name, module in modules.items():
                change: Change = getattr(module, step)(after.modules[name], after, context)
                after = after.with_modules(**{name: change.state})
                context = replace(context, facts=(*context.facts, *change.facts))
        states = {name: _settled(value, before.modules.get(name)) for name, value in sorted(after.modules.items())}
        started = tuple(fact.job for fact in context.of(JobStarted))
        return Transition(replace(after, height=context.height, modules=states), started, closed)


def _dated(transition: Transition, time_ms: int, certified_root: bytes) -> Transition:
    """With what the block around the body says: its time, and the root of the state before it."""
    state = transition.state
    roots = {height: root for height, root in state.certified_roots.items() if height >= state.height - CERTIFIED_ROOTS_KEPT}
    roots[state.height - 1] = certified_root
    return replace(transition, state=replace(state, time_ms=time_ms, certified_roots=roots))


def in_order(new: Any, old: Any) -> Any:
    """A module's state as its bytes would give it back: all dictionaries ascend by key.

    Without this, a rule could depend on the order in which entries were put in, and a peer that restarted would compute another
    state than the others. `old` is in order, or nothing; an object that both share is passed over.
    """
    kind: Any = type(new)
    if new is old or kind in _WITHOUT_PARTS:
        return new
    if kind is dict:
        known = old if type(old) is dict else {}
        ordered = {key: in_order(item, known.get(key)) for key, item in sorted(new.items())}
        return new if list(ordered) == list(new) and all(map(operator.is_, ordered.values(), new.values())) else ordered
    if kind is tuple:
        items = tuple([in_order(item, None) for item in new])
        return new if all(map(operator.is_, items, new)) else items
    changed: dict[str, Any] = {}
    for name in _field_names(kind):
        part = getattr(new, name)
        value = in_order(part, getattr(old, name, None))
        if value is not part:
            changed[name] = value
    return replace(new, **changed) if changed else new


_WITHOUT_PARTS = frozenset({bytes, int, str, bool, float, type(None)})


@functools.cache
def _field_names(kind: type) -> tuple[str, ...]:
    """None of what is no dataclass."""
    return tuple(part.name for part in fields(kind)) if is_dataclass(kind) else ()


def _version(upgrade: Upgrade) -> ModuleVersion:
    return ModuleVersion(upgrade.module, upgrade.version)


def _settled(new: T, old: T | None) -> T:
    """A module's state after a block. The very same object where nothing changed: it need not be encoded again."""
    if old is not None and new == old:
        return old
    ordered: T = in_order(new, old)
    return ordered


def _require_known(state: State, messages: Iterable[object]) -> None:
    """Programs of earlier versions could not read a block with such a message."""
    network = state.of(NetworkState)
    for message in messages:
        if isinstance(message, Proposal) and message.losses is not None and not network.has_second_audits:
            raise Refused("a proposal commits to losses, which this network does not know yet")
        if isinstance(message, Proposal) and message.payload_bytes > PLAIN_BLOB_BYTES_MAX and not network.has_models:
            raise Refused("a proposal has a payload that is larger than this network knows yet")
