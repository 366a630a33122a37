"""Tables and texts for people, as values. `peer/commands/table_renderer.py` draws them as wide as the screen is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

BIDI_CONTROLS = {*range(0x202A, 0x202F), *range(0x2066, 0x206A)}  # they show a line in another order
# Models and strangers write them; a terminal would do what they say.
CONTROL_CHARACTERS = dict.fromkeys({*range(0x20), *range(0x7F, 0xA0), *BIDI_CONTROLS} - {9, 10}, "\ufffd")


@dataclass(frozen=True, slots=True)
class Column:
    title: str
    drop_order: int = 0  # where room is short, columns are left out in this order, 1 first; 0: it stays
    truncates: bool = False  # at its end, with `…`
    wraps: bool = False  # between words
    is_number: bool = False  # its cells stand at the right
    style: str = ""  # of its cells


class TextTable:
    """Rows under titles. Cells are plain text; titles wrap."""

    def __init__(self, *columns: str | Column, is_live: bool = False) -> None:
        """A live table is to stay low: columns are left out before cells wrap, and nothing is said of them."""
        self.columns = tuple(column if isinstance(column, Column) else Column(column) for column in columns)
        self.is_live = is_live
        self.rows: list[tuple[str, ...]] = []

    def add_row(self, *cells: str) -> None:
        assert len(cells) == len(self.columns)
        self.rows.append(tuple(cell.translate(CONTROL_CHARACTERS) for cell in cells))


@dataclass(frozen=True, slots=True)
class KeyValueTable:
    """Values of one thing, a line each. The names stand in a column of their own."""

    rows: Mapping[str, object]


class Verbatim(str):
    """Text for programs, or of a model: it is shown as it is. Other text wraps between words."""


class TextChunk(Verbatim):
    """A part of such a text: the next one goes on in the same line, and all else that is shown begins a new one."""


Printable = str | TextTable | KeyValueTable


def pluralize(count: int, what: str) -> str:
    """`1 proposal`, `2 proposals`."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
