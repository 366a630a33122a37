"""A module of tests whose state holds a table: notes that members write and erase."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

from ledger.core.genesis import Genesis
from ledger.core.module import BlockContext, DecodedTransaction, Module, Refused, StateChange, StateReader
from ledger.tables import Table
from protocol.codec import Count, Key, Length

NOTES_MAX = 2_000  # in one transaction

Name = Annotated[bytes, Length(1, 64)]
Text = Annotated[bytes, Length(0, 200)]


@dataclass(frozen=True, slots=True)
class Note:
    author: Key
    text: Text
    height: Count


@dataclass(frozen=True, slots=True)
class Write:
    """`notebook/write`: overwrites the notes with these names. Nil erases a note."""

    notes: Annotated[dict[Name, Text | None], Length(1, NOTES_MAX)]


@dataclass(frozen=True, slots=True)
class NotebookState:
    written: Count
    notes: Table[Note]


class NotebookModule(Module[NotebookState]):
    name = "notebook"
    contents: ClassVar[Mapping[str, type]] = {"notebook/write": Write}
    state_type = NotebookState

    def genesis_state(self, genesis: Genesis) -> NotebookState:
        return NotebookState(0, Table(Note))

    def apply_transaction(
        self, state: NotebookState, said: DecodedTransaction, view: StateReader, context: BlockContext
    ) -> StateChange:
        changes: dict[bytes, Note | None] = {}
        for name, text in said.content.notes.items():
            if text is None and name not in state.notes:
                raise Refused(f"there is no note {name.hex()}")
            changes[name] = None if text is None else Note(said.author, text, context.height)
        return StateChange(replace(state, written=state.written + len(changes), notes=state.notes.with_rows(changes)))


def notes(count: int, first: int = 0, text: bytes = b"") -> dict[bytes, Any]:
    """Return `count` notes with names of their own."""
    return {b"%d" % number: text or b"note %d" % number for number in range(first, first + count)}
