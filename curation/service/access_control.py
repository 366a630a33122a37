"""Access to a serving peer: operators' tokens, annotators' invitations, refused annotators, and a log of operators' actions.

Tokens and invitations are random. Their hashes are in a file that only this peer's user can read. An invitation enrols one
annotator. An operator's browser has a session with a secret of its own, which ends with the token that began the session.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import trio

from protocol.errors import UserError
from storage.service_database import ServiceDatabase
from web.calls import HttpProblem
from web.routes import ClientClass

ANNOTATOR: Final = ClientClass("annotator", "folkmoot", "session")
TOKEN_BYTES: Final = 24
INVITATION_BYTES: Final = 12
OPERATOR_TOKEN_MS: Final = 86_400_000  # lifetime of an operator's token in milliseconds
SESSIONS_MAX: Final = 32  # sessions per operator's token: a further session ends the oldest one
OPERATOR_ID_DIGITS: Final = 8  # digits of a token's hash, which name the operator and give no access
NO_INVITATION_NEEDED: Final = (
    "this peer needs no invitations, since its setting sign_up is open: run it with `--sign-up invited` to require them"
)
T = TypeVar("T")
DECISION_WAIT_SECONDS: Final = 10.0  # longest wait of an HTTP call until its transaction is decided
ENTRIES_MAX: Final = 10_000  # entries of the log: a further entry deletes the oldest one
STRANGER: Final = "nobody"  # name in the log of clients that sign in without a valid token
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
        """Return the name of the operator with this token or session: OPERATOR_ID_DIGITS digits.

        Empty: the secret is unknown or has expired.
        """
        known = "token = ? OR token = (SELECT operator FROM sessions WHERE session = ?)"
        query, digest = f"SELECT token FROM operators WHERE until_ms > ? AND ({known})", _hash(secret)
        found = self._database.execute(query, (unix_time_ms(), digest, digest)).fetchone()
        return found[0].hex()[:OPERATOR_ID_DIGITS] if found else ""

    def begin_operator_session(self, token: str) -> tuple[str, int] | None:
        """Return a new session's secret and its lifetime in milliseconds, or None if no operator has the token."""
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
        """Revoke all tokens with their sessions, and return the number of tokens."""
        self._database.execute("DELETE FROM sessions")
        return self._database.execute("DELETE FROM operators").rowcount

    def create_invitation(self) -> str:
        code = secrets.token_urlsafe(INVITATION_BYTES)
        self._database.execute("INSERT INTO codes VALUES (?, NULL)", (_hash(code),))
        return code

    def redeem_invitation(self, code: str, annotator: bytes, codes: tuple[str, ...]) -> bool:
        """Use an invitation for an annotator. Return False if it is unknown, or another annotator has used it.

        `codes`: the invitations in this peer's settings.
        """
        if code in codes:
            self._database.execute("INSERT OR IGNORE INTO codes VALUES (?, NULL)", (_hash(code),))
        used = "UPDATE codes SET annotator = ? WHERE code = ? AND (annotator IS NULL OR annotator = ?)"
        return self._database.execute(used, (annotator, _hash(code), annotator)).rowcount == 1

    def restore_invitation(self, annotator: bytes) -> None:
        """Make the invitation of an annotator valid again, since the network did not enrol the annotator."""
        self._database.execute("UPDATE codes SET annotator = NULL WHERE annotator = ?", (annotator,))

    def refuse_annotator(self, annotator: bytes) -> None:
        """Refuse this annotator: it gets no more tasks at this peer."""
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
        """`annotates` returns whether a token belongs to an annotator."""
        super().__init__(folder)
        self._doors, self._annotates, self._strangers = doors, annotates, threading.Lock()

    def require_operator(self, token: str) -> str:
        """Return the name in the log of the operator with this token. Raises `HttpProblem` if no operator has the token."""
        if operator := self._doors.find_operator(token):
            return operator
        if self._annotates(token):
            raise HttpProblem("forbidden", "this is an annotator's token: operators get theirs from `peer web token`")
        raise HttpProblem(
            "unauthorized", "unknown token: it has expired, was revoked or is incomplete; `peer web token` prints a new one"
        )

    async def log_stranger(self) -> None:
        """Log a sign-in without a valid token. Successive ones are one entry of the log, so that strangers cannot fill it."""
        await trio.to_thread.run_sync(self._note_stranger)

    def _note_stranger(self) -> None:
        with self._strangers:  # concurrent sign-ins, each in a thread, make one entry
            if [entry["operator"] for entry in self.list_entries(0, 1)] != [STRANGER]:
                self._note(STRANGER, "sign in", "one or more attempts with an invalid token", "unauthorized")

    @asynccontextmanager
    async def log_action(self, operator: str, action: str, about: str) -> AsyncIterator[None]:
        """Log an operator's action with its result when the context ends. Refused actions are logged, too."""
        result = "cut off"  # result if the call is cancelled, or a bug raises another exception: the action may have happened
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
        """Return at most `limit` log entries with numbers below `before`, the newest first.

        `before` = 0: from the newest entry on.
        """
        names = ("number", "at_ms", "operator", "action", "about", "result")
        query = f"SELECT {', '.join(names)} FROM log WHERE ? = 0 OR number < ? ORDER BY number DESC LIMIT ?"
        return [dict(zip(names, row, strict=True)) for row in self._database.execute(query, (before, before, limit))]


async def wait_for_decision(work: Awaitable[T]) -> T:
    """Return the result of `work`, which submits a transaction.

    Raises `HttpProblem` if the transaction is refused, or undecided after DECISION_WAIT_SECONDS.
    """
    try:
        with trio.move_on_after(DECISION_WAIT_SECONDS):
            return await work
    except UserError as error:
        raise HttpProblem("refused", str(error)) from None
    raise HttpProblem("no-quorum", "not decided yet, but it may still be decided: check again in 10 s", 10)
