"""Tables that fit the terminal: no word is ever broken. Where room is short, columns go first, then long cells end in `…`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

GAP = 2  # blanks between columns
CUT_MIN = 8  # characters that stay of a cell that may be cut


@dataclass(frozen=True, slots=True)
class Column:
    title: str
    spare: int = 0  # where room is short, columns are left out in this order, 1 first; 0: it stays
    may_be_cut: bool = False  # at its end, with `…`
    wraps: bool = False  # between words
    is_number: bool = False  # its cells stand at the right
    style: str = ""  # of its cells


def fitting(text: str, width: int) -> str:
    """The text, cut with `…` if it is wider."""
    return text if cell_len(text) <= width else set_cell_size(text, max(0, width - 1)) + "…"


def wrapped(text: str, width: int) -> Iterator[str]:
    """Lines that break between words. A wider word stays whole: the terminal breaks it, and it can be copied all the same."""
    line = ""
    for blanks, word in re.findall(r"(\s*)(\S+)", text):
        if line and cell_len(line) + cell_len(blanks) + cell_len(word) > width:
            yield line
            line = word
        else:
            line += blanks + word
    yield line


class Fitted:
    """Rows under titles. Cells are plain text; titles wrap."""

    def __init__(self, *columns: Column, is_live: bool = False) -> None:
        """A live table is to stay low: columns are left out before cells wrap, and nothing is said of them."""
        self._columns, self._is_live = columns, is_live
        self._rows: list[tuple[str, ...]] = []

    def add_row(self, *cells: str) -> None:
        assert len(cells) == len(self._columns)
        self._rows.append(cells)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = self._widths(options.max_width)
        table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, GAP, 0, 0))
        for at, width in widths.items():
            column = self._columns[at]
            table.add_column(Text(column.title), width=width, justify="right" if column.is_number else "left")
        for row in self._rows:
            table.add_row(*(self._cell(at, row[at], width) for at, width in widths.items()))
        yield table
        left_out = [column.title for at, column in enumerate(self._columns) if at not in widths]
        if left_out and not self._is_live:
            yield Text(f"(a wider terminal also shows {', '.join(left_out)})", "dim")

    def _cell(self, at: int, text: str, width: int) -> Text:
        column = self._columns[at]
        return Text(fitting(text, width) if column.may_be_cut else text, column.style)

    def _widths(self, room: int) -> dict[int, int]:
        """Of the columns that are shown, by their place."""
        natural, narrow = {}, {}
        for at, column in enumerate(self._columns):
            cells, title = [row[at] for row in self._rows], max(map(cell_len, column.title.split()))
            natural[at] = max(map(cell_len, (column.title, *cells)))
            if column.may_be_cut:
                narrow[at] = max(title, min(CUT_MIN, natural[at]))
            else:
                parts = [word for text in cells for word in text.split()] if column.wraps else cells
                narrow[at] = max([title, *map(cell_len, parts)])
        by_spare = sorted((column.spare, at) for at, column in enumerate(self._columns) if column.spare)
        wanted = dict(natural if self._is_live else narrow)
        while by_spare and sum(wanted.values()) + GAP * (len(wanted) - 1) > room:
            del wanted[by_spare[0][1]], narrow[by_spare.pop(0)[1]]
        widths, left = dict(narrow), room - sum(narrow.values()) - GAP * (len(narrow) - 1)
        while left > 0 and (wanting := [at for at in widths if widths[at] < natural[at]]):
            for at in wanting[:left]:
                widths[at] += 1
            left -= len(wanting[:left])
        return widths


class Pairs:
    """What is said of one thing, a line each, with the names in a column of their own."""

    def __init__(self, rows: Mapping[str, object]) -> None:
        self._rows = rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        indent = max(map(cell_len, self._rows)) + GAP
        for name, value in self._rows.items():
            for number, line in enumerate(wrapped(str(value), options.max_width - indent)):
                text = Text(set_cell_size(name if number == 0 else "", indent), "dim", no_wrap=True, overflow="ignore")
                yield text.append(line, "not dim")
