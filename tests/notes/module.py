"""Notes in the state: the count of each member, the blob with its last note, and a table of authors and times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from features.feature import EventLine
from ledger.core.genesis import Genesis
from ledger.core.module import BlockContext, DecodedTransaction, Module, StateChange, StateReader
from ledger.members import MembersState
from ledger.tables import Table
from protocol.codec import Count, Digest, Key, Length

NOTE_BYTES_MAX = 1_000
WRITERS_MAX = 100


@dataclass(frozen=True, slots=True)
class Write:
    """`notes/write`"""

    digest: Digest


@dataclass(frozen=True, slots=True)
class Line:
    """A row by the digest of the note: its last author."""

    author: Key
    height: Count


@dataclass(frozen=True, slots=True)
class NotesState:
    written: Annotated[dict[Key, Count], Length(0, WRITERS_MAX)] = field(default_factory=dict)
    last: Digest | None = None
    lines: Table[Line] = field(default_factory=lambda: Table(Line))


def news(before: StateReader, after: StateReader) -> Iterator[EventLine]:
    if before.module_state(NotesState).last != after.module_state(NotesState).last:
        yield EventLine("member", "a note was written", after.module_state(NotesState).last or b"")


def find_full_books(state: StateReader, height: int) -> Iterator[str]:
    if len(state.module_state(NotesState).written) == WRITERS_MAX:
        yield "no further member can write a note"


class NotesModule(Module[NotesState]):
    name = "notes"
    contents: ClassVar[Mapping[str, type]] = {"notes/write": Write}
    state_type = NotesState

    def genesis_state(self, genesis: Genesis) -> NotesState:
        return NotesState()

    def apply_transaction(
        self, state: NotesState, said: DecodedTransaction, view: StateReader, context: BlockContext
    ) -> StateChange:
        assert said.author in view.module_state(MembersState).members
        written = {**state.written, said.author: state.written.get(said.author, 0) + 1}
        lines = state.lines.with_rows({said.content.digest: Line(said.author, context.height)})
        return StateChange(NotesState(written, said.content.digest, lines))

    def pinned_blobs(self, state: NotesState) -> Mapping[bytes, int]:
        return {} if state.last is None else {state.last: NOTE_BYTES_MAX}
