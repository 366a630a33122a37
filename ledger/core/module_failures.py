"""Failures of a module's code: which exceptions all peers meet alike, and whether a state has an encoding.

The modules are pure, so an exception that follows from their input alone is raised at every peer. The block then acts without the
step that raised it. Any other exception has a cause in this machine: a full disk, too little memory, a deep stack, a damaged row.
Peers without that cause apply the step, so this peer stops rather than go on with another state.
"""

from __future__ import annotations

import dataclasses
import functools
import traceback
import typing
from collections.abc import Iterator
from pathlib import PurePath
from typing import Annotated, Any, Final, NamedTuple

from ledger.core.module import Refused
from ledger.tables import Table, table_fields
from protocol import codec
from protocol.codec import Length
from protocol.errors import LocalProtocolError, RemoteProtocolError, UserError

# Not RuntimeError: a RecursionError depends on the stack of the caller, other ones on threads. Not ImportError: an installation.
DETERMINISTIC_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NameError,
    NotImplementedError,
    StopIteration,
    TypeError,
    ValueError,
    Refused,
    LocalProtocolError,
    RemoteProtocolError,
)
LOCAL_ERRORS = (OSError, MemoryError, RecursionError, UserError)  # a StorageError is a UserError
SIZE_MAX = 512 << 20  # of one part: a store takes as much of a whole module
ABSENT: Final = object()  # not None, which a faulty step may return


class ModuleFailure(NamedTuple):
    """A step of a module that raised, and so did not act."""

    module: str
    step: str
    error: str

    def __str__(self) -> str:
        return f"{self.step} of the module {self.module} failed: {self.error}"


def is_deterministic(error: Exception) -> bool:
    """Whether every peer raises it. An exception that was raised while one of this machine was handled does not count."""
    return isinstance(error, DETERMINISTIC_ERRORS) and not any(isinstance(cause, LOCAL_ERRORS) for cause in _causes(error))


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        cause = waiting.pop()
        if cause is not None and id(cause) not in seen:
            seen.add(id(cause))
            yield cause
            waiting += (cause.__cause__, cause.__context__)


def make_module_failure(module: str, step: str, error: Exception) -> ModuleFailure:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return ModuleFailure(module, step, f"{type(error).__name__}: {error} ({PurePath(last.filename).name}:{last.lineno})")


# Encodings: the price of the check is that of the changes ---------------------------------------------------------------


def check_encodable(of: Any, new: Any, old: Any) -> None:
    """Raise a deterministic exception if `new` has no encoding of the type `of` which can be read back.

    A step may return a state of the right type with a value that no encoding has: a number outside its bounds, a text where bytes
    belong. All peers would meet it when they hash the state, which is too late to leave the step out.

    `old` has an encoding. Parts that both share are passed over if both have this type.
    """
    if new is old:
        return
    hint, length = typing.get_args(of)[:2] if typing.get_origin(of) is Annotated else (of, None)
    if typing.get_origin(hint) is dict and type(new) is type(old) is dict:
        _check_dictionary(typing.get_args(hint), length, new, old)
    elif typing.get_origin(hint) is Table and isinstance(new, Table) and new.kind == typing.get_args(hint)[0]:
        new.check_changes(old if isinstance(old, Table) else None)
    elif dataclasses.is_dataclass(hint) and type(new) is hint and (type(old) is hint or table_fields(hint)):
        known = old if type(old) is hint else ABSENT
        for name, part in _hints(typing.cast(Any, hint)).items():
            check_encodable(part, getattr(new, name), getattr(known, name, ABSENT))
    elif codec.decode(of, codec.encode(new), SIZE_MAX) != new:
        raise TypeError(f"a {type(new).__name__} that is read back as something else")


def _check_dictionary(kinds: tuple[Any, Any], length: Length | None, new: dict[Any, Any], old: dict[Any, Any]) -> None:
    if length is not None and not length.low <= len(new) <= length.high:
        raise RemoteProtocolError("oversized", f"{len(new)} entries, allowed {length.low}..{length.high}")
    for key, item in new.items():
        before = old.get(key, ABSENT)
        if before is ABSENT:
            check_encodable(kinds[0], key, ABSENT)
        if item is not before:
            check_encodable(kinds[1], item, before)


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)
