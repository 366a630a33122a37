"""Files that people import: text in UTF-8, UTF-16, UTF-32 or Windows-1252, and rows of CSV files with any usual separator."""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Final

from protocol.errors import UserError

_MARKS: Final = (  # byte order marks; UTF-32 is first, because its little-endian mark begins with the mark of UTF-16
    (codecs.BOM_UTF32_LE, "UTF-32", "utf-32-le"),
    (codecs.BOM_UTF32_BE, "UTF-32", "utf-32-be"),
    (codecs.BOM_UTF16_LE, "UTF-16", "utf-16-le"),
    (codecs.BOM_UTF16_BE, "UTF-16", "utf-16-be"),
    (codecs.BOM_UTF8, "UTF-8", "utf-8"),
)
# Signs that a text is not Windows-1252. Text in another encoding, decoded as Windows-1252, has three accented letters in a row or
# signs within words; UTF-8 gives `Ã©`. No western language has any of these.
_NOT_WESTERN: Final = re.compile(r"[À-ÖØ-öø-ÿŠŒŽšœžŸƒ]{3}|[ÂÃ][^\x00-\x7fÀ-ÿ]|[^\W\d_][¡-ª¬±-¶¸-º¼-¿×÷€‚ƒ„†‡ˆ‰‹›˜][^\W\d_]")
_WORD: Final = re.compile(r"\S*[^\x00-\x7f]\S*")
# Largest fraction of characters outside ASCII in lines that have any; French and German have a tenth.
OTHER_SHARE_MAX: Final = 0.4
# Least fraction of zeros among every second byte, by which UTF-16 is recognized: the text is mostly Latin.
_ZERO_SHARE_MIN: Final = 0.6
_WORD_CHARACTERS_MAX: Final = 40  # most characters of the word that shows a person how a file was decoded


def decode_text(name: str, data: bytes) -> tuple[str, str]:
    """Return the text in `data`, and a note for people if its encoding is a guess. Raises `UserError` if no encoding fits."""
    for mark, encoding, codec in _MARKS:
        if data.startswith(mark):
            try:
                return data[len(mark) :].decode(codec), ""
            except UnicodeDecodeError as error:
                place = error.start + len(mark)
                raise UserError(
                    f"{name}: the file begins as {encoding}, but byte {place} is invalid in {encoding}: {error.reason}"
                ) from None
    # A zero in the first two bytes is UTF-16: files of our formats begin with an ASCII character. A later zero byte is possible
    # in UTF-8.
    try:
        if 0 not in data[:2]:
            return data.decode(), ""
    except UnicodeDecodeError as error:
        line, byte = data[: error.start].count(b"\n") + 1, data[error.start]
    if 0 in data:
        raise UserError(f"{name}: the file contains zero bytes, as UTF-16 without a byte order mark does; save it as UTF-8")
    try:
        text = data.decode("windows-1252")
    except UnicodeDecodeError:
        text = ""
    if not text or not _is_western(text):
        raise UserError(f"{name}:{line}: not text in UTF-8 (byte 0x{byte:02X}) or Windows-1252; save the file as UTF-8")
    found = _WORD.search(text)
    word = found[0][:_WORD_CHARACTERS_MAX] if found else ""
    return text, f"{name} is read as Windows-1252, with {word!r} in line {line}; save it as UTF-8 if that word is wrong"


def guess_encoding(data: bytes) -> str:
    """Return the likely encoding of bytes that are not UTF-8, or an empty string if no known encoding fits."""
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


# Separators of columns with names for people; in a tie the first one wins.
SEPARATORS: Final = {",": "comma", ";": "semicolon", "\t": "tab", "|": "vertical bar"}
ENDINGS: Final = (".csv", ".tsv", ".tab")
# First line of a CSV file that names the separator, as Excel reads and writes it.
_SEPARATOR_LINE: Final = re.compile(r'"?sep=(.)"?(\r\n|\r|\n|$)', re.IGNORECASE)
# Most characters of a cell: Python's default of 128 kB is too short for articles and books.
FIELD_CHARACTERS_MAX: Final = 16 << 20
_NAMES_SHOWN: Final = 200  # characters of column names in an error
csv.field_size_limit(FIELD_CHARACTERS_MAX)

NumberedRows = Iterator[tuple[int, list[str]]]  # rows of a CSV file: (number of the row's last line, cells)


def open_csv(name: str, text: str, known: Collection[str]) -> tuple[list[str], NumberedRows]:
    """Return the column names and an iterator of the rows. The rows are split by the separator that finds most names of `known`.

    `known` are names of columns in lower case. Raises `UserError` if the file is empty. The iterator raises it at a malformed
    row.
    """
    stated = _SEPARATOR_LINE.match(text)
    start, above = (stated.end(), 1) if stated else (0, 0)
    separators = [stated[1]] if stated else list(SEPARATORS)
    body = text[start:]
    best = (-1, 0, 0, separators[0])
    for place, separator in enumerate(separators):
        header = _header(name, body, separator)
        known_here = len({cell.strip().casefold() for cell in header} & set(known))
        # If no separator finds a known name, the one with most columns is the likeliest, and an error shows these columns.
        best = max(best, (known_here, 0 if known_here else len(header), -place, separator))
    rows = _rows(name, body, best[-1], above)
    _, names = next(rows, (1, []))
    if not names:
        raise UserError(f"{name}: the file has no line")
    return [one.strip() for one in names], rows


def describe_columns(names: Sequence[str]) -> str:
    """Return a description of a file's columns for an error."""
    listed = ", ".join(repr(one) for one in names)[:_NAMES_SHOWN]
    return f"it has {'one column' if len(names) == 1 else f'{len(names)} columns'}: {listed}"


def _header(name: str, text: str, separator: str) -> list[str]:
    try:
        return next((row for _, row in _rows(name, text, separator, 0)), [])
    except UserError:
        return []  # The quotes in the file do not fit this separator.


def _rows(name: str, text: str, separator: str, above: int) -> NumberedRows:
    """Yield all rows that are not empty."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    try:
        for row in reader:
            if any(cell.strip() for cell in row):
                yield reader.line_num + above, row
    except csv.Error as error:
        raise UserError(f"{name}:{reader.line_num + above}: {error}") from None
