"""Calls and words of the feature, declared once each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from features.arguments import Argument, whole_number
from features.tables import Fitted
from features.words import Asked, listing, word


@dataclass(frozen=True, slots=True)
class NoteView:
    text: str
    weight: float


class NoteCalls(Protocol):
    async def notes(self, most: int, heaviest: float = 1.0) -> tuple[NoteView, ...]:
        """The last ones."""
        ...

    async def note(self, text: str) -> str: ...


@dataclass(frozen=True)
class NoteAnswers(NoteCalls):
    peer: Any

    async def notes(self, most: int, heaviest: float = 1.0) -> tuple[NoteView, ...]:
        return (NoteView("milk", 0.5), NoteView("bread", heaviest))[:most]

    async def note(self, text: str) -> str:
        return f"noted: {text}"


async def _show_notes(asked: Asked[NoteCalls], notes: tuple[NoteView, ...]) -> None:
    table = Fitted("note", "weight")
    for view in notes:
        table.add_row(view.text, str(view.weight))
    asked.show(table)


@listing("what was noted", _show_notes, Argument("--most", type=whole_number(1), default=2, metavar="N", help="how many"))
async def notes(asked: Asked[NoteCalls]) -> tuple[NoteView, ...]:
    return await asked.api.notes(asked.options.most)


@word("note something: note TEXT", Argument("text", metavar="TEXT", help="what to note"))
async def note(asked: Asked[NoteCalls]) -> None:
    asked.show(await asked.decided(asked.api.note(asked.options.text)))
