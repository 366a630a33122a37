"""Tables and texts for people, as values. `peer/commands/table_renderer.py` renders them for the width of the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Unicode characters that change the order of characters in a line.
BIDI_CONTROLS = {*range(0x202A, 0x202F), *range(0x2066, 0x206A)}
# Characters that tables replace: texts of models and strangers may contain them, and a terminal would execute them.
CONTROL_CHARACTERS = dict.fromkeys({*range(0x20), *range(0x7F, 0xA0), *BIDI_CONTROLS} - {9, 10}, "\ufffd")


@dataclass(frozen=True, slots=True)
class Column:
    title: str
    drop_order: int = 0  # place of the column in the order in which a narrow terminal drops columns, 1 first; 0: the column stays
    truncates: bool = False  # True: long cells are cut and end with `…`
    wraps: bool = False  # True: long cells wrap between words
    is_number: bool = False  # True: cells are aligned right
    style: str = ""  # style of the cells, in the syntax of the package rich


class TextTable:
    """A table for people: rows under column titles. Cells are plain text, and titles may wrap."""

    def __init__(self, *columns: str | Column, is_live: bool = False) -> None:
        """Make an empty table.

        A live table, which is redrawn, drops columns before it wraps cells, without a note about these columns.
        """
        self.columns = tuple(column if isinstance(column, Column) else Column(column) for column in columns)
        self.is_live = is_live
        self.rows: list[tuple[str, ...]] = []

    def add_row(self, *cells: str) -> None:
        assert len(cells) == len(self.columns)
        self.rows.append(tuple(cell.translate(CONTROL_CHARACTERS) for cell in cells))


@dataclass(frozen=True, slots=True)
class KeyValueTable:
    """A table of the values of one object, one per line, with their names in the first column."""

    rows: Mapping[str, object]


class Verbatim(str):
    """Text for programs or from a model, which is shown unchanged. Other text wraps between words."""


class TextChunk(Verbatim):
    """A part of a text that is shown unchanged.

    The next part continues on the same line, and any other output starts a new line.
    """


Printable = str | TextTable | KeyValueTable


def format_ordinal(number: int) -> str:
    """Return an ordinal number as text: `1st`, `2nd`, `3rd`, `4th`, …"""
    suffix = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"


def format_quorum(voters: int, tolerated: int, quorum: int) -> str:
    """Return the text on a number of voters, such as `4 (tolerates 1 faulty, quorum 3)`."""
    return f"{voters} (tolerates {tolerated} faulty, quorum {quorum})"


def pluralize(count: int, what: str) -> str:
    """Return a count with its noun, such as `1 proposal` or `2 proposals`."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
