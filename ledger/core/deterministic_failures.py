"""Which exceptions of a module's code are a bug that all peers meet alike.

The modules are pure, so an exception that follows from their input alone is raised at every peer. The block then acts without the
step that raised it. Any other exception has a cause in this machine: a full disk, too little memory, a deep stack, a damaged row.
Peers without that cause apply the step, so this peer stops rather than go on with another state.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from pathlib import PurePath
from typing import NamedTuple

from ledger.core.module import Refused
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
