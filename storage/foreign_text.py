"""Text and tables of files that people bring: text in UTF-8, UTF-16, UTF-32 or Windows-1252, and rows of CSV files, whatever
separates their cells.
"""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Final

from protocol.errors import UserError

_MARKS: Final = (  # those of UTF-32 first: one of them begins with one of UTF-16
    (codecs.BOM_UTF32_LE, "UTF-32", "utf-32-le"),
    (codecs.BOM_UTF32_BE, "UTF-32", "utf-32-be"),
    (codecs.BOM_UTF16_LE, "UTF-16", "utf-16-le"),
    (codecs.BOM_UTF16_BE, "UTF-16", "utf-16-be"),
    (codecs.BOM_UTF8, "UTF-8", "utf-8"),
)
# Other encodings read as Windows-1252 give words of accented letters alone, or signs within words, and UTF-8 gives `Ã©`.
# No western language has them.
_NOT_WESTERN: Final = re.compile(r"[À-ÖØ-öø-ÿŠŒŽšœžŸƒ]{3}|[ÂÃ][^\x00-\x7fÀ-ÿ]|[^\W\d_][¡-ª¬±-¶¸-º¼-¿×÷€‚ƒ„†‡ˆ‰‹›˜][^\W\d_]")
_WORD: Final = re.compile(r"\S*[^\x00-\x7f]\S*")
OTHER_SHARE_MAX: Final = 0.4  # of characters beyond ASCII in lines that have any; French and German have a tenth
_ZERO_SHARE_MIN: Final = 0.6  # of every second byte of text in UTF-16 that is mostly Latin
_WORD_CHARACTERS_MAX: Final = 40  # of a word that shows how a file was read


def decode_text(name: str, data: bytes) -> tuple[str, str]:
    """The text, and a note where the encoding is a guess. Raises `UserError`, which names line and encoding."""
    for mark, encoding, codec in _MARKS:
        if data.startswith(mark):
            try:
                return data[len(mark) :].decode(codec), ""
            except UnicodeDecodeError as error:
                place = error.start + len(mark)
                raise UserError(f"{name}: it begins as text in {encoding}, and byte {place} is none: {error.reason}") from None
    # The first character of a file of ours is ASCII, which in UTF-16 has a byte 0. Texts further on may hold one in UTF-8.
    try:
        if 0 not in data[:2]:
            return data.decode(), ""
    except UnicodeDecodeError as error:
        line, byte = data[: error.start].count(b"\n") + 1, data[error.start]
    if 0 in data:
        raise UserError(f"{name}: it has bytes of value 0, as in UTF-16 without a byte order mark; save the file as UTF-8")
    try:
        text = data.decode("windows-1252")
    except UnicodeDecodeError:
        text = ""
    if not text or not _is_western(text):
        raise UserError(f"{name}:{line}: this is no text in UTF-8 (byte 0x{byte:02X}) or Windows-1252; save the file as UTF-8")
    found = _WORD.search(text)
    word = found[0][:_WORD_CHARACTERS_MAX] if found else ""
    return text, f"{name} is read as Windows-1252, with {word!r} in line {line}; save it as UTF-8 if that word is wrong"


def guess_encoding(data: bytes) -> str:
    """The name of the encoding that bytes, which are not UTF-8, are likely in; empty: none that is known here."""
    for mark, encoding, _ in _MARKS:
        if data.startswith(mark):
            return encoding
    zeros = [data[start::2].count(0) for start in (0, 1)]
    if max(zeros) * 2 >= len(data) * _ZERO_SHARE_MIN and not min(zeros):
        return "UTF-16 without a byte order mark" if data else ""
    try:
        return "Windows-1252" if _is_western(data.decode("windows-1252")) else ""
    except UnicodeDecodeError:
        return ""


def _is_western(text: str) -> bool:
    lines = "".join(line for line in text.splitlines() if not line.isascii())
    others = sum(character > "\x7f" for character in lines)
    return others <= OTHER_SHARE_MAX * len(lines) and not _NOT_WESTERN.search(text)


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
