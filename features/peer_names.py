"""Names of peers for people."""

from __future__ import annotations

import bisect
import re
import shlex
from collections import Counter
from collections.abc import Mapping

SHORT_ID_LENGTH = 8  # number of characters of a peer id or root that people see
NAMED_MARK = "is called"  # words between an id and a name in errors: `replace_ids` does not replace an id before them
_ID = re.compile(rf"\b[a-z2-7]{{{SHORT_ID_LENGTH}}}\b(?! {NAMED_MARK} )")
_WHOLE_ID = re.compile(r"[a-z2-7]{52}")


class PeerNames:
    """A map from peer ids to displayed names: the peer's name if it is unambiguous, otherwise the name with the short id."""

    def __init__(self, present: Mapping[str, str], former: Mapping[str, str] | None = None) -> None:
        """`present` and `former` map peer ids to names: of present members, and of former members that no longer participate."""
        self._names = {**(former or {}), **present}
        self._present = present
        self._many = {name for name, count in Counter(present.values()).items() if count > 1}
        self._ids = {peer[:SHORT_ID_LENGTH]: peer for peer in self._names}
        self._sorted = sorted(self._names)

    def __getitem__(self, peer: str) -> str:
        name, short = self._names.get(peer, ""), peer[:SHORT_ID_LENGTH]
        if not name or name == short:
            return short
        return name if self._is_clear(peer) else f"{name} ({short})"

    def _is_clear(self, peer: str) -> bool:
        # Any member may take the name of another peer, or a name that looks like a peer id, which commands would take as an id.
        name = self._names[peer]
        return peer in self._present and name not in self._many and not self._reads_as_id(name.lower())

    def _reads_as_id(self, name: str) -> bool:
        at = bisect.bisect_left(self._sorted, name)
        return _WHOLE_ID.fullmatch(name) is not None or (at < len(self._sorted) and self._sorted[at].startswith(name))

    def replace_ids(self, text: str) -> str:
        """Replace short ids with names. In a command, between backquotes, insert only unambiguous names, quoted for a shell."""
        parts = text.split("`")
        return "`".join(_ID.sub(self._in_command if at % 2 else self._in_sentence, part) for at, part in enumerate(parts))

    def _in_sentence(self, found: re.Match[str]) -> str:
        peer = self._ids.get(found[0])
        return self[peer] if peer else found[0]

    def _in_command(self, found: re.Match[str]) -> str:
        peer = self._ids.get(found[0])
        return shlex.quote(self[peer]) if peer and self._is_clear(peer) else found[0]
