"""Interface of queries that features run on an export (the verified blocks and data of a network in files)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from ledger.ledger_state import StateTransition


class ExportedSets(Protocol):
    """The data sets of jobs in an export, by digest."""

    @property
    def folder(self) -> Path: ...

    def has_set(self, digest: bytes) -> bool: ...

    def read_set(self, digest: bytes, size_max: int) -> bytes:
        """Return the bytes of a data set. Raises `MissingBlobError` if the export does not contain it."""


class ExportQuery(Protocol):
    """A query on an export. Its constructor takes the arguments that a person gave."""

    def observe_block(self, transition: StateTransition) -> None:
        """Receive the states of the ledger before and after the next block, which the caller has verified."""

    def answer(self, sets: ExportedSets) -> Any:
        """Return the result of the query. The caller calls it after the last block."""
