"""Files of people with one JSON object a line, or with one array of such objects."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, Final, TypeVar

from protocol.errors import UserError

LINE_BYTES_MAX: Final = 1 << 20  # a whole line must be in memory to be parsed
ARRAY_BYTES_MAX: Final = 64 << 20  # a whole array must be: as Python's objects it takes ten times as much
MISFITS_NAMED_MAX: Final = 20  # of a file, each with its reason: a screen of lines
BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
T = TypeVar("T")


class InvalidLines:
    """Lines that cannot be used, of which the first are named. They are an error unless they are to be left out."""

    def __init__(self, skip_bad: bool | None = None) -> None:
        """None: the command has no `--skip-bad`."""
        self._skip_bad = skip_bad
        self.unwanted = 0  # lines that say themselves that nobody should learn them
        self._named: list[str] = []
        self._count = 0

    @property
    def left_out(self) -> int:
        return self._count + self.unwanted

    def add_line(self, reason: UserError) -> None:
        self._count += 1
        if len(self._named) < MISFITS_NAMED_MAX:
            self._named.append(str(reason))

    def raise_if_any(self) -> None:
        """Raises `UserError`."""
        if not self._count or self._skip_bad:
            return
        is_optional = self._skip_bad is not None
        if self._count == 1:
            raise UserError(self._named[0] + (" (--skip-bad leaves this line out)" if is_optional else ""))
        more = f", of which the first {len(self._named)} are named here" if self._count > len(self._named) else ""
        sum_of_all = f"{self._count} lines cannot be used{more}{': --skip-bad leaves them out' if is_optional else ''}"
        raise UserError("\n".join([*self._named, sum_of_all]))


def read_records(
    name: str,
    stream: BinaryIO,
    what: str,
    example: str,
    lines_max: int,
    make: Callable[[int, dict[str, Any]], T | None],
    misfits: InvalidLines,
) -> list[T]:
    """Makes a record, for people a `what`, of each line, or None of a line that nobody should learn. Raises `UserError`."""
    made: list[T] = []
    for number, line in _lines(name, stream, lines_max):
        try:
            record = make(number, _parsed(f"{name}:{number}", line, example))
        except UserError as error:
            misfits.add_line(error)
            continue
        if record is None:
            misfits.unwanted += 1
        else:
            made.append(record)
    misfits.raise_if_any()
    if not made:
        raise UserError(f"{name}: there is no {what} in it: every line must be like {example}")
    return made


def read_rows(name: str, stream: BinaryIO, example: str, lines_max: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Numbers of lines, from 1, and their objects. Empty lines are passed over. `UserError` names the first bad line."""
    for number, line in _lines(name, stream, lines_max):
        yield number, _parsed(f"{name}:{number}", line, example)


def _lines(name: str, stream: BinaryIO, lines_max: int) -> Iterator[tuple[int, Any]]:
    """Numbers and bytes of lines that are not empty; or those of an array's elements, which are parsed already."""
    first = stream.readline(LINE_BYTES_MAX + 1).removeprefix(BYTE_ORDER_MARK)
    array = _array(name, first, stream) if first.lstrip().startswith(b"[") else None
    if isinstance(array, list):
        if len(array) > lines_max:
            raise UserError(f"{name}: more than {lines_max} elements: take a part of it")
        yield from enumerate(array, 1)
        return
    number, line = 1, first
    while line:
        if number > lines_max:
            raise UserError(f"{name}: more than {lines_max} lines: take a part of it")
        if len(line) > LINE_BYTES_MAX:
            while (rest := stream.readline(LINE_BYTES_MAX)) and not rest.endswith(b"\n"):
                pass
        if line.strip() or len(line) > LINE_BYTES_MAX:
            yield number, line
        number, line = number + 1, stream.readline(LINE_BYTES_MAX + 1)


def _array(name: str, first: bytes, stream: BinaryIO) -> list[Any] | None:
    """The elements of a file that is one array; None for a file of lines, of which `first` is the first."""
    try:
        found = json.loads(first)
    except (ValueError, RecursionError):
        return _whole_array(name, first, stream)
    if found and not any(isinstance(element, dict) for element in found):
        return None
    if stream.read(LINE_BYTES_MAX).strip():
        raise UserError(f"{name}:2: the first line is an array, and more follows: write one object a line, or one array")
    return list(found)


def _whole_array(name: str, first: bytes, stream: BinaryIO) -> list[Any]:
    whole = first + stream.read(ARRAY_BYTES_MAX)
    if len(whole) > ARRAY_BYTES_MAX:
        raise UserError(f"{name}: this array is larger than {ARRAY_BYTES_MAX >> 20} MB: write one object a line")
    try:
        return list(json.loads(whole.decode()))
    except UnicodeDecodeError:
        raise UserError(f"{name}:1: this is no text in UTF-8: save it as that") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{name}:{error.lineno}: no JSON: {error.msg} at character {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name}:1: no JSON: {error}") from None


def _parsed(where: str, line: Any, example: str) -> dict[str, Any]:
    row = _loaded(where, line) if isinstance(line, bytes) else line
    if not isinstance(row, dict):
        raise UserError(f"{where}: a line is a JSON object, such as {example}")
    return row


def _loaded(where: str, line: bytes) -> Any:
    if len(line) > LINE_BYTES_MAX:
        raise UserError(f"{where}: this line is longer than {LINE_BYTES_MAX >> 20} MB: leave it out")
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError:
        raise UserError(f"{where}: this is no text in UTF-8: save it as that") from None
    except json.JSONDecodeError as error:  # its own text counts lines, of which there is one
        raise UserError(f"{where}: no JSON: {error.msg} at character {error.pos + 1}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: no JSON: {error}") from None
