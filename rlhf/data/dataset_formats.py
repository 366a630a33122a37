"""Files in the forms of public data sets become the plain texts that jobs learn.

| fields of a line | known from |
|---|---|
| `prompt`, `response` or `completion`; `chosen`, `rejected` | TRL |
| `completion`, `label` | KTO |
| `instruction`, `input`, `output`, `system`, `history` | Alpaca |
| `conversations` with `from`, `value` | ShareGPT |
| `messages` with `role`, `content` | OpenAI, TRL |
| `chosen`, `rejected` with whole transcripts | HH-RLHF |
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from protocol.errors import UserError

# A message as text. `peer chat --template 'User: {}\nAssistant: '` asks in the same way.
FORMS: Final = {"system": "{}\n", "user": "User: {}\nAssistant: ", "assistant": "{}\n"}
ANSWER: Final = "assistant"  # of this role is a response
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
TEXT_PARTS: Final = ("text", "input_text", "output_text")  # types of the parts of a content that are texts
CALLS: Final = ("tool_calls", "function_call")
TURN: Final = re.compile(r"^(?:Assistant|A):", re.MULTILINE)  # the answer, in transcripts without a prompt
NEXT_TURN: Final = re.compile(r"\n\n(?:Human|H):")
GOOD: Final = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
SHOWN_CHARACTERS: Final = 40
Messages = list[tuple[str, str]]


def is_positive_example(where: str, row: dict[str, Any]) -> bool:
    """True for a line that its KTO label, or the weight of its last message, allows to learn. Raises `UserError`."""
    turns = row.get("messages")
    if isinstance(turns, list) and turns and isinstance(turns[-1], dict) and turns[-1].get("weight") == 0:
        return False
    if "label" not in row:
        return True
    said = GOOD.get(str(row["label"]).strip().lower())
    if said is None:
        raise UserError(f"{where}: label says whether to learn the line, so it must be true or false, not {_shown(row['label'])}")
    return said


def to_plain_texts(where: str, row: dict[str, Any]) -> dict[str, Any]:
    """The same with texts in `prompt` and in `response`, or in `chosen` and `rejected`.

    The last message is the answer. The messages before it are the prompt, and replace a prompt that is a text. Raises `UserError`
    for messages that are no text.
    """
    row = dict(row)
    if row.get("tools"):
        raise UserError(f"{where}: tools are not learned: leave the line out")
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
    """Names the response `response`, and the turns before pairs of answers `prompt`."""
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
    """Cuts two transcripts at the last turn that both have begun alike. Raises `UserError` where the turns before differ."""
    chosen, rejected = row["chosen"], row["rejected"]
    length = next((at for at, (one, other) in enumerate(zip(chosen, rejected, strict=False)) if one != other), None)
    common = min(chosen, rejected, key=len) if length is None else chosen[:length]
    begun = [turn.end() for turn in TURN.finditer(common)]
    if not begun:
        if TURN.search(chosen) and TURN.search(rejected):
            raise UserError(f"{where}: chosen and rejected begin with different prompts, so they are no pair")
        return
    row["prompt"] = chosen[: begun[-1]].lstrip()
    for name, text in (("chosen", chosen), ("rejected", rejected)):
        answer = text[begun[-1] :]
        if NEXT_TURN.search(answer):
            raise UserError(f"{where}: chosen and rejected part before their last turn, so they are no pair")
        row[name] = answer if answer.strip() else ""


def _messages(where: str, name: str, given: Any) -> Messages:
    """Roles and texts."""
    given = [given] if isinstance(given, dict) else given
    return [_message(where, name, message) for message in given or [None]]


def _message(where: str, name: str, message: Any) -> tuple[str, str]:
    of = ", ".join(FORMS)
    if not isinstance(message, dict):
        raise UserError(f'{where}: {name} must be a text, or messages like {{"role": "user", "content": "…"}}, of {of}')
    for call in CALLS:
        if message.get(call):
            raise UserError(f"{where}: {name} holds a message with {call}: calls of tools are not learned")
    said = message.get("role", message.get("from"))
    role = ROLES.get(said) if isinstance(said, str) else None
    if role is None:
        raise UserError(f"{where}: {name} holds a message of the role {_shown(said)}: only those of {of} are learned")
    return role, _content(where, name, message.get("content", message.get("value")))


def _content(where: str, name: str, content: Any) -> str:
    """A text, or the texts of its parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [None]
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind is not None and kind not in TEXT_PARTS:
            raise UserError(f"{where}: {name} holds a part of the type {_shown(kind)}: only texts are learned")
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            raise UserError(f'{where}: {name} must be a text, or messages like {{"role": "user", "content": "…"}}')
        texts.append(text)
    return "".join(texts)


def _text(messages: Messages) -> str:
    return "".join(FORMS[role].replace("{}", text) for role, text in messages)


def _shown(value: Any) -> str:
    return json.dumps(value)[:SHOWN_CHARACTERS]
