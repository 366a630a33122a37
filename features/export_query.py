"""Questions of features to an export of a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from ledger.ledger_state import StateTransition


class ExportedSets(Protocol):
    """The data of jobs that an export holds, by digest."""

    @property
    def folder(self) -> Path: ...

    def has_set(self, digest: bytes) -> bool: ...

    def read_set(self, digest: bytes, size_max: int) -> bytes:
        """Raises `MissingBlobError`."""


class ExportQuery(Protocol):
    """It is made with the arguments that a person gave."""

    def observe_block(self, transition: StateTransition) -> None:
        """Called for each block, in order. All of it is checked."""

    def answer(self, sets: ExportedSets) -> Any:
        """Called after the last block."""
