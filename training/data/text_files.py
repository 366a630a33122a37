"""Text of the files that people train on: plain text, JSON, tables and Parquet, each optionally compressed by gzip.

Markup is not text. Unreadable files of a folder are skipped, and `TextFileReport` names each with the reason.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

from features.text_tables import pluralize
from protocol.errors import UserError
from storage.foreign_text import ENDINGS as TABLES
from storage.foreign_text import SEPARATORS, decode_text, describe_columns, guess_encoding, open_csv
from storage.regular_files import open_regular

TEXT: Final = (".txt", ".md")
JSON_LINES: Final = (".jsonl", ".ndjson")
JSON: Final = ".json"
PARQUET: Final = ".parquet"
# Endings of the files in a folder that are read, optionally with .gz.
READ_ENDINGS: Final = (*TEXT, *JSON_LINES, JSON, *TABLES, PARQUET)
KINDS: Final = "text (.txt, .md), JSON (.jsonl, .json), tables (.csv, .tsv) or Parquet, each optionally with .gz"
MARKUP: Final = {
    **dict.fromkeys((".html", ".htm", ".xhtml"), "HTML"),
    **dict.fromkeys((".xml", ".svg", ".rss"), "XML"),
    **dict.fromkeys((".yaml", ".yml"), "YAML"),
    ".rtf": "RTF",
    ".ipynb": "a Jupyter notebook",
}
BINARY: Final = (  # (first bytes of a file that is not text, description of its kind for people)
    (b"%PDF", "PDF"),
    (b"PK\3\4", "a ZIP archive, such as .docx or .xlsx"),
    (b"\x28\xb5\x2f\xfd", "compressed with Zstandard"),
    (b"BZh", "compressed with bzip2"),
    (b"\xfd7zXZ", "compressed with xz"),
)
GZIP_MARK: Final = b"\x1f\x8b"
PARQUET_MARK: Final = b"PAR1"
COLUMN: Final = "text"  # default name of the column with the text of a record; `--column` names another
# Names of files in a folder that describe a public data set.
ABOUT_FOLDER: Final = re.compile(r"(readme|licen[cs]e|copying|notice)\b.*", re.IGNORECASE)

READ_BYTES: Final = 256 << 10  # bytes of one read of a text file: at this size, reading costs no more than hashing
HEAD_BYTES: Final = 4 << 10  # number of first bytes of a file that are read to recognize its kind
LINE_BYTES_MAX: Final = 16 << 20  # bytes of one JSONL line: a whole line must be in memory to be parsed
# Bytes of a table or JSON array: the whole must be in memory, and Python objects take ten times as much.
WHOLE_BYTES_MAX: Final = 64 << 20
ROWS_AT_ONCE: Final = 256  # rows of a Parquet file in memory as Python objects
FILES_NAMED_MAX: Final = 200  # names of skipped files in a report: each list of the jobs contains them
_NAMES_SHOWN: Final = 200  # characters of field names in an error


class TextFileReport:
    """Report for people on files that were read: skipped files, skipped records, and remarks on other files."""

    def __init__(self) -> None:
        self.records = 0  # number of records without text
        self.remarks: list[str] = []
        self._named: list[str] = []
        self._files = 0

    def add_skipped_file(self, name: str, reason: str) -> None:
        self._files += 1
        if len(self._named) < FILES_NAMED_MAX:
            self._named.append(f"  {printable_path(name)}: {reason}")

    def report_lines(self) -> tuple[str, ...]:
        """Return the report as lines for people."""
        files = [f"files left out: {self._files}"] if self._files else []
        more = [f"  and {self._files - len(self._named)} more"] if self._files > len(self._named) else []
        records = [f"records without text left out: {self.records}"] if self.records else []
        return (*files, *self._named, *more, *records, *self.remarks)


def read_text(path: Path, column: str = "", findings: TextFileReport | None = None) -> Iterator[bytes]:
    """Yield the text of a file, or of all files below a folder in sorted order, in pieces.

    Each file of a folder is checked completely before its first piece. Raises `UserError`, which names the path, if nothing can
    be read.
    """
    findings = findings or TextFileReport()
    if not path.exists():
        raise UserError(f"no such file or folder: {printable_path(path)} (give a file or a folder of {KINDS})")
    something = False
    for file in _files_below(path, findings) if path.is_dir() else [path]:
        # A folder may mix plain text and tables, so `--column` ignores its plain text. For a single file of plain text,
        # `--column` is an error.
        of_file = "" if file != path and _ending(file) in TEXT else column
        if file != path and not _is_read(path, file, of_file, findings):
            continue
        newline = b""
        for piece in _pieces_of(file, of_file, findings):
            yield piece
            something, newline = True, piece[-1:]
        if newline not in (b"", b"\n"):
            yield b"\n"  # A line break separates the last line of a file from the first line of the next one.
    if not something:
        raise UserError(
            "\n".join(
                [
                    f"{printable_path(path)} contains no text: give a file or folder with at least a few kB of {KINDS}",
                    *findings.report_lines(),
                ]
            )
        )


def _files_below(path: Path, findings: TextFileReport) -> list[Path]:
    """Return the files whose names look like text, in sorted order, and report the others."""
    found = list[Path]()
    for folder, folders, names in os.walk(path):
        for name in sorted(folders):
            below = Path(folder) / name
            if name.startswith(".") or below.is_symlink():
                folders.remove(name)
                reason = "hidden" if name.startswith(".") else "a link to a folder"
                findings.add_skipped_file(f"{below.relative_to(path).as_posix()}/", reason)
        found += (Path(folder) / name for name in names)
    kept = list[Path]()
    for file in sorted(found, key=lambda file: file.relative_to(path).as_posix()):
        reason = _reason_by_name(file)
        if reason:
            findings.add_skipped_file(file.relative_to(path).as_posix(), reason)
        else:
            kept.append(file)
    texts = [file for file in kept if not ABOUT_FOLDER.fullmatch(file.name)] or kept
    for file in kept:
        if file not in texts:
            findings.add_skipped_file(file.relative_to(path).as_posix(), "it describes the folder; rename it to train on it")
    return texts


def _reason_by_name(file: Path) -> str:
    """Return why a file of a folder is skipped, judged by its name; empty: the file may be read."""
    ending = _ending(file)
    if file.name.startswith("."):
        return "hidden"
    if not file.exists():
        return "a broken link"
    if not file.is_file():
        return "not a regular file"
    if ending in MARKUP:
        return f"{MARKUP[ending]}, which has markup; extract its text"
    kind = f"with the ending {ending}" if ending else "without an ending"
    return "" if ending in READ_ENDINGS else f"files {kind} are not read; rename it to .txt if it is text"


def _is_read(folder: Path, file: Path, column: str, findings: TextFileReport) -> bool:
    """Read a file of a folder as a check. Return true if it can be read; if not, report the file and return false."""
    reason = "it is empty"
    try:
        for _ in _pieces_of(file, column, TextFileReport()):
            reason = ""
    except UserError as error:
        reason = str(error).removeprefix(printable_path(file)).lstrip(" :")
    if reason:
        findings.add_skipped_file(file.relative_to(folder).as_posix(), reason)
    return not reason


def _ending(file: Path) -> str:
    """Return the ending of the file's name in lower case, without `.gz`."""
    name = file.name.lower().removesuffix(".gz")
    return Path(name).suffix


@contextlib.contextmanager
def open_unpacked(file: Path) -> Iterator[BinaryIO]:
    """Open a file, and decompress it if it is gzip. Raises `UserError`."""
    try:
        with open_regular(file) as raw:
            is_packed = raw.read(len(GZIP_MARK)) == GZIP_MARK or file.name.lower().endswith(".gz")
            raw.seek(0)
            if not is_packed:
                yield raw
                return
            with gzip.GzipFile(fileobj=raw) as stream:
                yield cast(BinaryIO, stream)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{printable_path(file)} is a damaged gzip file: {error}") from None


def _pieces_of(file: Path, column: str, findings: TextFileReport) -> Iterator[bytes]:
    try:
        with open_unpacked(file) as stream:
            head = stream.read(HEAD_BYTES)
            stream.seek(0)
            for mark, kind in BINARY:
                if head.startswith(mark):
                    raise UserError(f"{printable_path(file)} is not a text file: it is {kind}; extract its text")
            yield from _of_kind(stream, head, file, column, findings)
    except OSError as error:
        raise UserError(f"cannot read {printable_path(file)}: {error.strerror or error}") from None


def _of_kind(stream: BinaryIO, head: bytes, file: Path, column: str, findings: TextFileReport) -> Iterator[bytes]:
    ending = _ending(file)
    if ending == PARQUET or head.startswith(PARQUET_MARK):
        return _encoded(_parquet(stream, file, column or COLUMN), file, findings)
    if ending in (*JSON_LINES, JSON):
        return _encoded(_texts_of_json(stream, head, file, column or COLUMN, findings), file, findings)
    if ending in TABLES:
        return _encoded(_table(stream, file, column or COLUMN, findings), file, findings)
    if column:
        none = f"{printable_path(file)} is plain text, which has no column {column!r}"
        raise UserError(f"{none}: leave out --column, or rename it to .jsonl or .csv")
    kind = MARKUP.get(ending) or _markup(head)
    if kind and ending in TEXT:
        findings.remarks.append(
            f"{printable_path(file)} looks like {kind}, and the model learns its markup as text: give only the text"
        )
    elif kind:
        raise UserError(
            f"{printable_path(file)} is {kind}, not plain text: extract its text, or rename it to .txt to train on it as it is"
        )
    return _checked(iter(lambda: stream.read(READ_BYTES), b""), file)


_HTML: Final = re.compile(r"<(!doctype html|html|head|body)\b", re.IGNORECASE)
_XML: Final = re.compile(r"<(\?xml|!doctype|!--|[a-z][\w:.-]*(\s+[\w:.-]+\s*=\s*[\"'][^<>]*)?\s*/?>)", re.IGNORECASE)
_OBJECT: Final = re.compile(r'\[?\s*\{\s*"[^"\n]*"\s*:|\[\s*"[^"\n]*"\s*[],]')


def _markup(head: bytes) -> str:
    """Return the kind of markup that a file begins with; empty: the file looks like text."""
    start = head.decode(errors="replace").removeprefix("\ufeff").lstrip()
    for kind, pattern in (("HTML", _HTML), ("XML", _XML), ("JSON", _OBJECT)):
        if pattern.match(start):
            return kind
    if start.startswith("{\\rtf"):
        return "RTF"
    line = start.split("\n", 1)[0]
    cells = max((line.split(separator) for separator in SEPARATORS), key=len)
    is_header = len(cells) > 1 and COLUMN in (cell.strip(' "\r').casefold() for cell in cells)
    return "a table" if is_header else ""


def _checked(pieces: Iterator[bytes], file: Path) -> Iterator[bytes]:
    """Yield the pieces of a text without its byte order mark. Raises `UserError` at the first byte that is not UTF-8 text."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    position = 0
    for piece in pieces:
        try:
            decoder.decode(piece)
        except UnicodeDecodeError:
            raise _binary(file, f"not UTF-8 in the {READ_BYTES >> 10} kB from byte {position}", piece) from None
        if b"\0" in piece:
            raise _binary(file, f"NUL at byte {position + piece.index(0)}", piece)
        text = piece.removeprefix(codecs.BOM_UTF8) if position == 0 else piece
        position += len(piece)
        if text:
            yield text
    try:
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        raise _binary(file, "it ends inside a UTF-8 character") from None


def printable_path(path: Path | str) -> str:
    """Return a path as text for an error; it is quoted if it contains a line break."""
    return str(path) if str(path).isprintable() else repr(str(path))


def _binary(file: Path, why: str, data: bytes = b"") -> UserError:
    encoding = guess_encoding(data)
    looks = f", it looks like {encoding}" if encoding else ""
    return UserError(
        f"{printable_path(file)} is not a text file ({why}{looks}): save it as UTF-8 text, or take it out of the folder"
    )


# Records -------------------------------------------------------------------------------------------------------------


# Pairs of a record's place in the file, for errors, and its text (None: the record has no text).
Texts = Iterator[tuple[str, str | None]]


def _encoded(texts: Texts, file: Path, findings: TextFileReport) -> Iterator[bytes]:
    """Yield each text as UTF-8 with a newline at its end. Records without text are counted in `findings`."""
    for where, text in texts:
        if text is None or not text.strip():
            findings.records += 1
            continue
        if "\0" in text:
            raise UserError(f"{printable_path(file)}{where}: the text contains a NUL character: remove it")
        try:
            yield text.encode() + b"\n"
        except UnicodeEncodeError:
            raise UserError(
                f"{printable_path(file)}{where}: the text contains half a surrogate pair, which is not a character: remove it"
            ) from None


def _column_of(names: Iterable[str], column: str) -> str | None:
    """Return the file's own name of `column`: the same name, or the only name that differs just in case and spaces; else None."""
    listed = list(names)
    alike = [name for name in listed if name.strip().casefold() == column.casefold()]
    return column if column in listed else alike[0] if len(alike) == 1 else None


def _no_column(where: str, names: list[str], column: str) -> UserError:
    return UserError(
        f"{where} has no column {column!r}: {describe_columns(names)}; choose the column with the text with --column NAME"
    )


def _texts_of_json(stream: BinaryIO, head: bytes, file: Path, column: str, findings: TextFileReport) -> Texts:
    is_array = head.removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["
    values = _whole_json(stream, file, is_array, findings) if is_array or _ending(file) == JSON else None
    if values is None:
        stream.seek(0)
        values = _json_lines(stream, file)
    for where, value in values:
        yield where, value if isinstance(value, str) and is_array else _text_of(value, f"{printable_path(file)}{where}", column)


def _text_of(record: Any, where: str, column: str) -> str | None:
    example = f'must be like {{"{column}": "..."}}'
    if not isinstance(record, dict):
        raise UserError(f"{where} is not a JSON object: every record {example}")
    name = _column_of(record, column)
    if name is None:
        there = ", ".join(map(repr, record))[:_NAMES_SHOWN] or "nothing"
        raise UserError(
            f'{where} has no "{column}" field, only {there}: every record {example}, or choose another field with --column NAME'
        )
    text = record[name]
    if text is not None and not isinstance(text, str):
        raise UserError(f'{where}: the "{column}" field is not a string: every record {example}')
    return text


def _whole_json(stream: BinaryIO, file: Path, is_array: bool, findings: TextFileReport) -> Iterator[tuple[str, Any]] | None:
    """Return the elements of a JSON array, or a single JSON object, with their places; None for a file with one object a line."""
    data = _whole(stream)
    if data is None:
        if is_array:
            raise UserError(
                f"{printable_path(file)}: the array is larger than {WHOLE_BYTES_MAX >> 20} MB: write one object per line"
            )
        return None
    text = _decoded(file, data, findings)
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        if not is_array and error.msg == "Extra data":
            return None
        raise UserError(f"{printable_path(file)} line {error.lineno} is not JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{printable_path(file)} is not JSON: {error}") from None
    return (
        ((f" element {number}", value) for number, value in enumerate(found, 1))
        if isinstance(found, list)
        else iter([("", found)])
    )


def _json_lines(stream: BinaryIO, file: Path) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(iter(lambda: stream.readline(LINE_BYTES_MAX + 1), b""), start=1):
        if len(line) > LINE_BYTES_MAX:
            raise UserError(
                f"{printable_path(file)} line {number} is longer than {LINE_BYTES_MAX >> 20} MB: split it into several records"
            )
        if not line.strip():
            continue
        if b"\0" in line:
            raise _binary(file, f"NUL in line {number}, as in UTF-16")
        try:
            yield f" line {number}", json.loads(line.decode("utf-8-sig"))
        except UnicodeDecodeError:
            raise _binary(file, f"not UTF-8 in line {number}", line) from None
        except (ValueError, RecursionError):
            raise UserError(
                f'{printable_path(file)} line {number} is not JSON: every line must be like {{"text": "..."}}'
            ) from None


def _whole(stream: BinaryIO) -> bytes | None:
    """Return all bytes of a file; None for a file that is too large.

    Small reads are used, since one large read allocates the limit.
    """
    pieces, size = list[bytes](), 0
    while size <= WHOLE_BYTES_MAX and (piece := stream.read(READ_BYTES // 4)):
        pieces.append(piece)
        size += len(piece)
    return b"".join(pieces) if size <= WHOLE_BYTES_MAX else None


def _decoded(file: Path, data: bytes, findings: TextFileReport) -> str:
    text, note = decode_text(printable_path(file), data)
    if note:
        findings.remarks.append(note)
    return text


def _table(stream: BinaryIO, file: Path, column: str, findings: TextFileReport) -> Texts:
    data = _whole(stream)
    if data is None:
        raise UserError(
            f"{printable_path(file)} is larger than {WHOLE_BYTES_MAX >> 20} MB: split it, or save it as JSONL or Parquet"
        )
    names, rows = open_csv(printable_path(file), _decoded(file, data, findings), {column.casefold()})
    name = _column_of(names, column)
    if name is None:
        raise _no_column(printable_path(file), names, column)
    place = names.index(name)
    for number, row in rows:
        # A separator inside an unquoted text splits the text into several cells.
        if len(row) < len(names) or any(cell.strip() for cell in row[len(names) :]):
            cells = f"{pluralize(len(row), 'cell')}, but the header {len(names)}"
            raise UserError(f"{printable_path(file)}:{number}: the row has {cells}: quote texts that contain the separator")
        yield f":{number}", row[place]


def _parquet(stream: BinaryIO, file: Path, column: str) -> Texts:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise UserError(
            f"{printable_path(file)} is Parquet, which needs the extra `data`: run `pip install pyarrow`, "
            "or save the file as JSONL"
        ) from None
    try:
        table = parquet.ParquetFile(stream)
        schema = table.schema_arrow
        name = _column_of(schema.names, column)
        if name is None:
            raise _no_column(printable_path(file), schema.names, column)
        kind = schema.field(name).type
        kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
            what = f"column {name!r} has type {kind}, not text"
            raise UserError(f"{printable_path(file)}: {what}: choose another with --column NAME")
        number = 0
        for batch in table.iter_batches(ROWS_AT_ONCE, columns=[name], use_threads=False):
            for text in batch.column(0).to_pylist():
                number += 1
                yield f" row {number}", text
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        first = str(error).split("\n", 1)[0]
        raise UserError(f"{printable_path(file)} cannot be read as Parquet: {first}") from None
