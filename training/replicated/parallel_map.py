"""How work that is cut into parts is done: part after part here, in several threads where a peer hands in a pool.

The results come in the order of the parts, and nothing is combined in another order: the number of threads changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

Part = TypeVar("Part")
Result = TypeVar("Result")


class ParallelMap(Protocol):
    def __call__(self, work: Callable[[Part], Result], parts: Iterable[Part], /) -> Iterable[Result]: ...


def serial_map(work: Callable[[Part], Result], parts: Iterable[Part], /) -> Iterable[Result]:
    return map(work, parts)
