"""The interface of a module: a part of the state, its transactions, and its work in each block.

A block acts on every module in the same order, which is the order of the list that `ledger.ledger_state.LedgerRules` receives:

| step | effect |
|---|---|
| `apply_transaction` | each transaction changes the module that defines its kind |
| `follow_key_rotations` | tables that are keyed by members follow members to their new keys |
| `settle_block` | the module does the work that the block's content makes due; the rounds that the block closes are still open |
| `end_block` | the module counts and opens rounds, and ends whatever is over |

In each step, a module sees earlier modules in their state after the step and later modules in their state before it. It writes
only its own state. It affects other modules through *facts*, which are frozen records. A module that knows the type of a fact
finds it in `BlockContext.facts_of` at later steps of the same block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from ledger.core.genesis import Genesis
from protocol.errors import FolkmootError
from protocol.identity import Verifier
from protocol.messages import Transaction

if TYPE_CHECKING:
    from ledger.core.voted_limit import LimitTerms, VotedLimit

S = TypeVar("S")
F = TypeVar("F")


class Refused(FolkmootError):
    """The reason why a transaction cannot be decided in this state. The text is for people."""


@dataclass(frozen=True, slots=True)
class DecodedTransaction:
    """A transaction while it is applied. Its signature and its nonce have been checked, and its content is decoded."""

    author: bytes
    content: Any  # content of the transaction, of the type in `Module.contents` for its kind
    transaction: Transaction


class EmbeddedStatement(NamedTuple):
    """A record within a transaction that another key than the author's has signed."""

    signer: bytes
    message: Any  # signed message, of a type with a TAG
    signature: bytes


@dataclass(frozen=True, slots=True)
class BlockContext:
    """Properties of the block that is being applied. They are the same at every peer."""

    chain_id: bytes
    height: int
    time_ms: int  # time of the parent block: the clock of the network, which only blocks advance
    verifier: Verifier
    certified_roots: Mapping[int, bytes]  # height -> state root, for recent heights whose roots blocks name
    facts: tuple[Any, ...] = ()  # facts that modules have stated in this block so far, in order

    def facts_of(self, kind: type[F]) -> tuple[F, ...]:
        return tuple(fact for fact in self.facts if isinstance(fact, kind))


class StateReader(Protocol):
    """Read access to the states of all modules."""

    def module_state(self, kind: type[S]) -> S:
        """Return the state of this type. It is unique, because each module has its own state type."""


class StateChange(NamedTuple):
    """The result of one step of a block for one module: its new state, and the facts that it states for other modules."""

    state: Any
    facts: tuple[Any, ...] = ()


class BlobReplacement(NamedTuple):
    """An instruction to replace a blob: a peer that has the old blob makes the new one from it, and then deletes the old one."""

    old: bytes
    size_max: int  # maximum size of the old blob in bytes; a larger blob is another blob, which stays
    # Makes the new bytes from the old ones; None: these bytes are another blob, which stays.
    make: Callable[[bytes], bytes | None]


class Module(Generic[S]):
    """Base class of modules. Every method is pure. By default, methods do nothing."""

    name: ClassVar[str]
    version: ClassVar[int] = 1
    contents: ClassVar[Mapping[str, type]]  # kind of transaction -> type of its content
    # Kind of transaction -> cost of `apply_transaction` in a large state. The unit is one signature check of 0.12 ms.
    # `benchmarks.block_costs` measures the costs.
    costs: ClassVar[Mapping[str, int]] = {}
    limits: ClassVar[Mapping[str, LimitTerms]] = {}  # limits of this module that voters set, by name
    state_type: type[S]  # type of the module's state, which is a frozen codec dataclass

    def genesis_state(self, genesis: Genesis) -> S:
        """Return the state before the first block. By default, this is a state without entries."""
        return self.state_type()

    def upgrade_state(self, old: Any, version: int) -> S:
        """Return this version's state, converted from the state of an earlier version of the module."""
        raise NotImplementedError(f"no upgrade of {self.name} from version {version} to {self.version}")

    def transaction_cost(self, kind: str, content: Any) -> int:
        """Return the cost of `apply_transaction` in a large state, in signature checks, without the signatures themselves."""
        return self.costs.get(kind, 0)

    def embedded_statements(self, author: bytes, content: Any) -> Sequence[EmbeddedStatement]:
        """Return the signed records within a transaction. One false signature makes the transaction invalid in every state."""
        return ()

    def apply_transaction(self, state: S, said: DecodedTransaction, view: StateReader, context: BlockContext) -> StateChange:
        """Return the change of the state by one transaction.

        Raises `Refused` or `RemoteProtocolError` if this transaction cannot be decided now.
        """
        raise NotImplementedError

    def follow_key_rotations(self, state: S, current: Callable[[bytes], bytes]) -> S:
        """Return the state with its tables of members under their present keys.

        `current` maps each key of a member to its present key.
        """
        return state

    def settle_block(self, state: S, view: StateReader, context: BlockContext) -> StateChange:
        return StateChange(state)

    def end_block(self, state: S, view: StateReader, context: BlockContext) -> StateChange:
        return StateChange(state)

    def voted_limits(self, state: S) -> Mapping[str, VotedLimit]:
        """Return the present values and votes of the limits in `Module.limits`, by name."""
        return {}

    def awaited_job(self, content: Any) -> bytes | None:
        """Return the job for whose next round certificate a transaction of this content can wait; None: it needs a block now."""
        return None

    def lingers(self, content: Any) -> bool:
        """Return whether a transaction of this content waits briefly for other transactions before it needs a block."""
        return False

    def pinned_blobs(self, state: S) -> Mapping[bytes, int]:
        """Return digest -> maximum size in bytes, for all blobs that every peer fetches and keeps for ever."""
        return {}

    def replaced_blobs(self, state: S, since: int) -> Sequence[BlobReplacement]:
        """Return all blob replacements in order, except the first `since` ones."""
        return ()
