"""Batches of annotators' statements, one after the other. A statement waits until the decision of its batch."""

from __future__ import annotations

from collections import deque
from typing import Any, Final

import trio

from curation.ledger.curation_module import signed_statement
from curation.ledger.transaction_types import (
    AnswerCommitment,
    AnswerOpening,
    EnrolmentEntry,
    LeaseRequest,
    ReleaseAssignment,
    SkipAssignment,
    StatementBatch,
)
from curation.limits import BATCH_MAX
from features.services import ServiceContext
from protocol import codec
from protocol.errors import UserError
from protocol.identity import Ed25519Verifier, signing_preimage
from protocol.limits import TRANSACTION_BYTES_MAX
from web.calls import HttpProblem

# time in which further statements join a batch; the batch then waits for a block, see `CurationModule.lingers`
BATCH_LINGER_SECONDS = 0.05
BATCH_BYTES_MAX = TRANSACTION_BYTES_MAX - 1_024  # bytes of a batch's statements: the transaction has further fields
DECISION_WAIT_SECONDS: Final = 10.0  # longest wait of an HTTP call for a decision
WAITING_STATEMENTS_MAX = 8 * BATCH_MAX  # statements of all annotators that wait for a decision

Statement = EnrolmentEntry | LeaseRequest | AnswerCommitment | AnswerOpening | SkipAssignment | ReleaseAssignment
_FIELDS: dict[type, str] = {
    EnrolmentEntry: "enrolments",
    LeaseRequest: "leases",
    AnswerCommitment: "commits",
    AnswerOpening: "openings",
    SkipAssignment: "skips",
    ReleaseAssignment: "releases",
}


class StatementBatcher:
    def __init__(self, desk: ServiceContext) -> None:
        self._desk, self._verifier = desk, Ed25519Verifier()
        self._waiting: deque[tuple[Statement, trio.Event]] = deque()
        self._events: dict[Statement, trio.Event] = {}  # event of each undecided statement
        self._given_back: dict[bytes, trio.Event] = {}  # events of undecided skips and releases, by assignment
        self._there_is_one = trio.Event()

    @property
    def is_full(self) -> bool:
        """True if WAITING_STATEMENTS_MAX statements wait for a decision.

        The network decides none, and more would only fill the memory.
        """
        return len(self._events) >= WAITING_STATEMENTS_MAX

    def require_room(self) -> None:
        """Raise `HttpProblem` if too many statements wait for a decision."""
        if self.is_full:
            raise HttpProblem("no-quorum", "the network is not deciding anything at the moment: try again later", 10)

    @property
    def waiting_count(self) -> int:
        return len(self._events)

    def add_statement(self, statement: Statement, done: trio.Event | None = None) -> trio.Event:
        """Add a statement to the next batch.

        Return an event that is set after the batch's decision, even if the statement does not act. Without `done`, a statement
        that equals a waiting statement is not added again: the call returns the event of the waiting one.
        """
        known = self._events.get(statement)
        if known is not None and done is None:
            return known
        done = trio.Event() if done is None else done
        self._events[statement] = done
        if isinstance(statement, SkipAssignment | ReleaseAssignment):
            self._given_back[statement.assignment] = done
        self._waiting.append((statement, done))
        self._there_is_one.set()
        return done

    async def wait_for_decision(self, done: trio.Event) -> None:
        """Wait for the event of a statement. Raises `HttpProblem` after DECISION_WAIT_SECONDS."""
        with trio.move_on_after(DECISION_WAIT_SECONDS):
            await done.wait()
            return
        raise HttpProblem("no-quorum", "not decided yet: try again in 10 s", 10)

    def pending_release(self, assignment: bytes) -> trio.Event | None:
        """Return the event of an undecided skip or release of this assignment, or None."""
        return self._given_back.get(assignment)

    def request_empty_batch(self) -> None:
        """Request a batch even if no statement waits: the ledger handles expired leases only in a batch."""
        self._there_is_one.set()

    async def run(self) -> None:
        while True:
            await self._there_is_one.wait()
            await trio.sleep(BATCH_LINGER_SECONDS)
            self._there_is_one = trio.Event()
            taken = self._taken()
            if self._waiting:
                self._there_is_one.set()
            await self._decide(taken)

    def _taken(self) -> list[tuple[Statement, trio.Event]]:
        """Remove the oldest waiting statements that fit into one batch, and return each with its event."""
        taken: list[tuple[Statement, trio.Event]] = []
        left = BATCH_BYTES_MAX
        while self._waiting and len(taken) < BATCH_MAX:
            left -= len(codec.encode(self._waiting[0][0]))
            if left < 0:
                break
            taken.append(self._waiting.popleft())
        return taken

    async def _decide(self, taken: list[tuple[Statement, trio.Event]]) -> None:
        by_field: dict[str, list[Any]] = {name: [] for name in _FIELDS.values()}
        for statement, _ in taken:
            by_field[_FIELDS[type(statement)]].append(statement)
        batch = StatementBatch(**{name: tuple(items) for name, items in by_field.items()})
        try:
            await self._desk.submit_transaction("curation/statements", batch)
        except UserError as error:
            self._desk.log_event(f"a batch of {batch.size} annotators' statements was not decided: {error}")
            false = await trio.to_thread.run_sync(self._false, taken)
            self._drop(false)
            if left := [entry for entry in taken if entry not in false]:
                self._waiting.extendleft(reversed(left))
                self._there_is_one.set()
                await trio.sleep(1.0)
            return
        self._drop(taken)

    def _drop(self, entries: list[tuple[Statement, trio.Event]]) -> None:
        for statement, done in entries:
            self._events.pop(statement, None)
            if isinstance(statement, SkipAssignment | ReleaseAssignment):
                self._given_back.pop(statement.assignment, None)
            done.set()

    def _false(self, taken: list[tuple[Statement, trio.Event]]) -> list[tuple[Statement, trio.Event]]:
        """Return the statements with an invalid signature. One such statement makes its batch invalid."""
        return [entry for entry in taken if not self._has_true_signature(entry[0])]

    def _has_true_signature(self, part: Statement) -> bool:
        if isinstance(part, AnswerOpening | SkipAssignment | ReleaseAssignment):
            return True  # these kinds of statements have no signature
        signer, message, signature = signed_statement(self._desk.me, part)
        return self._verifier.verify(signer, signing_preimage(message.TAG, self._desk.chain_id, codec.encode(message)), signature)
