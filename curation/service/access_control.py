"""Who may come in at this peer: operators with a token, annotators with an invitation; and which annotators may not any more.
And what operators did by HTTP, in a durable list.

Tokens and invitations are random and kept as hashes, in a file that nobody but this peer's user reads. A code that enrolled
somebody is used up. An operator's browser has a session: another secret, which ends with the token that began it.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import trio

from curation.service.sqlite_database import ServiceDatabase
from protocol.errors import UserError
from web.calls import HttpProblem
from web.routes import ClientClass

ANNOTATOR: Final = ClientClass("annotator", "folkmoot", "T", "session")
TOKEN_BYTES: Final = 24
INVITATION_BYTES: Final = 12
OPERATOR_TOKEN_MS: Final = 86_400_000  # a token is valid that long
SESSIONS_MAX: Final = 32  # of one token; the oldest goes
OPERATOR_ID_DIGITS: Final = 8  # of the hash of a token: they name the operator, and open nothing
NO_INVITATION_NEEDED: Final = (
    "nobody needs an invitation here: sign_up is open; a peer that runs with `--sign-up invited` asks for one"
)
T = TypeVar("T")
DECISION_WAIT_SECONDS: Final = 10.0  # a call waits that long for a decision
ENTRIES_MAX: Final = 10_000  # of the list; the oldest goes
STRANGER: Final = "nobody"  # who has signed in without a token
ABOUT_CHARACTERS_MAX: Final = 200


class AccessControl(ServiceDatabase):
    file_name, file_mode = "doors.sqlite", 0o600
    schema = """
CREATE TABLE IF NOT EXISTS operators (token BLOB PRIMARY KEY, until_ms INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS sessions (number INTEGER PRIMARY KEY, session BLOB UNIQUE NOT NULL, operator BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS codes (code BLOB PRIMARY KEY, annotator BLOB) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS refused (annotator BLOB PRIMARY KEY) WITHOUT ROWID;
"""

    def create_operator_token(self) -> str:
        token, now_ms = secrets.token_urlsafe(TOKEN_BYTES), unix_time_ms()
        self._database.execute("DELETE FROM operators WHERE until_ms <= ?", (now_ms,))
        self._database.execute("DELETE FROM sessions WHERE operator NOT IN (SELECT token FROM operators)")
        self._database.execute("INSERT INTO operators VALUES (?, ?)", (_hash(token), now_ms + OPERATOR_TOKEN_MS))
        return token

    def find_operator(self, secret: str) -> str:
        """Which operator has this token or session, in OPERATOR_ID_DIGITS digits; empty if nobody has, or it is over."""
        known = "token = ? OR token = (SELECT operator FROM sessions WHERE session = ?)"
        query, digest = f"SELECT token FROM operators WHERE until_ms > ? AND ({known})", _hash(secret)
        found = self._database.execute(query, (unix_time_ms(), digest, digest)).fetchone()
        return found[0].hex()[:OPERATOR_ID_DIGITS] if found else ""

    def begin_operator_session(self, token: str) -> tuple[str, int] | None:
        """A session for whoever has the token, and its milliseconds; None if nobody has."""
        digest, now_ms = _hash(token), unix_time_ms()
        query = "SELECT until_ms FROM operators WHERE token = ? AND until_ms > ?"
        found = self._database.execute(query, (digest, now_ms)).fetchone()
        if found is None:
            return None
        session = secrets.token_urlsafe(TOKEN_BYTES)
        self._database.execute("INSERT INTO sessions (session, operator) VALUES (?, ?)", (_hash(session), digest))
        newest = "SELECT number FROM sessions WHERE operator = ? ORDER BY number DESC LIMIT ?"
        outdated = f"DELETE FROM sessions WHERE operator = ? AND number NOT IN ({newest})"
        self._database.execute(outdated, (digest, digest, SESSIONS_MAX))
        return session, found[0] - now_ms

    def end_operator_session(self, session: str) -> None:
        self._database.execute("DELETE FROM sessions WHERE session = ?", (_hash(session),))

    def revoke_operators(self) -> int:
        """How many tokens there were. Sessions end with them."""
        self._database.execute("DELETE FROM sessions")
        return self._database.execute("DELETE FROM operators").rowcount

    def create_invitation(self) -> str:
        code = secrets.token_urlsafe(INVITATION_BYTES)
        self._database.execute("INSERT INTO codes VALUES (?, NULL)", (_hash(code),))
        return code

    def redeem_invitation(self, code: str, annotator: bytes, codes: tuple[str, ...]) -> bool:
        """Whether this annotator comes in with the code, which is used then; `codes`: those of the settings."""
        if code in codes:
            self._database.execute("INSERT OR IGNORE INTO codes VALUES (?, NULL)", (_hash(code),))
        used = "UPDATE codes SET annotator = ? WHERE code = ? AND (annotator IS NULL OR annotator = ?)"
        return self._database.execute(used, (annotator, _hash(code), annotator)).rowcount == 1

    def restore_invitation(self, annotator: bytes) -> None:
        """The network did not enrol it: its code admits somebody else."""
        self._database.execute("UPDATE codes SET annotator = NULL WHERE annotator = ?", (annotator,))

    def refuse_annotator(self, annotator: bytes) -> None:
        """This peer gives it no tasks any more."""
        self._database.execute("INSERT OR IGNORE INTO refused VALUES (?)", (annotator,))

    def allow_annotator(self, annotator: bytes) -> None:
        self._database.execute("DELETE FROM refused WHERE annotator = ?", (annotator,))

    def is_refused(self, annotator: bytes) -> bool:
        return self._database.execute("SELECT 1 FROM refused WHERE annotator = ?", (annotator,)).fetchone() is not None


def unix_time_ms() -> int:
    return time.time_ns() // 1_000_000


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


class Operators(ServiceDatabase):
    file_name, file_mode = "log.sqlite", 0o600
    schema = (
        "CREATE TABLE IF NOT EXISTS log (number INTEGER PRIMARY KEY AUTOINCREMENT, at_ms INTEGER NOT NULL,"
        " operator TEXT NOT NULL, action TEXT NOT NULL, about TEXT NOT NULL, result TEXT NOT NULL)"
    )

    def __init__(self, folder: Path, doors: AccessControl, annotates: Callable[[str], bool]) -> None:
        """`annotates`: whether a token is an annotator's."""
        super().__init__(folder)
        self._doors, self._annotates = doors, annotates

    def require_operator(self, token: str) -> str:
        """The operator, as the list names it. Raises `HttpProblem` if it is none."""
        if operator := self._doors.find_operator(token):
            return operator
        if self._annotates(token):
            raise HttpProblem("forbidden", "this token is an annotator's: `peer web token` prints one for operators")
        raise HttpProblem(
            "unauthorized", "no operator has this token: it is over, or not all of it is here; `peer web token` prints one"
        )

    async def log_stranger(self) -> None:
        """A sign-in without a token. Many in a row are one entry, so that no stranger fills the list."""
        if [entry["operator"] for entry in await trio.to_thread.run_sync(self.list_entries, 0, 1)] != [STRANGER]:
            await trio.to_thread.run_sync(self._note, STRANGER, "sign in", "one or more, by no operator's token", "unauthorized")

    @asynccontextmanager
    async def log_action(self, operator: str, action: str, about: str) -> AsyncIterator[None]:
        """Notes what the operator did, and what came of it: also where it was refused."""
        result = "cut off"  # or a slip of ours: whether it was done, nobody knows
        try:
            yield
            result = "done"
        except HttpProblem as problem:
            result = problem.code
            raise
        finally:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(self._note, operator, action, about[:ABOUT_CHARACTERS_MAX], result)

    def _note(self, *noted: str) -> None:
        row = (unix_time_ms(), *noted)
        self._database.execute("INSERT INTO log (at_ms, operator, action, about, result) VALUES (?, ?, ?, ?, ?)", row)
        self._database.execute("DELETE FROM log WHERE number <= (SELECT max(number) FROM log) - ?", (ENTRIES_MAX,))

    def list_entries(self, before: int, limit: int) -> list[dict[str, Any]]:
        """The newest first, below that number; 0: all."""
        names = ("number", "at_ms", "operator", "action", "about", "result")
        query = f"SELECT {', '.join(names)} FROM log WHERE ? = 0 OR number < ? ORDER BY number DESC LIMIT ?"
        return [dict(zip(names, row, strict=True)) for row in self._database.execute(query, (before, before, limit))]


async def wait_for_decision(work: Awaitable[T]) -> T:
    """What is not decided in time may be decided later."""
    try:
        with trio.move_on_after(DECISION_WAIT_SECONDS):
            return await work
    except UserError as error:
        raise HttpProblem("refused", str(error)) from None
    raise HttpProblem("no-quorum", "the network has not decided it yet, and may still: look again", 10)
