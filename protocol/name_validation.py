"""Validation of names: a screen must show them as they were typed, without control, direction or invisible characters.

The refused characters are listed here. Peers must agree on them, and the Unicode tables of Python versions differ.
"""

from __future__ import annotations

import re

from protocol.errors import RemoteProtocolError

REFUSED_CHARACTERS = (
    "\x00-\x1f\x7f-\x9f"  # control characters, which control a terminal
    "\ud800-\udfff"  # surrogates, which are not characters
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # direction marks, which change the order of the text after them
    "\u00ad\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200d\u2060-\u2065\u206a-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0"
    "\ufff0-\ufffb\U000e0000-\U000e0fff"  # invisible characters, with which two names would look alike
    "\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u2800\u3000"  # spaces other than U+0020, and line separators
)
_REFUSED = re.compile(f"[{REFUSED_CHARACTERS}]")


def name_problem(name: str) -> str | None:
    """Return the problem of a name as text, or None. The length of the name is not checked here."""
    found = _REFUSED.search(name)
    if found:
        return f"contains the character U+{ord(found[0]):04X}, which screens do not show correctly"
    return "begins or ends with a space" if name != name.strip(" ") else None


def check_name(name: str) -> None:
    """Raise `RemoteProtocolError` if the name has a problem."""
    problem = name_problem(name)
    if problem:
        raise RemoteProtocolError("bad-name", f"{name!a} {problem}")
