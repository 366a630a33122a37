"""The replicated state of the ledger, and its transition by a decided block."""

from __future__ import annotations

import functools
import hashlib
import operator
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import pairwise
from typing import Annotated, Any, NamedTuple, TypeVar

from consensus.block import BODY_BYTES_MAX, Block
from consensus.evidence import Evidence, verify_evidence
from ledger import members as membership
from ledger.audits.audit_state import AuditsState
from ledger.audits.state_machine import AuditsModule
from ledger.core.deterministic_failures import ModuleFailure, is_deterministic, make_module_failure
from ledger.core.encoding_check import check_encodable
from ledger.core.genesis import Genesis, ModuleVersion
from ledger.core.module import BlobReplacement, BlockContext, DecodedTransaction, EmbeddedStatement, Module, Refused, StateChange
from ledger.core.voted_limit import LimitTerms, VotedLimit
from ledger.jobs import (
    RUNNING_MAX,
    ClosedRound,
    JobAnchored,
    JobEnded,
    JobPhase,
    JobRolledBack,
    JobsModule,
    JobsModuleV2,
    JobSpecRules,
    JobsState,
    JobStarted,
)
from ledger.members import MemberExpelled, MemberRekeyed, MembersModule, MembersState
from ledger.model_anchors import newest_anchor_up_to
from ledger.network_governance import ModuleUpgrade, NetworkModule, NetworkState
from ledger.tables import Table, table_fields
from protocol import codec, merkle
from protocol.codec import Count, Digest, Length
from protocol.errors import RemoteProtocolError, StorageError, UserError
from protocol.identity import RecentDigests, Signed, Verifier, open_signed, short_id, signing_preimage
from protocol.limits import (
    COST_PER_BLOCK_MAX,
    EVIDENCE_PER_BLOCK_MAX,
    TRANSACTION_LIFETIME_HEIGHTS,
    TRANSACTIONS_PENDING_MAX,
    TRANSACTIONS_PER_BLOCK_MAX,
)
from protocol.messages import Ballot, CutOff, Proposal, Transaction, Vouch
from protocol.units import display_round_number
from rounds.round_state import RoundCertificate, compute_round_result, why_round_certificate_invalid
from rounds.vouch_set import VouchSet

M = TypeVar("M")
T = TypeVar("T")

# Bytes of the cache of decoded messages: a round of VOTERS_MAX ballots and cut-offs of the largest size.
OPENED_BYTES_MAX = 24 << 20
OPENED_FACTOR = 4  # bytes of memory for a decoded message, per byte of its body: ballots take 3.8, transactions 2
OPENED_OVERHEAD_BYTES = 1_024  # bytes of memory that the objects of the smallest message take
FAILURES_KEPT = 8
# Number of cached digests of checked transactions: all of a full mempool, and a block in each of two views, in 3 MB.
CHECKED_TRANSACTIONS_MAX = TRANSACTIONS_PENDING_MAX + 2 * TRANSACTIONS_PER_BLOCK_MAX


@dataclass(frozen=True, slots=True)
class BlockBody:
    """The body of a block. Its parts act on the state in the order of the fields."""

    round_certificates: Annotated[tuple[RoundCertificate, ...], Length(0, RUNNING_MAX)]
    evidence: Annotated[tuple[Evidence, ...], Length(0, EVIDENCE_PER_BLOCK_MAX)]  # ascending by culprit, one piece for each
    transactions: Annotated[tuple[Signed, ...], Length(0, TRANSACTIONS_PER_BLOCK_MAX)]


def module_digest(encoded: bytes) -> bytes:
    return hashlib.sha256(encoded).digest()


def state_root_over(modules: Mapping[str, bytes]) -> bytes:
    """Return the state root, over the digests of all modules by name.

    The root also covers the names and the number of modules.
    """
    return merkle.merkle_root([merkle.leaf_hash(name.encode() + b"\x00" + digest) for name, digest in sorted(modules.items())])


EMPTY_BODY = codec.encode(BlockBody((), (), ()))


def decode_body(data: bytes) -> BlockBody:
    return codec.decode(BlockBody, data, BODY_BYTES_MAX)


@dataclass(frozen=True)
class LedgerState:
    """The ledger's state after the block of `height`.

    The state root does not cover the height, so an empty block leaves the root unchanged.
    """

    height: int
    time_ms: int
    modules: Mapping[str, Any]
    # Height -> state root of that height, which the next block names; not part of the state root.
    certified_roots: Mapping[int, bytes]
    # Module name -> the module's state at its last encoding, and the encoding. Successive states share this cache, because most
    # blocks change few modules.
    _encoded: dict[str, tuple[Any, bytes]] = field(default_factory=dict, compare=False, repr=False)

    @functools.cached_property
    def state_root(self) -> bytes:
        return state_root_over({name: module_digest(self.encoded_module(name)) for name in self.modules})

    def encoded_module(self, name: str) -> bytes:
        """Return the encoding of one module's state."""
        value, data = self._encoded.get(name, (None, b""))
        if value is not self.modules[name]:
            value, data = self.modules[name], codec.encode(self.modules[name])
            self._encoded[name] = (value, data)
        return data

    def restore_module_state(self, name: str) -> None:
        """Undo changes that failed code made inside a module's state, against the rules, by decoding its last encoding."""
        value, data = self._encoded.get(name, (None, b""))
        if value is None or codec.encode(value) == data:
            return
        whole = codec.decode(type(value), data, len(data))
        for table in table_fields(type(value)):
            getattr(whole, table).adopt_rows_of(getattr(value, table))
        for part in fields(value):
            object.__setattr__(value, part.name, getattr(whole, part.name))

    @functools.cached_property
    def tables(self) -> dict[str, Table[Any]]:
        """All tables of the modules, by "module/field"."""
        named = [(name, value, of) for name, value in self.modules.items() for of in table_fields(type(value))]
        return {f"{name}/{of}": getattr(value, of) for name, value, of in named}

    @functools.cached_property
    def _by_type(self) -> dict[type, Any]:
        return {type(value): value for value in self.modules.values()}

    def module_state(self, kind: type[T]) -> T:
        """Return the state of the module whose states have this type."""
        value: T = self._by_type[kind]
        return value

    @property
    def members(self) -> MembersState:
        return self.module_state(MembersState)

    @property
    def jobs(self) -> JobsState:
        return self.module_state(JobsState)

    @property
    def audits(self) -> AuditsState:
        return self.module_state(AuditsState)

    def final_round(self, job: bytes) -> int:
        """Return the round that began with the job's newest final model. No audit can undo earlier rounds."""
        known, audits = self.jobs.jobs[job], self.audits.jobs.get(job)
        reached = audits.first_contestable_round if audits is not None and known.phase is not JobPhase.FINISHED else None
        return known.round if reached is None else newest_anchor_up_to(known.anchors, reached).round

    def with_modules(self, **changes: Any) -> LedgerState:
        return LedgerState(self.height, self.time_ms, {**self.modules, **changes}, self.certified_roots, self._encoded)


TABLE_NAME_CHARACTERS_MAX = 40  # characters of the name "module/field" of a table, which requests contain together with a range
# Heights whose state roots are kept: a candidate voter must know one of these roots to prove that it has caught up.
CERTIFIED_ROOTS_KEPT = 100


@dataclass(frozen=True, slots=True)
class StateTransition:
    """The effect of a block before the models of jobs change: `state` still has the old model roots of jobs that take a step."""

    state: LedgerState
    started_jobs: tuple[bytes, ...]  # jobs whose first model must be made
    closed_rounds: tuple[ClosedRound, ...]
    ended_jobs: tuple[bytes, ...]  # jobs that this block ended
    rolled_back: Mapping[bytes, JobRolledBack]  # job -> its rollback in this block
    anchored: frozenset[bytes]  # jobs whose model after the block is an anchor
    failures: tuple[ModuleFailure, ...] = ()  # module steps that raised an exception and therefore had no effect

    @property
    def model_steps(self) -> tuple[ClosedRound, ...]:
        """The closed rounds that change a model: all but the rounds that this block also undoes."""
        return tuple(closed for closed in self.closed_rounds if closed.job not in self.rolled_back)

    def finish_state(self, model_roots: Mapping[bytes, bytes]) -> LedgerState:
        """Return the state with the new model roots, exactly those of `started_jobs`, `model_steps` and `rolled_back`."""
        assert model_roots.keys() == {*self.started_jobs, *(closed.job for closed in self.model_steps), *self.rolled_back}
        jobs = self.state.jobs.jobs
        changed = {key: jobs[key].with_model(root, key in self.anchored) for key, root in model_roots.items()}
        return self.state.with_modules(jobs=replace(self.state.jobs, jobs={**jobs, **changed}))


# Maximum bytes of a stored module. A module is far smaller: job specifications are the largest part, with 18 MB.
STORED_MODULE_BYTES_MAX = 512 << 20


@dataclass(frozen=True, slots=True)
class StoredState:
    """A `LedgerState` on disk."""

    height: Count
    time_ms: Count
    modules: dict[str, Annotated[bytes, Length(0, STORED_MODULE_BYTES_MAX)]]
    certified_roots: dict[Count, Digest]


def core_modules(job_rules: JobSpecRules) -> tuple[Module[Any], ...]:
    """Return the modules of every network, in all their versions, in the order in which they act in a block."""
    return MembersModule(), JobsModule(job_rules), JobsModuleV2(job_rules), AuditsModule(job_rules), NetworkModule()


def newest_module_versions(modules: Iterable[Module[Any]]) -> tuple[ModuleVersion, ...]:
    """Return the newest version of each module, in the order in which modules act in a block. New networks run these versions."""
    versions: dict[str, int] = {}
    for module in modules:
        versions[module.name] = max(module.version, versions.get(module.name, 0))
    return tuple(ModuleVersion(name, version) for name, version in versions.items())


class TransactionTraits(NamedTuple):
    """Properties of a transaction that do not depend on the state."""

    awaited_job: bytes | None = None  # job whose next round certificate the transaction can wait for; see `Module.awaited_job`
    lingers: bool = False  # whether the transaction waits briefly for others; see `Module.lingers`
    cost: int = 1  # cost in signature checks: of its own signature, its statements' signatures, and `Module.apply_transaction`


class OpenedTransaction(NamedTuple):
    """A decoded transaction whose own signature is valid, with the module of its kind."""

    module: Module[Any]
    signed: Signed
    said: DecodedTransaction
    statements: Sequence[EmbeddedStatement]

    @property
    def cost(self) -> int:
        return 1 + len(self.statements) + self.module.transaction_cost(self.said.transaction.kind, self.said.content)


class UnsupportedModuleVersion(Refused, UserError):
    """The network runs a version of a module that this program lacks. The text names the version and the remedy."""


class RunningModules:
    """The modules of one set of module versions."""

    def __init__(self, modules: Sequence[Module[Any]]) -> None:
        self.modules = {module.name: module for module in modules}
        self.by_kind = {kind: module for module in modules for kind in module.contents}
        assert len(self.modules) == len({module.state_type for module in modules}) == len(modules), "one name, one type each"
        tables = [f"{module.name}/{of}" for module in modules for of in table_fields(module.state_type)]
        assert all(len(name) <= TABLE_NAME_CHARACTERS_MAX for name in tables)
        assert len(self.by_kind) == sum(len(module.contents) for module in modules), "a kind belongs to one module"
        limits = [name for module in modules for name in module.limits]
        assert len(limits) == len(set(limits)), "a limit belongs to one module"


@dataclass(slots=True)
class CurrentState:
    """A holder of the state after the last applied block, which all parts of a peer share."""

    current: LedgerState


class LedgerRules:
    """The transition rules of one network. `modules` are all modules of this program, in all their versions."""

    def __init__(self, genesis: Genesis, verifier: Verifier, modules: Sequence[Module[Any]]) -> None:
        self.genesis = genesis
        self.chain_id = genesis.chain_id
        self.verifier = verifier
        self._known = {ModuleVersion(module.name, module.version): module for module in modules}
        assert len(self._known) == len(modules), "each version once"
        # Kind of transaction -> a module with it; all versions of a module decode the content alike.
        self._by_kind: dict[str, Module[Any]] = {}
        for module in modules:
            for kind in module.contents:
                first = self._by_kind.setdefault(kind, module)
                assert _reading(module, kind) == _reading(first, kind), f"versions of {module.name} read {kind} differently"
        self._running: tuple[tuple[ModuleVersion, ...], RunningModules] | None = None
        self._begun: tuple[LedgerState, LedgerState] | None = None
        # Recent failures of transactions, for people. Their reader removes them from the queue.
        self.transaction_failures: deque[ModuleFailure] = deque(maxlen=FAILURES_KEPT)
        self._opened: OrderedDict[Signed, Any] = OrderedDict()
        self._opened_bytes = 0
        # Digests of transactions whose embedded statements have valid signatures.
        self._checked = RecentDigests(CHECKED_TRANSACTIONS_MAX)
        self._judged: tuple[LedgerState, bytes, StateTransition | str] | None = None

    # Versions

    def running_modules(self, versions: tuple[ModuleVersion, ...]) -> RunningModules:
        """Return the modules of these versions. Raises `UnsupportedModuleVersion` if this program lacks one of them."""
        if self._running is None or self._running[0] != versions:
            for wanted in versions:
                self._require(wanted)
            self._running = (versions, RunningModules([self._known[version] for version in versions]))
        return self._running[1]

    def voted_limits(self, state: LedgerState) -> dict[str, tuple[LimitTerms, VotedLimit]]:
        """Return the limits that the network's voters set, by name, each with its declaration."""
        running = [self._known[version] for version in state.module_state(NetworkState).modules]
        return {
            name: (module.limits[name], limit)
            for module in running
            for name, limit in module.voted_limits(state.modules[module.name]).items()
        }

    def _require(self, wanted: ModuleVersion, height: int = 0) -> Module[Any]:
        module = self._known.get(wanted)
        if module is None:
            known = sorted(version.version for version in self._known if version.name == wanted.name)
            knows = f"has {', '.join(map(str, known))}" if known else "does not have this module"
            verb, since = ("upgrades to", f" at height {height}") if height else ("runs", "")
            what = f"this network {verb} {wanted.name} {wanted.version}{since}; this program {knows}"
            raise UnsupportedModuleVersion(f"{what}: install a newer program and restart this peer")
        return module

    def last_supported_height(self, state: LedgerState) -> int | None:
        """Return the last height that this program can apply. None: this program has the versions of all due upgrades."""
        lacking = [
            upgrade.height for upgrade in state.module_state(NetworkState).due_upgrades if _version(upgrade) not in self._known
        ]
        return min(lacking) - 1 if lacking else None

    def why_version_unsupported(self, state: LedgerState) -> str:
        """Return a text about the first due upgrade to a version that this program lacks. Empty: it has all versions."""
        try:
            for upgrade in state.module_state(NetworkState).due_upgrades:
                self._require(_version(upgrade), upgrade.height)
        except UnsupportedModuleVersion as error:
            return str(error)
        return ""

    def with_due_upgrades(self, state: LedgerState) -> LedgerState:
        """Return the state on which the next block acts, which includes the upgrades of its height.

        Raises `UnsupportedModuleVersion`.
        """
        network = state.module_state(NetworkState)
        due = [upgrade for upgrade in network.due_upgrades if upgrade.height <= state.height + 1]
        if not due:
            return state
        _ = state.state_root  # encodes the state, so that `LedgerState.restore_module_state` can return to it
        if self._begun is None or self._begun[0] is not state:
            after = state
            for upgrade in due:
                module, old = self._require(_version(upgrade), upgrade.height), after.modules.get(upgrade.module)
                others = tuple(other for other in network.due_upgrades if other != upgrade)
                try:
                    value = (
                        module.genesis_state(self.genesis)
                        if old is None
                        else module.upgrade_state(old, network.module_version(upgrade.module))
                    )
                    _encodable(module, StateChange(value), old)
                except Exception as error:
                    self._note(upgrade.module, f"the upgrade to version {upgrade.version}", error)
                    state.restore_module_state(upgrade.module)
                    # A failed upgrade is not tried again. The former version of the module continues, and voters may decide
                    # another upgrade.
                    network = replace(network, due_upgrades=others)
                    after = after.with_modules(**{NetworkModule.name: network})
                    continue
                # A new module acts after all other modules of the network.
                running = {version.name: version for version in network.modules} | {upgrade.module: _version(upgrade)}
                network = replace(network, modules=tuple(running.values()), due_upgrades=others)
                after = after.with_modules(**{upgrade.module: value, NetworkModule.name: network})
            self._begun = (state, after)
        return self._begun[1]

    def pinned_blobs(self, state: LedgerState, seen: dict[str, Any]) -> Iterator[tuple[str, Mapping[bytes, int]]]:
        """Yield the pinned blobs of each module whose state has changed since `seen` (module -> state), and update `seen`."""
        for name, module in self._running_in(state).modules.items():
            if seen.get(name) is not state.modules[name]:
                seen[name] = state.modules[name]
                try:
                    found = module.pinned_blobs(state.modules[name])
                except Exception as error:
                    self._note(name, "blobs", error)
                    continue
                yield name, found

    def replaced_blobs(self, state: LedgerState, counts: dict[str, int]) -> Iterator[BlobReplacement]:
        """Yield the blob replacements after the first `counts[module]` of each module, and update `counts`."""
        for name, module in self._running_in(state).modules.items():
            try:
                found = module.replaced_blobs(state.modules[name], counts.get(name, 0))
            except Exception as error:
                self._note(name, "replaced", error)
                continue
            counts[name] = counts.get(name, 0) + len(found)
            yield from found

    def module_of_class(self, kind: type[M]) -> M:
        """Return the module of exactly this class. Subclasses, which may be other versions of the module, do not count."""
        (found,) = (module for module in self._known.values() if type(module) is kind)
        return found

    @property
    def jobs_module(self) -> JobsModule:
        return self.module_of_class(JobsModule)

    @property
    def audits_module(self) -> AuditsModule:
        return self.module_of_class(AuditsModule)

    # States

    def genesis_state(self) -> LedgerState:
        modules = self.running_modules(self.genesis.modules).modules.values()
        states = {module.name: with_sorted_dictionaries(module.genesis_state(self.genesis), None) for module in modules}
        return LedgerState(0, self.genesis.created_ms, dict(sorted(states.items())), {})

    def encode_state(self, state: LedgerState) -> bytes:
        modules = {name: state.encoded_module(name) for name in state.modules}
        return codec.encode(StoredState(state.height, state.time_ms, modules, dict(state.certified_roots)))

    def restore_state(self, encoded: bytes | None) -> LedgerState:
        """Return the state from this peer's disk, or the genesis state. Raises `UnsupportedModuleVersion` and `StorageError`."""
        try:
            return self.decode_state(encoded) if encoded else self.genesis_state()
        except RemoteProtocolError as error:
            raise StorageError(
                f"cannot read the ledger's state on disk ({error.detail}): run the program that wrote it, or join the network "
                "again with a new data directory"
            ) from None

    def decode_state(self, data: bytes) -> LedgerState:
        """Return a decoded state. Raises `UnsupportedModuleVersion`, and `RemoteProtocolError` for invalid data."""
        stored = codec.decode(StoredState, data, len(data))
        encoded = stored.modules.get(NetworkModule.name, b"")
        network = codec.decode(NetworkState, encoded, len(encoded))
        running = self.running_modules(network.modules).modules
        if stored.modules.keys() != running.keys():
            raise RemoteProtocolError("bad-state", f"modules {sorted(stored.modules)}, expected {sorted(running)}")
        values: dict[str, Any] = {}
        for name, value in stored.modules.items():
            try:
                values[name] = codec.decode(running[name].state_type, value, len(value))
            except RemoteProtocolError as error:
                raise RemoteProtocolError("bad-state", f"module {name} {running[name].version}: {error.detail}") from None
        return LedgerState(stored.height, stored.time_ms, values, stored.certified_roots)

    def open_message(self, signed: Signed, kinds: tuple[type[M], ...]) -> M:
        """Return the result of `open_signed`, or the cached message."""
        known = self._opened.get(signed)
        return known if isinstance(known, kinds) else open_signed(signed, self.chain_id, self.verifier, kinds)

    def cache_opened_message(self, signed: Signed, message: Any) -> None:
        """Cache an accepted message, because a block will contain it again. Refused messages are not cached."""
        if signed in self._opened:
            return
        self._opened[signed] = message
        self._opened_bytes += _opened_bytes(signed)
        while self._opened_bytes > OPENED_BYTES_MAX:
            oldest, _ = self._opened.popitem(last=False)
            self._opened_bytes -= _opened_bytes(oldest)

    # Transactions

    def apply_transaction(self, state: LedgerState, signed: Signed) -> LedgerState:
        """Return the state after a transaction. Raises `Refused` or `RemoteProtocolError` if it cannot be the next one."""
        acting = self.with_due_upgrades(state)
        return self._act(acting, self._read(acting, signed), self._context(state))[0]

    def _read(self, state: LedgerState, signed: Signed) -> OpenedTransaction:
        transaction = self.open_transaction(signed)
        module = self._running_in(state).by_kind.get(transaction.kind)
        if module is None:
            raise RemoteProtocolError("unknown-transaction", transaction.kind)
        content: Any = codec.decode(module.contents[transaction.kind], transaction.content)
        with self._refused_where_it_fails(module, transaction):
            statements = module.embedded_statements(signed.signer, content)
        return OpenedTransaction(module, signed, DecodedTransaction(signed.signer, content, transaction), statements)

    def _act(self, state: LedgerState, read: OpenedTransaction, context: BlockContext) -> tuple[LedgerState, tuple[Any, ...]]:
        module, said = read.module, read.said
        transaction, height = said.transaction, context.height
        if not height <= transaction.expires <= height + TRANSACTION_LIFETIME_HEIGHTS:
            raise Refused(f"{transaction.kind} expires at height {transaction.expires}, which is not allowed at height {height}")
        state = state.with_modules(members=membership.use_nonce(state.members, transaction, said.author))
        self._check_statements(read.signed, read.statements)
        with self._refused_where_it_fails(module, transaction, state):
            change = _sound(module, module.apply_transaction(state.modules[module.name], said, state, context))
        return state.with_modules(**{module.name: change.state}), change.facts

    @contextmanager
    def _refused_where_it_fails(
        self, module: Module[Any], transaction: Transaction, state: LedgerState | None = None
    ) -> Iterator[None]:
        """Refuse a transaction that makes its module fail: every peer then refuses it, too."""
        try:
            yield
        except (Refused, RemoteProtocolError):
            raise
        except Exception as error:
            failure = self._note(module.name, transaction.kind, error)
            if state is not None:
                state.restore_module_state(module.name)
            raise Refused(str(failure)) from error

    def _note(self, module: str, step: str, error: Exception) -> ModuleFailure:
        """Record a deterministic exception of a module for people, and return the record. Raises any other exception again."""
        if not is_deterministic(error):
            raise error
        failure = make_module_failure(module, step, error)
        self.transaction_failures.append(failure)
        return failure

    def open_transaction(self, signed: Signed) -> Transaction:
        return self.open_message(signed, (Transaction,))

    def check_embedded_statements(self, signed: Signed, transaction: Transaction) -> None:
        """Verify the statements within a transaction. Raises `RemoteProtocolError` if one has a false signature.

        Honest peers verify statements before they sign or relay the transaction, so the sender of a false one is faulty.
        """
        known = self._known_content(transaction)
        if known is not None:
            module, content = known
            try:
                with self._refused_where_it_fails(module, transaction):
                    statements = module.embedded_statements(signed.signer, content)
            except Refused:
                return  # `apply_transaction` refuses such a transaction, too
            self._check_statements(signed, statements)

    def preverify_signatures(self, body: BlockBody) -> None:
        """Verify and cache the signatures of a body, up to the cost of a block. May run in a thread.

        Membership is not checked, because an author may become a member in this very body. Raises `RemoteProtocolError` at the
        first false signature, in the order of `_acted`: round certificates, evidence, transactions.
        """
        for closing in body.round_certificates:
            self.open_round_certificate(closing)
        for item in body.evidence:
            verify_evidence(item, self.chain_id, self.verifier)
        left = COST_PER_BLOCK_MAX
        for signed in body.transactions:
            transaction = self.open_transaction(signed)
            left -= self.transaction_traits(signed.signer, transaction).cost
            if left < 0:
                return
            self.check_embedded_statements(signed, transaction)

    def _check_statements(self, signed: Signed, statements: Sequence[EmbeddedStatement]) -> None:
        if not statements:
            return
        digest = hashlib.sha256(signed.signer + signed.signature + signed.body).digest()
        if digest in self._checked:
            return
        for statement in statements:
            tag: str = statement.message.TAG
            data = signing_preimage(tag, self.chain_id, codec.encode(statement.message))
            if not self.verifier.verify(statement.signer, data, statement.signature):
                by = f"{tag} of {short_id(statement.signer)}, in a transaction of {short_id(signed.signer)}"
                raise RemoteProtocolError("bad-signature", by)
        self._checked.add(digest)

    def _known_content(self, transaction: Transaction) -> tuple[Module[Any], Any] | None:
        """Return the transaction's module, in any version, and its decoded content. None: the transaction will be refused."""
        module = self._by_kind.get(transaction.kind)
        try:
            return (module, codec.decode(module.contents[transaction.kind], transaction.content)) if module else None
        except RemoteProtocolError:
            return None

    def transaction_traits(self, author: bytes, transaction: Transaction) -> TransactionTraits:
        known = self._known_content(transaction)
        if known is None:
            return TransactionTraits()
        module, content = known
        try:
            with self._refused_where_it_fails(module, transaction):
                cost = 1 + len(module.embedded_statements(author, content)) + module.transaction_cost(transaction.kind, content)
                return TransactionTraits(module.awaited_job(content), module.lingers(content), cost)
        except Refused:
            return TransactionTraits()

    def _running_in(self, state: LedgerState) -> RunningModules:
        return self.running_modules(state.module_state(NetworkState).modules)

    def _context(self, state: LedgerState) -> BlockContext:
        return BlockContext(self.chain_id, state.height + 1, state.time_ms, self.verifier, state.certified_roots)

    # Evidence

    def apply_evidence(self, state: LedgerState, evidence: Evidence) -> LedgerState:
        """Return the state without the culprit. Raises `Refused` or `RemoteProtocolError` if the evidence has no effect."""
        culprit = verify_evidence(evidence, self.chain_id, self.verifier)
        return state.with_modules(members=membership.expel_member(state.members, culprit, state.height + 1))

    def apply_all_evidence(self, state: LedgerState, evidence: Sequence[Evidence]) -> LedgerState:
        if any(left.signer >= right.signer for left, right in pairwise(evidence)):
            raise Refused("evidence must ascend by signer, without duplicates")
        for item in evidence:
            state = self.apply_evidence(state, item)
        return state

    # Rounds

    def open_round_certificate(
        self, closing: RoundCertificate
    ) -> tuple[dict[bytes, Ballot], dict[bytes, CutOff], dict[bytes, Proposal], list[tuple[bytes, Vouch]]]:
        """Return the verified messages of a round certificate with their signers. Raises `RemoteProtocolError`."""

        def opened(parts: tuple[Signed, ...], kind: type) -> dict[bytes, Any]:
            return {part.signer: self.open_message(part, (kind,)) for part in parts}

        vouches = [(part.signer, self.open_message(part, (Vouch,))) for part in closing.vouches]
        parts = opened(closing.ballots, Ballot), opened(closing.cut_offs, CutOff), opened(closing.proposals, Proposal)
        return *parts, vouches

    def close_round(self, state: LedgerState, closing: RoundCertificate) -> ClosedRound:
        """Return the closed round. Raises `Refused` or `RemoteProtocolError` if the certificate closes no open round."""
        job = state.jobs.running().get(closing.job)
        if job is None or job.round != closing.round:
            raise Refused(f"round {display_round_number(closing.round)} of job {closing.job.hex()[:8]} is not open")
        terms = job.round_terms(closing.job)
        ballots, cut_offs, proposals, vouches = self.open_round_certificate(closing)
        problem = why_round_certificate_invalid(terms, closing, ballots, cut_offs, proposals, vouches)
        if problem:
            raise Refused(f"round {display_round_number(closing.round)}: {problem}")
        return ClosedRound(
            closing.job,
            closing.round,
            compute_round_result(terms, ballots, VouchSet.from_vouches(terms, vouches)),
            closing.proposals,
            tuple(sorted(ballots)),
            reveals={voter: ballot.reveal for voter, ballot in ballots.items() if ballot.reveal is not None},
            commitments={voter: ballot.commitment for voter, ballot in ballots.items() if ballot.commitment is not None},
            brief=job.brief,
        )

    # Blocks

    def apply_block(self, state: LedgerState, block: Block) -> StateTransition:
        """Return the effect of a block. Raises `Refused` if it cannot follow `state`."""
        assert block.height == state.height + 1
        judged = self._judge(state, block.body)
        if isinstance(judged, str):
            raise Refused(judged)
        return _dated(judged, block.time_ms, block.state_root)

    def why_body_refused(self, state: LedgerState, body: bytes) -> str | None:
        """Return the reason why a body cannot be decided after `state`; None: it can."""
        judged = self._judge(state, body)
        return judged if isinstance(judged, str) else None

    def _judge(self, state: LedgerState, body: bytes) -> StateTransition | str:
        """Return the effect of a body or a refusal. The last result is cached: a body is first judged and then applied."""
        if self._judged is None or self._judged[0] is not state or self._judged[1] != body:
            try:
                self._judged = (state, body, self._effect(state, decode_body(body)))
            except (Refused, RemoteProtocolError) as error:
                self._judged = (state, body, str(error))
            # A body from another peer must not end this process: see `ledger.core.deterministic_failures`.
            except Exception as error:
                self._judged = (state, body, str(self._note("block", "check", error)))
        return self._judged[2]

    def _effect(self, state: LedgerState, body: BlockBody) -> StateTransition:
        """Return the effect of a body, independently of the block around it.

        If a step of a module fails, the body is applied again without that step.
        """
        failures: list[ModuleFailure] = []
        while True:
            try:
                transition = self._acted(state, body, {(failure.module, failure.step) for failure in failures})
                return replace(transition, failures=tuple(failures))
            except _StepFailed as failed:
                failures.append(failed.failure)
                state.restore_module_state(failed.failure.module)

    def _acted(self, state: LedgerState, body: BlockBody, skipped: Set[tuple[str, str]]) -> StateTransition:
        """Return the effect of a body without the `skipped` steps of modules.

        Round certificates are checked against the state before the block. Evidence expels members. Transactions apply one after
        the other, after the evidence. Then every module takes the steps in the table of `ledger.core.module`.
        """
        before, state = state, self.with_due_upgrades(state)
        for name in state.modules:
            state.encoded_module(name)  # caches the encoding to which `LedgerState.restore_module_state` returns
        modules = self._running_in(state).modules
        # If `jobs` fails to count a round, the round stays open and its model takes no step. So no module may see the round as
        # closed.
        counts = not any(name == JobsModule.name for name, _ in skipped)
        closed = tuple(self.close_round(state, closing) for closing in body.round_certificates) if counts else ()
        if len({item.job for item in closed}) < len(closed):
            raise Refused("a block must not close two rounds of one job")
        after = self.apply_all_evidence(state, body.evidence)
        context = replace(self._context(state), facts=(*closed, *(MemberExpelled(item.signer) for item in body.evidence)))
        cost = 0
        for signed in body.transactions:
            read = self._read(after, signed)
            cost += read.cost
            if cost > COST_PER_BLOCK_MAX:
                raise Refused(f"its transactions cost more than {COST_PER_BLOCK_MAX} signature checks")
            after, facts = self._act(after, read, context)
            context = replace(context, facts=(*context.facts, *facts))
        if context.facts_of(MemberRekeyed):
            current, rekeyed = after.members.current_key, {}
            for name, module in modules.items():
                if (name, FOLLOW_KEY_ROTATIONS) not in skipped:
                    with _failing(name, FOLLOW_KEY_ROTATIONS):
                        given = after.modules[name]
                        rekeyed[name] = _encodable(module, StateChange(module.follow_key_rotations(given, current)), given).state
            after = after.with_modules(**rekeyed)
        for step in (SETTLE_BLOCK, END_BLOCK):
            for name, module in modules.items():
                if (name, step) in skipped:
                    continue
                given = after.modules[name]
                with _failing(name, step):
                    change = _encodable(module, getattr(module, step)(given, after, context), given)
                after = after.with_modules(**{name: change.state})
                context = replace(context, facts=(*context.facts, *change.facts))
        if (MembersModule.name, SETTLE_BLOCK) in skipped:  # consensus needs the next height's voters, whatever fails
            members = after.members
            after = after.with_modules(members=replace(members, previous=members.voters, voters=members.upcoming))
        states = {name: _settled(value, before.modules.get(name)) for name, value in sorted(after.modules.items())}
        started = tuple(fact.job for fact in context.facts_of(JobStarted))
        ended = tuple(fact.job for fact in context.facts_of(JobEnded))
        back = {fact.job: fact for fact in context.facts_of(JobRolledBack)}
        anchored = frozenset(fact.job for fact in context.facts_of(JobAnchored))
        state = replace(after, height=context.height, modules=states)
        return StateTransition(state, started, closed, ended, back, anchored)


def _reading(module: Module[Any], kind: str) -> tuple[object, ...]:
    """Return the parts of a module that determine the traits and statements of a transaction of this kind.

    These parts must not depend on the state.
    """
    of = type(module)
    return (
        module.contents[kind],
        module.costs.get(kind, 0),
        of.transaction_cost,
        of.embedded_statements,
        of.awaited_job,
        of.lingers,
    )


FOLLOW_KEY_ROTATIONS, SETTLE_BLOCK, END_BLOCK = (
    Module.follow_key_rotations.__name__,
    Module.settle_block.__name__,
    Module.end_block.__name__,
)


class _StepFailed(Exception):
    def __init__(self, failure: ModuleFailure) -> None:
        super().__init__(str(failure))
        self.failure = failure


@contextmanager
def _failing(module: str, step: str) -> Iterator[None]:
    """Context in which an exception that every peer raises becomes `_StepFailed`. Other exceptions pass."""
    try:
        yield
    except Exception as error:
        if not is_deterministic(error):
            raise
        raise _StepFailed(make_module_failure(module, step, error)) from error


def _sound(module: Module[Any], change: StateChange) -> StateChange:
    if not isinstance(change.state, module.state_type):
        raise TypeError(f"{module.name} has made a {type(change.state).__name__} of its {module.state_type.__name__}")
    return StateChange(change.state, tuple(change.facts))


def _encodable(module: Module[Any], change: StateChange, given: Any) -> StateChange:
    """Return the change that a module's step has made. Raises an exception if the new state has no encoding.

    `given` is the module's state before the step.
    """
    change = _sound(module, change)
    check_encodable(module.state_type, change.state, given)
    return change


def _opened_bytes(signed: Signed) -> int:
    return OPENED_OVERHEAD_BYTES + OPENED_FACTOR * len(signed.body)


def _dated(transition: StateTransition, time_ms: int, certified_root: bytes) -> StateTransition:
    """Return the transition with the block's time and, for the height before, the state root that the block names."""
    state = transition.state
    roots = {height: root for height, root in state.certified_roots.items() if height >= state.height - CERTIFIED_ROOTS_KEPT}
    roots[state.height - 1] = certified_root
    return replace(transition, state=replace(state, time_ms=time_ms, certified_roots=roots))


def with_sorted_dictionaries(new: Any, old: Any) -> Any:
    """Return a module's state with all dictionaries in ascending order of keys, as after decoding.

    Otherwise a rule could depend on the order of insertions, and a restarted peer would compute another state. `old` is None or
    already ordered. Objects that both states share are skipped.
    """
    kind: Any = type(new)
    if new is old or kind in _WITHOUT_PARTS:
        return new
    if kind is dict:
        known = old if type(old) is dict else {}
        ordered = {key: with_sorted_dictionaries(item, known.get(key)) for key, item in sorted(new.items())}
        return new if list(ordered) == list(new) and all(map(operator.is_, ordered.values(), new.values())) else ordered
    if kind is tuple:
        items = tuple([with_sorted_dictionaries(item, None) for item in new])
        return new if all(map(operator.is_, items, new)) else items
    changed: dict[str, Any] = {}
    for name in _field_names(kind):
        part = getattr(new, name)
        value = with_sorted_dictionaries(part, getattr(old, name, None))
        if value is not part:
            changed[name] = value
    return replace(new, **changed) if changed else new


_WITHOUT_PARTS = frozenset({bytes, int, str, bool, float, type(None)})


@functools.cache
def _field_names(kind: type) -> tuple[str, ...]:
    """Return the names of a dataclass's fields. Empty for another type."""
    return tuple(part.name for part in fields(kind)) if is_dataclass(kind) else ()


def _version(upgrade: ModuleUpgrade) -> ModuleVersion:
    return ModuleVersion(upgrade.module, upgrade.version)


def _settled(new: T, old: T | None) -> T:
    """Return a module's state after a block.

    If it equals the former state, return the former object, whose encoding is cached.
    """
    if old is not None and new == old:
        return old
    ordered: T = with_sorted_dictionaries(new, old)
    return ordered
