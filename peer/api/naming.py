"""Names of peers: whom a person means by a text, and what a person is shown."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections import Counter
from collections.abc import Mapping

from ledger.members import MembersState
from protocol.errors import UserError
from protocol.identity import parse_peer_id, peer_id, short_id

SHORT = 8  # characters of a peer id, or of a root, that people see
_ID = re.compile(rf"\b[a-z2-7]{{{SHORT}}}\b")
CHOICES_SHOWN = 8  # of those that a text may mean


def find(text: str, members: MembersState) -> bytes:
    """The present key of the peer that `text` names. Raises `UserError` where it names nobody, or may mean several.

    A whole peer id means that key, whatever somebody calls itself. Else the name of one present member counts, or the beginning
    of one key's id. A text that is both, of two peers, is refused: names are not unique, and anybody may take another's.
    """
    wanted = text.strip()
    with contextlib.suppress(UserError):
        return parse_peer_id(wanted)
    named = {key for key, member in members.members.items() if member.name == wanted and members.speaks(key)}
    beginning = {members.current(key) for key in members.members if wanted and peer_id(key).startswith(wanted.lower())}
    found = sorted(named | beginning)
    if len(found) == 1:
        return found[0]
    if not found:
        raise UserError(f"no member is called {text!r}, and no peer id begins so; `peers` lists them")
    names = ", ".join(_shown(key, members) for key in found[:CHOICES_SHOWN]) + ", …" * (len(found) > CHOICES_SHOWN)
    raise UserError(f"{text!r} fits {len(found)} peers: {names}; type more of the peer id")


def _shown(key: bytes, members: MembersState) -> str:
    name = members.members[key].name
    return short_id(key) if name == short_id(key) else f"{short_id(key)} ({name})"


class Names:
    """By peer id, what people are shown: the name alone where nobody else could be meant by it."""

    def __init__(self, present: Mapping[str, str], former: Mapping[str, str] | None = None) -> None:
        """Both from peer id to name; `former` ones take part no more."""
        self._names = {**(former or {}), **present}
        self._present = present
        self._many = {name for name, count in Counter(present.values()).items() if count > 1}
        self._ids = {peer[:SHORT]: peer for peer in self._names}

    @classmethod
    def of(cls, members: MembersState) -> Names:
        names = {key: member.name for key, member in members.members.items()}
        present = {peer_id(key): name for key, name in names.items() if members.speaks(key)}
        return cls(present, {peer_id(key): name for key, name in names.items()})

    def __getitem__(self, peer: str) -> str:
        name, short = self._names.get(peer, ""), peer[:SHORT]
        if not name or name == short:
            return short
        return name if self._is_clear(peer) else f"{name} ({short})"

    def _is_clear(self, peer: str) -> bool:
        # Anybody may take another's name, or call itself as the beginning of another's id reads.
        name = self._names[peer]
        return peer in self._present and name not in self._many and name not in self._ids

    def in_text(self, text: str) -> str:
        """Names in the place of short ids. In a command, between backquotes, only such a name as the command understands."""
        parts = text.split("`")
        return "`".join(_ID.sub(self._in_command if at % 2 else self._in_sentence, part) for at, part in enumerate(parts))

    def _in_sentence(self, found: re.Match[str]) -> str:
        peer = self._ids.get(found[0])
        return self[peer] if peer else found[0]

    def _in_command(self, found: re.Match[str]) -> str:
        peer = self._ids.get(found[0])
        return shlex.quote(self[peer]) if peer and self._is_clear(peer) else found[0]
