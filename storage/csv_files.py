"""Rows of CSV files, whatever separates their cells."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Final

from protocol.errors import UserError

SEPARATORS: Final = {",": "comma", ";": "semicolon", "\t": "tab", "|": "vertical bar"}  # the first wins where all fit alike
ENDINGS: Final = (".csv", ".tsv", ".tab")
_SEPARATOR_LINE: Final = re.compile(r'"?sep=(.)"?(\r\n|\r|\n|$)', re.IGNORECASE)  # Excel reads and writes it
FIELD_CHARACTERS_MAX: Final = 16 << 20  # articles and books are longer than the usual 128 kB
_NAMES_SHOWN: Final = 200  # characters of the names of columns
csv.field_size_limit(FIELD_CHARACTERS_MAX)

NumberedRows = Iterator[tuple[int, list[str]]]  # each with the number of its last line


def open_csv(name: str, text: str, known: Collection[str]) -> tuple[list[str], NumberedRows]:
    """The names of the columns, and the rows. `known`: names in lower case. The separator that finds most of them is taken.

    Raises `UserError` where the file has no rows, and while rows are read.
    """
    stated = _SEPARATOR_LINE.match(text)
    start, above = (stated.end(), 1) if stated else (0, 0)
    separators = [stated[1]] if stated else list(SEPARATORS)
    body = text[start:]
    best = (-1, 0, 0, separators[0])
    for place, separator in enumerate(separators):
        header = _header(name, body, separator)
        known_here = len({cell.strip().casefold() for cell in header} & set(known))
        # Where no name is known, the separator with most columns is the likeliest: a message shows them.
        best = max(best, (known_here, 0 if known_here else len(header), -place, separator))
    rows = _rows(name, body, best[-1], above)
    _, names = next(rows, (1, []))
    if not names:
        raise UserError(f"{name}: there is no line in it")
    return [one.strip() for one in names], rows


def describe_columns(names: Sequence[str]) -> str:
    """The columns that were found, for an error."""
    listed = ", ".join(repr(one) for one in names)[:_NAMES_SHOWN]
    return f"it has {'one column' if len(names) == 1 else f'{len(names)} columns'}: {listed}"


def _header(name: str, text: str, separator: str) -> list[str]:
    try:
        return next((row for _, row in _rows(name, text, separator, 0)), [])
    except UserError:
        return []  # quotes that do not fit this separator


def _rows(name: str, text: str, separator: str, above: int) -> NumberedRows:
    """Rows with any text in them."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    try:
        for row in reader:
            if any(cell.strip() for cell in row):
                yield reader.line_num + above, row
    except csv.Error as error:
        raise UserError(f"{name}:{reader.line_num + above}: {error}") from None
