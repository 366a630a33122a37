"""Data set files in JSONL, or as one JSON array. The forms of public data sets are converted to prompts and responses.

| fields of a line | a form of | the response is |
|---|---|---|
| `prompt`, `response` or `completion` | TRL | `response` or `completion` |
| `prompt`, `completion`, `label` | KTO | the completion, if the label is true; other lines are left out and counted |
| `instruction`, `input`, `output`, `system`, `history` | Alpaca | the output |
| `conversations` with `from`, `value` | ShareGPT | the last message |
| `messages` with `role`, `content` | OpenAI, TRL | the last message, of the role `assistant` |
| `prompt`, `chosen`, `rejected`, perhaps `p` | TRL | each text, or the last message of each list; the other messages are equal |
| `chosen`, `rejected` with whole transcripts | HH-RLHF | the text after the last `Assistant:` that the transcripts share |
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, Final, TypeVar

from protocol.errors import UserError

LINE_BYTES_MAX: Final = 1 << 20  # bytes of a line, which is parsed in memory
ARRAY_BYTES_MAX: Final = 64 << 20  # bytes of an array, which is parsed in memory; its Python objects need ten times as many
MISFITS_NAMED_MAX: Final = 20  # invalid lines that an error names with a reason: one screen
BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
T = TypeVar("T")


class InvalidLines:
    """The invalid lines of a file: their number, and reasons for the first ones.

    Any is an error, unless `--skip-bad` leaves them out.
    """

    def __init__(self, skip_bad: bool | None = None) -> None:
        """Make an empty collection. `skip_bad` is None if the command has no `--skip-bad`."""
        self._skip_bad = skip_bad
        self.unwanted = 0  # number of lines with a false label or weight 0, which are left out without an error
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
        """Raise `UserError` with the first invalid lines, if there are any and `--skip-bad` does not leave them out."""
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
    """Return the records that `make` builds from the number and the fields of each line.

    For an unwanted line, `make` returns None. `what` is the noun for a record in messages. Raises `UserError` for invalid lines,
    unless `misfits` skips them, and for a file without a record.
    """
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
        raise UserError(f"{name}: the file has no {what}: each line must be like {example}")
    return made


def read_rows(name: str, stream: BinaryIO, example: str, lines_max: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, from 1, and JSON object) for each line that is not empty. Raises `UserError` for an invalid line."""
    for number, line in _lines(name, stream, lines_max):
        yield number, _parsed(f"{name}:{number}", line, example)


def _lines(name: str, stream: BinaryIO, lines_max: int) -> Iterator[tuple[int, Any]]:
    """Yield (number, bytes) of each line that is not empty, or if the file is an array, (number, parsed element)."""
    first = stream.readline(LINE_BYTES_MAX + 1).removeprefix(BYTE_ORDER_MARK)
    array = _array(name, first, stream) if first.lstrip().startswith(b"[") else None
    if isinstance(array, list):
        if len(array) > lines_max:
            raise UserError(f"{name}: more than {lines_max} elements: use a part of the file")
        yield from enumerate(array, 1)
        return
    number, line = 1, first
    while line:
        if number > lines_max:
            raise UserError(f"{name}: more than {lines_max} lines: use a part of the file")
        if len(line) > LINE_BYTES_MAX:
            while (rest := stream.readline(LINE_BYTES_MAX)) and not rest.endswith(b"\n"):
                pass
        if line.strip() or len(line) > LINE_BYTES_MAX:
            yield number, line
        number, line = number + 1, stream.readline(LINE_BYTES_MAX + 1)


def _array(name: str, first: bytes, stream: BinaryIO) -> list[Any] | None:
    """Return the elements of a file that is one array, or None for a file of lines. `first` is the first line."""
    try:
        found = json.loads(first)
    except (ValueError, RecursionError):
        return _whole_array(name, first, stream)
    if found and not any(isinstance(element, dict) for element in found):
        return None
    if stream.read(LINE_BYTES_MAX).strip():
        raise UserError(f"{name}:2: text follows the array in the first line: write one object per line, or one array")
    return list(found)


def _whole_array(name: str, first: bytes, stream: BinaryIO) -> list[Any]:
    whole = first + stream.read(ARRAY_BYTES_MAX)
    if len(whole) > ARRAY_BYTES_MAX:
        raise UserError(f"{name}: this array is larger than {ARRAY_BYTES_MAX >> 20} MB: write one object per line")
    try:
        return list(json.loads(whole.decode()))
    except UnicodeDecodeError:
        raise UserError(f"{name}:1: not UTF-8 text: save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{name}:{error.lineno}: invalid JSON: {error.msg} at character {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name}:1: invalid JSON: {error}") from None


def _parsed(where: str, line: Any, example: str) -> dict[str, Any]:
    if isinstance(line, bytes) and len(line) > LINE_BYTES_MAX:
        raise UserError(f"{where}: this line is longer than {LINE_BYTES_MAX >> 20} MB: leave it out")
    try:
        row = json.loads(line.decode()) if isinstance(line, bytes) else line
    except UnicodeDecodeError:
        raise UserError(f"{where}: not UTF-8 text: save the file as UTF-8") from None
    except json.JSONDecodeError as error:  # `str(error)` would name line 1.
        raise UserError(f"{where}: invalid JSON: {error.msg} at character {error.pos + 1}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: invalid JSON: {error}") from None
    if not isinstance(row, dict):
        raise UserError(f"{where}: a line must be a JSON object, such as {example}")
    return row


# Forms ------------------------------------------------------------------------------------------------------------------

# Texts of messages by role. `peer chat --template` gives a prompt of the same form with 'User: {}\nAssistant: '.
FORMS: Final = {"system": "{}\n", "user": "User: {}\nAssistant: ", "assistant": "{}\n"}
ANSWER: Final = "assistant"  # role of responses
ANSWERS: Final = ("chosen", "rejected", "response")
ROLES: Final = {
    **{role: role for role in FORMS},
    "developer": "system",
    "human": "user",
    "gpt": ANSWER,
    "chatgpt": ANSWER,
    "model": ANSWER,
    "bot": ANSWER,
}
TEXT_PARTS: Final = ("text", "input_text", "output_text")  # types of parts that contain text, in a message's content
CALLS: Final = ("tool_calls", "function_call")
TURN: Final = re.compile(r"^(?:Assistant|A):", re.MULTILINE)  # begins an answer in transcripts without a prompt
NEXT_TURN: Final = re.compile(r"\n\n(?:Human|H):")
GOOD: Final = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
SHOWN_CHARACTERS: Final = 40
Messages = list[tuple[str, str]]


def is_positive_example(where: str, row: dict[str, Any]) -> bool:
    """Return False if the line is an example of a bad response: its KTO label is false, or its last message has weight 0.

    Raises `UserError` for an unknown label.
    """
    turns = row.get("messages")
    if isinstance(turns, list) and turns and isinstance(turns[-1], dict) and turns[-1].get("weight") == 0:
        return False
    if "label" not in row:
        return True
    said = GOOD.get(str(row["label"]).strip().lower())
    if said is None:
        raise UserError(f"{where}: label must be true or false (whether to learn the line), not {_shown(row['label'])}")
    return said


def to_plain_texts(where: str, row: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a line with plain texts in `prompt` and `response`, or in `prompt`, `chosen` and `rejected`.

    If the line has messages, the last one becomes the response, and the messages before it replace a `prompt` that is a text.
    Raises `UserError` for messages with tools or with contents that are no text.
    """
    row = dict(row)
    if row.get("tools"):
        raise UserError(f"{where}: tools are not supported: remove the line")
    _name_response(row)
    for name in ("instruction", "question"):
        if "prompt" not in row and isinstance(row.get(name), str):
            row["prompt"] = _instruction(where, row, row[name])
    said = {name: _messages(where, name, row[name]) for name in ANSWERS if isinstance(row.get(name), list | dict)}
    if said:
        _split_messages(where, row, said)
    elif "prompt" not in row and all(isinstance(row.get(name), str) for name in ("chosen", "rejected")):
        _split_transcripts(where, row)
    elif isinstance(row.get("prompt"), list):
        row["prompt"] = _text(_messages(where, "prompt", row["prompt"]))
    return row


def _name_response(row: dict[str, Any]) -> None:
    """Store a line's response under `response`, whatever its field's name. Store messages before two answers under `prompt`."""
    turns = next((row[name] for name in ("messages", "conversations", "conversation") if name in row), None)
    if "response" not in row:
        name = next((name for name in ("completion", "output", "answer") if name in row), None)
        if name is not None:
            row["response"] = row[name]
    if turns is not None and not row.keys() & set(ANSWERS):
        row["response"] = turns
    elif turns is not None and "prompt" not in row:
        row["prompt"] = turns


def _instruction(where: str, row: dict[str, Any], asked: str) -> str:
    more = row.get("input") or row.get("context") or ""
    system, history = row.get("system") or "", row.get("history") or []
    if not isinstance(more, str) or not isinstance(system, str):
        raise UserError(f"{where}: input and system must be texts")
    turns: Messages = [("system", system)] if system else []
    for turn in history:
        if not (isinstance(turn, list) and len(turn) == 2 and all(isinstance(text, str) for text in turn)):
            raise UserError(f"{where}: history must be pairs of texts, such as [[question, answer]]")
        turns += [("user", turn[0]), (ANSWER, turn[1])]
    return _text([*turns, ("user", f"{asked}\n{more}" if more else asked)])


def _split_messages(where: str, row: dict[str, Any], said: dict[str, Messages]) -> None:
    before = [messages[:-1] for messages in said.values()]
    if any(other != before[0] for other in before):
        raise UserError(f"{where}: {' and '.join(said)} answer different messages")
    asked = _messages(where, "prompt", row["prompt"]) if isinstance(row.get("prompt"), list) else []
    if before[0] or asked:
        system = row.get("system")
        first = [("system", system)] if isinstance(system, str) and system else []
        row["prompt"] = _text(first + (asked if before[0] == asked else asked + before[0]))
    for name, messages in said.items():
        role, text = messages[-1]
        if role != ANSWER:
            raise UserError(f"{where}: the last message of {name} is of the role {role!r}, not {ANSWER!r}")
        row[name] = text


def _split_transcripts(where: str, row: dict[str, Any]) -> None:
    """Cut two transcripts where the last answer begins in their common part.

    Raises `UserError` if the transcripts differ in earlier turns.
    """
    chosen, rejected = row["chosen"], row["rejected"]
    length = next((at for at, (one, other) in enumerate(zip(chosen, rejected, strict=False)) if one != other), None)
    common = min(chosen, rejected, key=len) if length is None else chosen[:length]
    begun = [turn.end() for turn in TURN.finditer(common)]
    if not begun:
        if TURN.search(chosen) and TURN.search(rejected):
            raise UserError(f"{where}: chosen and rejected have different prompts")
        return
    row["prompt"] = chosen[: begun[-1]].lstrip()
    for name, text in (("chosen", chosen), ("rejected", rejected)):
        answer = text[begun[-1] :]
        if NEXT_TURN.search(answer):
            raise UserError(f"{where}: chosen and rejected differ before their last turn")
        row[name] = answer if answer.strip() else ""


def _messages(where: str, name: str, given: Any) -> Messages:
    """Return the roles and texts of messages."""
    given = [given] if isinstance(given, dict) else given
    return [_message(where, name, message) for message in given or [None]]


def _message(where: str, name: str, message: Any) -> tuple[str, str]:
    of = ", ".join(FORMS)
    if not isinstance(message, dict):
        raise UserError(f'{where}: {name} must be a text, or messages like {{"role": "user", "content": "…"}}, of {of}')
    for call in CALLS:
        if message.get(call):
            raise UserError(f"{where}: {name} has a message with {call}: tool calls are not supported")
    said = message.get("role", message.get("from"))
    role = ROLES.get(said) if isinstance(said, str) else None
    if role is None:
        raise UserError(f"{where}: {name} has a message of the role {_shown(said)}: only roles of {of} are supported")
    return role, _content(where, name, message.get("content", message.get("value")))


def _content(where: str, name: str, content: Any) -> str:
    """Return the text of a message's content, or the concatenated texts of the content's parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [None]
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind is not None and kind not in TEXT_PARTS:
            raise UserError(f"{where}: {name} has a part of the type {_shown(kind)}: only texts are supported")
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            raise UserError(f'{where}: {name} must be a text, or messages like {{"role": "user", "content": "…"}}')
        texts.append(text)
    return "".join(texts)


def _text(messages: Messages) -> str:
    return "".join(FORMS[role].replace("{}", text) for role, text in messages)


def _shown(value: Any) -> str:
    return json.dumps(value)[:SHOWN_CHARACTERS]
