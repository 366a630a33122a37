"""Calls and commands of the feature, each declared once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from features.command_arguments import Argument, parse_integer_in
from features.commands import CommandContext, command, listing_command
from features.text_tables import TextTable


@dataclass(frozen=True, slots=True)
class NoteView:
    text: str
    weight: float


class NoteCalls(Protocol):
    async def notes(self, most: int, heaviest: float = 1.0) -> tuple[NoteView, ...]:
        """Return the last notes."""
        ...

    async def note(self, text: str) -> str: ...


@dataclass(frozen=True)
class NoteAnswers(NoteCalls):
    peer: Any

    async def notes(self, most: int, heaviest: float = 1.0) -> tuple[NoteView, ...]:
        return (NoteView("milk", 0.5), NoteView("bread", heaviest))[:most]

    async def note(self, text: str) -> str:
        return f"noted: {text}"


async def _show_notes(asked: CommandContext[NoteCalls], notes: tuple[NoteView, ...]) -> None:
    table = TextTable("note", "weight")
    for view in notes:
        table.add_row(view.text, str(view.weight))
    asked.show(table)


@listing_command(
    "what was noted", _show_notes, Argument("--most", type=parse_integer_in(1), default=2, metavar="N", help="how many")
)
async def notes(asked: CommandContext[NoteCalls]) -> tuple[NoteView, ...]:
    return await asked.api.notes(asked.options.most)


@command("note something: note TEXT", Argument("text", metavar="TEXT", help="what to note"))
async def note(asked: CommandContext[NoteCalls]) -> None:
    asked.show(await asked.wait_for_decision(asked.api.note(asked.options.text)))
