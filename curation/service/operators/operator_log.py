"""Operators of this peer: who is one, and a durable list of what they did by HTTP."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import trio

from curation.service.access_control import AccessControl
from curation.service.sqlite_database import ServiceDatabase
from protocol.errors import UserError
from web.replies import HttpProblem

T = TypeVar("T")
DECISION_WAIT_SECONDS: Final = 10.0  # a call waits that long for a decision
ENTRIES_MAX: Final = 10_000  # of the list; the oldest goes
STRANGER: Final = "nobody"  # who has signed in without a token
ABOUT_CHARACTERS_MAX: Final = 200


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
        await trio.to_thread.run_sync(self._note_stranger)

    def _note_stranger(self) -> None:
        if [entry["operator"] for entry in self.list_entries(0, 1)] != [STRANGER]:
            self._note(STRANGER, "sign in", "one or more, by no operator's token", "unauthorized")

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
        row = (time.time_ns() // 1_000_000, *noted)
        made = self._database.execute("INSERT INTO log (at_ms, operator, action, about, result) VALUES (?, ?, ?, ?, ?)", row)
        assert made.lastrowid is not None
        self._database.execute("DELETE FROM log WHERE number <= ?", (made.lastrowid - ENTRIES_MAX,))

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
