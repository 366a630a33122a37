"""What a module is: one part of the state, the transactions that change it, and what a block does to it beside them.

A block acts on every module in the same order, which is the order of the list that `ledger.ledger_state.LedgerRules` is given:

| step | what happens |
|---|---|
| `apply_transaction` | each transaction changes the module that names its kind |
| `follow_key_rotations` | where a member has changed its key, tables of persons follow |
| `settle_block` | what the block's own content makes due; the rounds that it closes are still open |
| `end_block` | rounds are counted and opened, what is over ends |

In each step a module sees those before it as the step has left them, and those behind it as they were before the step. It writes
its own state alone. What it does to another it says as a *fact*, any frozen record: modules that know the record find it in
`BlockContext.facts_of` at the later steps of the same block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from ledger.core.genesis import Genesis
from protocol.errors import FolkmootError
from protocol.identity import Verifier
from protocol.messages import Transaction

S = TypeVar("S")
F = TypeVar("F")


class Refused(FolkmootError):
    """This transaction may not be decided now; the text says why."""


@dataclass(frozen=True, slots=True)
class DecodedTransaction:
    """A transaction while it is applied: its signature and its nonce are checked, its content is decoded."""

    author: bytes
    content: Any  # of the type that `Module.contents` has for its kind
    transaction: Transaction


class EmbeddedStatement(NamedTuple):
    """A record within a transaction that another key than the transaction's has signed."""

    signer: bytes
    message: Any  # with a TAG
    signature: bytes


@dataclass(frozen=True, slots=True)
class BlockContext:
    """Of the block that is being applied. Everything in it is the same for every peer."""

    chain_id: bytes
    height: int
    time_ms: int  # of the parent block: the time of the network, which only blocks move on
    verifier: Verifier
    certified_roots: Mapping[int, bytes]  # state roots of recent heights, as blocks named them
    facts: tuple[Any, ...] = ()  # of this block so far, in order

    def facts_of(self, kind: type[F]) -> tuple[F, ...]:
        """The facts of one kind."""
        return tuple(fact for fact in self.facts if isinstance(fact, kind))


class StateReader(Protocol):
    """The states of all modules, for reading."""

    def module_state(self, kind: type[S]) -> S:
        """The state that has this type. There is one: a module's state type is its own."""


class StateChange(NamedTuple):
    """What one step of a block does to a module, and what the module says of it to the others."""

    state: Any
    facts: tuple[Any, ...] = ()


class BlobReplacement(NamedTuple):
    """A blob has another one in its place: whoever has the old one makes the new one of it, and deletes the old one."""

    old: bytes
    size_max: int  # of the old one; a larger blob is something else, and stays
    make: Callable[[bytes], bytes | None]  # the new bytes of the old ones; None: the old ones are something else, and stay


class Module(Generic[S]):
    """Every method is pure. The defaults do nothing."""

    name: ClassVar[str]
    version: ClassVar[int] = 1
    contents: ClassVar[Mapping[str, type]]  # transaction kind -> record of its content
    # Transaction kind -> cost of `apply_transaction` in a large state, in signature checks of .12 ms. `benchmarks.block_costs`
    # measures it.
    costs: ClassVar[Mapping[str, int]] = {}
    state_type: type[S]  # a frozen codec dataclass

    def genesis_state(self, genesis: Genesis) -> S:
        """The state before the first block; an empty one, unless a module says otherwise."""
        return self.state_type()

    def upgrade_state(self, old: Any, version: int) -> S:
        """This version's state in the place of that of an earlier version."""
        raise NotImplementedError(f"{self.name} {self.version} follows no {version}")

    def transaction_cost(self, kind: str, content: Any) -> int:
        """What `apply_transaction` costs in a large state, beside signatures, in signature checks."""
        return self.costs.get(kind, 0)

    def embedded_statements(self, author: bytes, content: Any) -> Sequence[EmbeddedStatement]:
        """The signed statements within a transaction. One false signature makes the transaction invalid in every state."""
        return ()

    def apply_transaction(self, state: S, said: DecodedTransaction, view: StateReader, context: BlockContext) -> StateChange:
        """Raises `Refused` or `RemoteProtocolError` if this transaction may not be decided now."""
        raise NotImplementedError

    def follow_key_rotations(self, state: S, current: Callable[[bytes], bytes]) -> S:
        """With tables of persons by the keys that they have now; `current` gives a person's key of now."""
        return state

    def settle_block(self, state: S, view: StateReader, context: BlockContext) -> StateChange:
        return StateChange(state)

    def end_block(self, state: S, view: StateReader, context: BlockContext) -> StateChange:
        return StateChange(state)

    def awaited_job(self, content: Any) -> bytes | None:
        """The job whose next closing is soon enough for a transaction of this content. None: it waits for no closing."""
        return None

    def lingers(self, content: Any) -> bool:
        """Whether a transaction of this content waits a moment for others, or for a closing, before a block is made for it."""
        return False

    def pinned_blobs(self, state: S) -> Mapping[bytes, int]:
        """Digest -> size at most, in bytes, of each blob that every peer fetches and keeps. No peer lets go of it later."""
        return {}

    def replaced_blobs(self, state: S, since: int) -> Sequence[BlobReplacement]:
        """Blobs that were replaced, in order, without the first `since` of them."""
        return ()
