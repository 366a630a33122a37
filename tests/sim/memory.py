"""Memory of a node: elements of all containers reachable from its replica, rounds and pool, and their bytes."""

from __future__ import annotations

import functools
from collections import deque
from typing import Any

from ledger.ledger_state import LedgerRules, LedgerState
from peer.node.node import Node
from tests.packages import PACKAGES

SKIPPED = (LedgerState, LedgerRules)
WITHOUT_PARTS = frozenset({int, float, bool, str, type(None)})
ELEMENTS_PER_PEER = 6_000  # statements, offers, tallies and early messages of a few heights and views
BYTES_PER_PEER = 4 << 20


def limits(peers: int) -> dict[str, int]:
    return {"elements": ELEMENTS_PER_PEER * peers, "bytes": BYTES_PER_PEER * peers}


def kept_for_later(node: Node) -> set[bytes]:
    """Return the senders of the messages that a node keeps for later heights."""
    future = node.replica._future
    return {peer for peer, messages in future._small.items() if messages} | set(future._proposals)


def sizes(node: Node) -> dict[str, int]:
    seen: set[int] = set()
    total = {"elements": 0, "bytes": 0}
    stack: list[Any] = [node.replica, node.rounds, node.ledger.mempool, node.ledger.rounds]
    while stack:
        value = stack.pop()
        if type(value) in WITHOUT_PARTS or id(value) in seen or isinstance(value, SKIPPED):
            continue
        seen.add(id(value))
        if isinstance(value, bytes):
            total["bytes"] += len(value)
        elif isinstance(value, dict):
            total["elements"] += len(value)
            stack += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            total["elements"] += len(value)
            stack += value
        elif type(value).__module__.split(".")[0] in PACKAGES:
            stack += _fields(value)
    return total


def _fields(value: Any) -> list[Any]:
    if isinstance(value, type):
        return []
    if hasattr(value, "__dict__"):
        return list(vars(value).values())
    return [getattr(value, name) for name in _slots(type(value)) if hasattr(value, name)]


@functools.cache
def _slots(kind: type) -> tuple[str, ...]:
    return tuple(name for of in kind.__mro__ for name in getattr(of, "__slots__", ()))
