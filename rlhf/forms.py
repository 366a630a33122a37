"""Files with the messages of a chat, as TRL and most public data sets have them, become the plain texts that jobs learn."""

from __future__ import annotations

from typing import Any, Final

from protocol.errors import UserError

# What stands for a message. `peer chat --template 'User: {}\nAssistant: '` asks in the same way.
FORMS: Final = {"system": "{}\n", "user": "User: {}\nAssistant: ", "assistant": "{}\n"}
ANSWER: Final = "assistant"  # of this role is a response
ANSWERS: Final = ("chosen", "rejected", "response")
BEFORE: Final = "Assistant:"  # the answer, in transcripts without a prompt


def plain(where: str, row: dict[str, Any]) -> dict[str, Any]:
    """The same with texts in `prompt` and in `response`, or in `chosen` and `rejected`: the last message is the answer, and those
    before it are the prompt, in the place of one that is a text. Raises `UserError` for what is no message.
    """
    row = dict(row)
    if "response" not in row and "completion" in row:
        row["response"] = row["completion"]
    if "messages" in row and not row.keys() & set(ANSWERS):
        row["response"] = row["messages"]
    said = {name: _messages(where, name, row[name]) for name in ANSWERS if isinstance(row.get(name), list)}
    if said:
        before = [messages[:-1] for messages in said.values()]
        if any(other != before[0] for other in before):
            raise UserError(f"{where}: {' and '.join(said)} answer different messages")
        asked = _messages(where, "prompt", row["prompt"]) if isinstance(row.get("prompt"), list) else []
        if before[0] or asked:
            row["prompt"] = _text(asked if before[0] == asked else asked + before[0])
        for name, messages in said.items():
            role, text = messages[-1]
            if role != ANSWER:
                raise UserError(f"{where}: the last message of {name} is of the role {role!r}, not {ANSWER!r}")
            row[name] = text
    elif "prompt" not in row and all(isinstance(row.get(name), str) for name in ("chosen", "rejected")):
        at = row["chosen"].rfind(BEFORE) + len(BEFORE)
        if at >= len(BEFORE) and row["rejected"].startswith(row["chosen"][:at]):
            row |= {"prompt": row["chosen"][:at].lstrip(), "chosen": row["chosen"][at:], "rejected": row["rejected"][at:]}
    return row


def _messages(where: str, name: str, given: list[Any]) -> list[tuple[str, str]]:
    """Roles and texts."""
    for message in given or [None]:
        role, text = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if role not in FORMS or not isinstance(text, str):
            of = ", ".join(FORMS)
            raise UserError(f'{where}: {name} must be a text, or messages like {{"role": "user", "content": "…"}}, of {of}')
    return [(message["role"], message["content"]) for message in given]


def _text(messages: list[tuple[str, str]]) -> str:
    return "".join(FORMS[role].replace("{}", text) for role, text in messages)
