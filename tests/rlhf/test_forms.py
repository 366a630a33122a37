"""Files in the forms of TRL: their messages become the texts that are learned, and what is no message is named by its line."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from protocol.errors import UserError
from rlhf.data.preference_sets import read_examples, read_preference_file

HI, ASKED, OTHER = ({"role": "user", "content": text} for text in ("Hi {}", "Why?", "Else?"))
HELLO, YES, NO = ({"role": "assistant", "content": text} for text in ("Hello.", "Yes.", "No."))
SYSTEM = {"role": "system", "content": "Be short."}
FIRST = "User: Hi {}\nAssistant: "
SECOND = f"{FIRST}Hello.\nUser: Why?\nAssistant: "
HH = "\n\nHuman: Why?\n\nAssistant:"


def lines(*rows: Any) -> io.BytesIO:
    return io.BytesIO("\n".join(map(json.dumps, rows)).encode())


@pytest.mark.parametrize(
    ("row", "prompt", "response"),
    [
        ({"prompt": "a", "response": "b"}, "a", "b"),
        ({"prompt": "a", "completion": "b"}, "a", "b"),
        ({"prompt": [HI], "completion": [HELLO]}, FIRST, "Hello."),
        ({"messages": [HI, HELLO]}, FIRST, "Hello."),
        ({"messages": [SYSTEM, HI, HELLO, ASKED, YES]}, f"Be short.\n{SECOND}", "Yes."),
        ({"prompt": "Hi {}", "messages": [HI, HELLO]}, FIRST, "Hello."),
    ],
)
def test_responses(row: dict[str, Any], prompt: str, response: str) -> None:
    [read] = read_examples("a.jsonl", lines(row))
    assert (read.prompt, read.response) == (prompt, response)


@pytest.mark.parametrize(
    ("row", "prompt", "chosen", "rejected"),
    [
        ({"prompt": "a", "chosen": "Yes.", "rejected": "No."}, "a", "Yes.", "No."),
        ({"prompt": [HI], "chosen": [YES], "rejected": [NO]}, FIRST, "Yes.", "No."),
        ({"prompt": "plain", "chosen": [YES], "rejected": [NO]}, "plain", "Yes.", "No."),
        ({"chosen": [HI, YES], "rejected": [HI, NO]}, FIRST, "Yes.", "No."),
        ({"prompt": "Hi {}", "chosen": [HI, YES], "rejected": [HI, NO]}, FIRST, "Yes.", "No."),
        ({"prompt": [HI], "chosen": [HI, YES], "rejected": [HI, NO]}, FIRST, "Yes.", "No."),
        ({"prompt": [HI], "chosen": [HELLO, ASKED, YES], "rejected": [HELLO, ASKED, NO]}, SECOND, "Yes.", "No."),
        ({"chosen": f"{HH} Yes.", "rejected": f"{HH} Yet."}, HH.strip(), " Yes.", " Yet."),
    ],
)
def test_preferences(row: dict[str, Any], prompt: str, chosen: str, rejected: str) -> None:
    [read] = read_preference_file("a.jsonl", lines(row))
    assert (read.prompt, *read.responses) == (prompt, chosen, rejected)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"chosen": [HI, YES], "rejected": [OTHER, NO]}, "a.jsonl:1: chosen and rejected answer different messages"),
        ({"chosen": [HI], "rejected": [HI]}, "the last message of chosen is of the role 'user', not 'assistant'"),
        ({"prompt": "a", "chosen": [], "rejected": [NO]}, "chosen must be a text, or messages"),
        ({"prompt": "a", "chosen": [{"role": "tool", "content": "x"}], "rejected": [NO]}, "of system, user, assistant"),
        ({"prompt": "a", "chosen": [{"role": "user", "content": [1]}], "rejected": [NO]}, "chosen must be a text, or messages"),
        ({"chosen": "Yes.", "rejected": "No."}, "prompt must be a text, not null"),
        ({"chosen": [YES], "rejected": "No."}, "prompt must be a text, not null"),
    ],
)
def test_what_is_no_message_is_named(row: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        read_preference_file("a.jsonl", lines(row))
