"""Tables and text that fit the terminal without broken words. In a narrow terminal, a table omits columns first; then long cells
are cut and end in `…`.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from features.text_tables import CONTROL_CHARACTERS, KeyValueTable, Printable, TextChunk, TextTable, Verbatim

GAP = 2  # blanks between columns
# Characters. A table omits columns before a wrapped cell gets narrower than this: otherwise rows would have too many lines.
WRAPPED_CELL_WIDTH_MIN = 36
BARS = "▁▂▃▄▅▆▇█"
CUT_MIN = 8  # characters that a cut cell has at least
WIDTH_WITHOUT_TERMINAL = 100_000  # characters in a line without a terminal: with this width, no cell is wrapped or cut


class TerminalOutput(Console):
    """A console that raises `BrokenPipeError` in the task that prints. The library rich would exit the program instead."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def make_printer(out: TextIO | None = None) -> Callable[[Printable], None]:
    """Return a function that prints tables and texts to `stream`, by default to standard output."""
    out = out or sys.stdout
    console = TerminalOutput(
        file=out, width=None if out.isatty() else WIDTH_WITHOUT_TERMINAL, highlight=False, markup=False, soft_wrap=False
    )

    is_within_line = False

    def show(what: Printable) -> None:
        nonlocal is_within_line
        if isinstance(what, Verbatim) and out.isatty():
            what = type(what)(what.translate(CONTROL_CHARACTERS))
        if isinstance(what, TextChunk):
            out.write(what)
            out.flush()
            is_within_line = not what.endswith("\n")
            return
        if is_within_line:
            out.write("\n")
            is_within_line = False
        if isinstance(what, str) and not isinstance(what, Verbatim):
            what = "\n".join(shown for line in what.split("\n") for shown in wrap_text(line, console.width))
        console.print(to_renderable(what), soft_wrap=isinstance(what, str), crop=False)

    return show


def to_renderable(what: Printable) -> RenderableType:
    """Return a renderable of rich for a table or a text."""
    return (
        _TableRenderable(what)
        if isinstance(what, TextTable)
        else _KeyValueRenderable(what)
        if isinstance(what, KeyValueTable)
        else what
    )


def truncate_text(text: str, width: int) -> str:
    """Return the text, cut with `…` if it is wider than `width` columns."""
    return text if cell_len(text) <= width else set_cell_size(text, max(0, width - 1)) + "…"


def wrap_text(text: str, width: int) -> Iterator[str]:
    """Yield the lines of a text that is wrapped between words.

    A word wider than the line stays whole, so that users can copy it.
    """
    line = ""
    for blanks, word in re.findall(r"(\s*)(\S+)", text):
        if line and cell_len(line) + cell_len(blanks) + cell_len(word) > width:
            yield line
            line = word
        else:
            line += blanks + word
    yield line


def bar_chart(values: Sequence[float], width: int, height: int) -> list[str]:
    """Return a bar chart as lines from the top, with the newest value at the right.

    The bar of the lowest value is an eighth of a line high, the bar of the highest value has the full height. Values are skipped
    if there are more than columns.
    """
    if not values or width < 1:
        return [""] * height
    picked = values[:: -max(1, -(-len(values) // width))][::-1]
    low, high = min(picked), max(picked)
    eighths = [1 + round((value - low) / (high - low or 1) * (8 * height - 1)) for value in picked]
    return ["".join((" " + BARS)[max(0, min(8, bar - 8 * line))] for bar in eighths) for line in reversed(range(height))]


@dataclass(frozen=True, slots=True)
class _TableRenderable:
    _fitted: TextTable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = self._widths(options.max_width)
        table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, GAP, 0, 0))
        for at, width in widths.items():
            column = self._fitted.columns[at]
            table.add_column(Text(column.title), width=width, justify="right" if column.is_number else "left")
        for row in self._fitted.rows:
            table.add_row(*(self._cell(at, row[at], width) for at, width in widths.items()))
        yield table
        left_out = [column.title for at, column in enumerate(self._fitted.columns) if at not in widths]
        if left_out and not self._fitted.is_live:
            yield Text(f"(a wider terminal also shows {', '.join(left_out)})", "dim")

    def _cell(self, at: int, text: str, width: int) -> Text:
        column = self._fitted.columns[at]
        return Text(truncate_text(text, width) if column.truncates else text, column.style)

    def _widths(self, room: int) -> dict[int, int]:
        """Return the width of each shown column by its index."""
        natural, whole, narrow, readable = {}, {}, {}, {}
        for at, column in enumerate(self._fitted.columns):
            cells, title = [row[at] for row in self._fitted.rows], max(map(cell_len, column.title.split()))
            whole[at] = max(map(cell_len, cells), default=0)
            natural[at] = max(whole[at], cell_len(column.title))
            if column.truncates:
                narrow[at] = max(title, min(CUT_MIN, natural[at]))
            else:
                parts = [word for text in cells for word in text.split()] if column.wraps else cells
                narrow[at] = max([title, *map(cell_len, parts)])
            readable[at] = max(narrow[at], min(natural[at], WRAPPED_CELL_WIDTH_MIN if column.wraps else 0))
        by_spare = sorted((column.drop_order, at) for at, column in enumerate(self._fitted.columns) if column.drop_order)
        wanted = dict(natural if self._fitted.is_live else readable)
        while by_spare and _width(wanted) > room:
            at = by_spare.pop(0)[1]
            del wanted[at], narrow[at], readable[at]
        widths = dict(readable if _width(readable) <= room else narrow)
        for aim in (whole, natural):  # free space first widens columns to their whole cells, then to their whole titles
            left = room - _width(widths)
            while left > 0 and (wanting := [at for at in widths if widths[at] < aim[at]]):
                for at in wanting[:left]:
                    widths[at] += 1
                left -= len(wanting[:left])
        return widths


def _width(columns: Mapping[int, int]) -> int:
    return sum(columns.values()) + GAP * (len(columns) - 1)


@dataclass(frozen=True, slots=True)
class _KeyValueRenderable:
    _pairs: KeyValueTable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        indent = max(map(cell_len, self._pairs.rows)) + GAP
        for name, value in self._pairs.rows.items():
            lines = (line for part in str(value).split("\n") for line in wrap_text(part, options.max_width - indent))
            for number, line in enumerate(lines):
                text = Text(set_cell_size(name if number == 0 else "", indent), "dim", no_wrap=True, overflow="ignore")
                yield text.append(line, "not dim")
