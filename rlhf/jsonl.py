"""Files of people with one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, BinaryIO, Final

from protocol.errors import UserError

LINE_BYTES_MAX: Final = 1 << 20  # a whole line must be in memory to be parsed


def rows(name: str, stream: BinaryIO, example: str, lines_max: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Numbers of lines, from 1, and what stands there. Empty lines are passed over. `UserError` names the first bad line."""
    for number, line in enumerate(iter(lambda: stream.readline(LINE_BYTES_MAX + 1), b""), 1):
        where = f"{name}:{number}"
        if len(line) > LINE_BYTES_MAX:
            raise UserError(f"{where}: this line is longer than {LINE_BYTES_MAX >> 20} MB: leave it out")
        if number > lines_max:
            raise UserError(f"{name}: more than {lines_max} lines: take a part of it")
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")  # a byte order mark
        if line.strip():
            yield number, _parsed(where, line, example)


def _parsed(where: str, line: bytes, example: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError:
        raise UserError(f"{where}: this is no text in UTF-8: save it as that") from None
    except json.JSONDecodeError as error:  # its own text counts lines, of which there is one
        raise UserError(f"{where}: no JSON: {error.msg} at character {error.pos + 1}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: no JSON: {error}") from None
    if not isinstance(row, dict):
        raise UserError(f"{where}: a line is a JSON object, such as {example}")
    return row
