"""How a feature plugs into the ledger: a module names its transaction kinds and applies them to its part of the state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ledger.core.genesis import Genesis
from protocol.errors import FolkmootError
from protocol.identity import Verifier
from protocol.messages import Transaction

Modules = Mapping[str, Any]  # module name -> its state, a frozen codec dataclass


class Refused(FolkmootError):
    """This transaction may not be decided now; the text says why."""


@dataclass(frozen=True, slots=True)
class Context:
    """Where a transaction is being applied. Everything in it is the same for every peer."""

    chain_id: bytes
    height: int
    time_ms: int  # of the parent block: the time of the network, which only blocks move on
    verifier: Verifier
    certified_roots: Mapping[int, bytes]  # state roots of recent heights, as blocks named them


class Module(Protocol):
    """`apply` is pure: it gives the new state or raises `Refused`, and may read the other modules' states."""

    name: str
    kinds: frozenset[str]

    def genesis(self, genesis: Genesis) -> Any: ...

    def state_type(self) -> type: ...

    def apply(self, modules: Modules, transaction: Transaction, author: bytes, context: Context) -> Any: ...
