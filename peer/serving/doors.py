"""Who may come in at this peer: operators with a token, annotators with an invitation.

Both are random and kept as hashes, in a file that nobody but this peer's user reads. A code that enrolled somebody is used up.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from pathlib import Path
from typing import Final

from peer.serving.durable import database

TOKEN_BYTES: Final = 24
INVITATION_BYTES: Final = 12
OPERATOR_MS: Final = 86_400_000  # a token is valid that long
_SCHEMA = """
CREATE TABLE IF NOT EXISTS operators (token BLOB PRIMARY KEY, until_ms INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS codes (code BLOB PRIMARY KEY, annotator BLOB) WITHOUT ROWID;
"""


class Doors:
    """Every method that changes something waits for the disk."""

    def __init__(self, folder: Path) -> None:
        path = folder / "doors.sqlite"
        path.touch(mode=0o600)
        self._database = database(path, _SCHEMA)

    def close(self) -> None:
        self._database.close()

    def operator(self) -> str:
        """A token for an operator."""
        token, now_ms = secrets.token_urlsafe(TOKEN_BYTES), _now_ms()
        self._database.execute("DELETE FROM operators WHERE until_ms <= ?", (now_ms,))
        self._database.execute("INSERT INTO operators VALUES (?, ?)", (_hash(token), now_ms + OPERATOR_MS))
        return token

    def is_operator(self, token: str) -> bool:
        found = self._database.execute("SELECT 1 FROM operators WHERE token = ? AND until_ms > ?", (_hash(token), _now_ms()))
        return found.fetchone() is not None

    def revoke_operators(self) -> int:
        """How many tokens there were."""
        return self._database.execute("DELETE FROM operators").rowcount

    def invite(self) -> str:
        """A code that enrols one annotator."""
        code = secrets.token_urlsafe(INVITATION_BYTES)
        self._database.execute("INSERT INTO codes VALUES (?, NULL)", (_hash(code),))
        return code

    def admits(self, code: str, annotator: bytes, codes: tuple[str, ...]) -> bool:
        """Whether this annotator comes in with the code, which is used then; `codes`: those of the settings."""
        if code in codes:
            self._database.execute("INSERT OR IGNORE INTO codes VALUES (?, NULL)", (_hash(code),))
        used = "UPDATE codes SET annotator = ? WHERE code = ? AND (annotator IS NULL OR annotator = ?)"
        return self._database.execute(used, (annotator, _hash(code), annotator)).rowcount == 1

    def give_back(self, annotator: bytes) -> None:
        """The network did not enrol it: its code admits somebody else."""
        self._database.execute("UPDATE codes SET annotator = NULL WHERE annotator = ?", (annotator,))


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()
