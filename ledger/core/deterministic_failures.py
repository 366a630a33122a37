"""Classification of exceptions in a module's code: deterministic exceptions occur at all peers, and other exceptions have local
causes.

Modules are pure. If their input alone causes an exception, it is raised at every peer, and the block is applied without the
step that raised it. Any other exception has a cause on this machine: a full disk, too little memory, a deep stack, a damaged
row. Peers without that cause apply the step, so this peer stops rather than continue with another state.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from pathlib import PurePath
from typing import NamedTuple

from ledger.core.module import Refused
from protocol.errors import LocalProtocolError, RemoteProtocolError, UserError

# RuntimeError is not in the list: a RecursionError depends on the caller's stack, and other subclasses depend on threads.
# ImportError is not in the list either, because it depends on the installation.
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
LOCAL_ERRORS = (OSError, MemoryError, RecursionError, UserError)  # exceptions with local causes; a StorageError is a UserError


class ModuleFailure(NamedTuple):
    """Description of a module's step that raised an exception and therefore had no effect."""

    module: str
    step: str
    error: str

    def __str__(self) -> str:
        return f"{self.step} of the module {self.module} failed: {self.error}"


def is_deterministic(error: Exception) -> bool:
    """Return whether every peer raises this exception.

    An exception raised during the handling of a local error does not count as deterministic.
    """
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
