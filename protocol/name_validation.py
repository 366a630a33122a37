"""What may be a name: text that stands on a screen as it was typed, and cannot move the cursor, turn the line round or hide.

The characters that are refused are listed, not asked of Unicode's tables: those differ between versions of Python, and peers must
agree on what is refused.
"""

from __future__ import annotations

import re

from protocol.errors import RemoteProtocolError

REFUSED_CHARACTERS = (
    "\x00-\x1f\x7f-\x9f"  # control characters: they command the terminal
    "\ud800-\udfff"  # halves of characters: no text
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # direction: they show what follows in another order
    "\u00ad\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200d\u2060-\u2065\u206a-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0"
    "\ufff0-\ufffb\U000e0000-\U000e0fff"  # shown as nothing: two names would look alike
    "\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u2800\u3000"  # blanks other than the space, and ends of lines
)
_REFUSED = re.compile(f"[{REFUSED_CHARACTERS}]")


def name_problem(name: str) -> str | None:
    """What is wrong with it; None if nothing is. How long it may be is said elsewhere."""
    found = _REFUSED.search(name)
    if found:
        return f"holds the character U+{ord(found[0]):04X}, which a screen does not show as it is"
    return "begins or ends with a space" if name != name.strip(" ") else None


def check_name(name: str) -> None:
    """Raises `RemoteProtocolError`."""
    problem = name_problem(name)
    if problem:
        raise RemoteProtocolError("bad-name", f"{name!a} {problem}")
