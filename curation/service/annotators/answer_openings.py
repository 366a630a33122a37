"""Answers between commitment and opening. This peer stores the answers whose commitments it sends (it is their carrier), and
encrypts (seals) each for two other serving peers. It opens these answers once openings are requested. With a seal, it opens an
answer of another carrier that is late.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import trio

from curation.ledger.curation_module import serving_peers
from curation.ledger.curation_state import Assignment, AssignmentState, CurationState, ProjectPhase, TaskStage
from curation.ledger.state_changes import CurationChanges
from curation.ledger.transaction_types import AnswerCommitment, AnswerOpening, OpeningSecret, seal_recipients
from curation.limits import OPENING_MS
from curation.service.annotators.statement_batcher import StatementBatcher
from curation.tasks.answers import Answer, answer_commitment
from curation.tasks.task_pages import task_id
from features.services import ServiceContext
from ledger.members import MembersState
from protocol import codec
from protocol.errors import RemoteProtocolError
from protocol.identity import seal, short_id
from storage.service_database import ServiceDatabase

SEAL_DELAY_MS = 5_000  # wait of the first peer with a seal for the carrier; the second peer waits twice as long


@dataclass(frozen=True, slots=True)
class UnopenedAnswer:
    assignment: bytes
    salt: bytes
    answer: Answer
    signature: bytes  # the annotator's signature of the commitment

    @property
    def commitment(self) -> bytes:
        return answer_commitment(self.assignment, self.salt, self.answer)


@dataclass(frozen=True, slots=True)
class _Answer:
    choices: tuple[int, ...]


class AnswerStore(ServiceDatabase):
    """Answers that are not opened yet. An answer is durable in this store before the annotator gets the reply that it counts."""

    file_name = "answers.sqlite"
    schema = (
        "CREATE TABLE IF NOT EXISTS answers"
        " (assignment BLOB PRIMARY KEY, salt BLOB NOT NULL, answer BLOB NOT NULL, signature BLOB NOT NULL) WITHOUT ROWID"
    )

    # Each method is one SQL statement. A transaction of several statements would include statements of other threads.

    def store_answer(self, kept: UnopenedAnswer) -> None:
        row = (kept.assignment, kept.salt, codec.encode(_Answer(kept.answer)), kept.signature)
        self._database.execute("INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?)", row)

    def delete_answers(self, assignments: Sequence[bytes]) -> None:
        self._database.execute(f"DELETE FROM answers WHERE assignment IN ({', '.join('?' * len(assignments))})", assignments)

    def load_answers(self) -> Iterator[UnopenedAnswer]:
        for assignment, salt, answer, signature in self._database.execute("SELECT * FROM answers"):
            yield UnopenedAnswer(assignment, salt, codec.decode(_Answer, answer).choices, signature)


@dataclass
class PendingCommitment:
    """Commitment that waits for its decision. Until its decision, the annotator cannot replace the answer."""

    commitment: bytes
    done: trio.Event = field(default_factory=trio.Event)


@dataclass
class _DueOpening:
    """Requested opening of an answer."""

    since_ms: int
    seals: int = 0  # number of seals of this answer that this peer has tried to open


class AnswerOpenings:
    def __init__(self, desk: ServiceContext, gatherer: StatementBatcher) -> None:
        self._desk, self._gatherer = desk, gatherer
        self._vault = AnswerStore(desk.folder)
        self._kept = {kept.assignment: kept for kept in self._vault.load_answers()}
        self._former = list(self._kept.values())  # answers of the peer's last run, whose commitments may have been decided
        self._pending = {kept.assignment: PendingCommitment(kept.commitment) for kept in self._former}
        self._next = 0  # first number in the queue `openings` that is not yet added to `asked`
        self.asked: dict[bytes, _DueOpening] = {}  # requested openings by assignment, until the answer is opened or forfeited
        self._false: set[bytes] = set()  # carriers whose seals did not match their commitments

    def pending_commitment(self, assignment: bytes) -> PendingCommitment | None:
        found = self._pending.get(assignment)
        return found if found is not None and not found.done.is_set() else None

    async def commit_answer(self, kept: UnopenedAnswer) -> PendingCommitment:
        """Store an answer and send its commitment."""
        pending = self._pending[kept.assignment] = PendingCommitment(kept.commitment)
        try:
            await trio.to_thread.run_sync(self._vault.store_answer, kept)
        except BaseException:
            pending.done.set()
            raise
        self._kept[kept.assignment] = kept
        self._gatherer.add_statement(self._commit(kept), pending.done)
        return pending

    def _commit(self, kept: UnopenedAnswer) -> AnswerCommitment:
        secret = codec.encode(OpeningSecret(kept.salt, kept.answer))
        seals = tuple(seal(key, secret) or b"" for key in self._keepers(kept.assignment, self._desk.me))
        # the row exists, because only leased assignments are answered
        row = self._desk.state.module_state(CurationState).assignments[kept.assignment]
        return AnswerCommitment(kept.assignment, row.annotator, kept.commitment, kept.signature, seals)

    def _keepers(self, assignment: bytes, carrier: bytes) -> tuple[bytes, ...]:
        members = self._desk.state.module_state(MembersState)
        return seal_recipients(serving_peers(members), assignment, members.current_key(carrier))

    def forget_answer(self, assignment: bytes) -> None:
        """Delete an answer, unless a commitment of the assignment is pending."""
        if self.pending_commitment(assignment) is None and self._kept.pop(assignment, None) is not None:
            self._vault.delete_answers([assignment])

    async def process_due_openings(self, state: CurationState, now_ms: int) -> None:
        """Send the openings that are due.

        The caller repeats this at each new block, and after a second while openings are requested.
        """
        self._pending = {key: pending for key, pending in self._pending.items() if not pending.done.is_set()}
        over = self._carry_on(state)
        for due in CurationChanges(state, b"").queue_entries("openings", self._next):
            self.asked[due.assignment] = _DueOpening(due.due_ms - OPENING_MS)
        self._next = state.openings.last
        for assignment, asked in list(self.asked.items()):
            row = state.assignments[assignment]
            if row.state is not AssignmentState.COMMITTED:
                del self.asked[assignment]
                over.append(assignment)
                continue
            kept = self._kept.get(assignment)
            if kept is not None and state.tasks[task_id(row.project, row.number)].stage is TaskStage.OPENING:
                self._gatherer.add_statement(AnswerOpening(assignment, kept.salt, kept.answer))
            while asked.seals < len(row.seals) and now_ms >= asked.since_ms + SEAL_DELAY_MS * (asked.seals + 1):
                self._unseal(assignment, row, asked.seals)
                asked.seals += 1
        forgotten = [assignment for assignment in over if self._kept.pop(assignment, None) is not None]
        if forgotten:
            await trio.to_thread.run_sync(self._vault.delete_answers, forgotten)

    def _carry_on(self, state: CurationState) -> list[bytes]:
        """Send commitments again that were pending when the peer stopped. Return assignments whose answers are obsolete."""
        unknown, over = [], []
        for kept in self._former:
            row, pending = state.assignments.get_record(kept.assignment), self._pending[kept.assignment]
            if row is None:
                unknown.append(kept)  # the lease is in a block that this peer does not have yet
            elif is_commitment_possible(state, row):
                self._gatherer.add_statement(self._commit(kept), pending.done)
            else:
                pending.done.set()
                if row.commitment != kept.commitment or row.state is not AssignmentState.COMMITTED:
                    over.append(kept.assignment)
        self._former = unknown
        return over

    def _unseal(self, assignment: bytes, row: Assignment, place: int) -> None:
        """Open another carrier's answer if this peer can open its seal number `place`.

        The peer tries every seal, because the recipients may have been other ones when members changed.
        """
        data = self._desk.unseal(row.seals[place])
        try:
            secret = codec.decode(OpeningSecret, data) if data is not None else None
        except RemoteProtocolError:
            secret = None
        if secret is not None and answer_commitment(assignment, secret.salt, tuple(secret.answer)) == row.commitment:
            self._gatherer.add_statement(AnswerOpening(assignment, secret.salt, tuple(secret.answer)))
        elif data is not None or self._keepers(assignment, row.peer)[place : place + 1] == (self._desk.me,):
            if row.peer not in self._false:
                self._desk.log_event(f"peer {short_id(row.peer)} sealed answers for this peer that do not match its commitments")
            self._false.add(row.peer)


def is_commitment_possible(state: CurationState, row: Assignment) -> bool:
    """Return whether the ledger would accept a commitment of this assignment."""
    project, task = state.projects[row.project], state.tasks[task_id(row.project, row.number)]
    return (
        row.state in (AssignmentState.LEASED, AssignmentState.EXPIRED, AssignmentState.RELEASED)
        and project.phase is not ProjectPhase.CLOSED
        and task.stage is TaskStage.BEGUN
        and (row.state is AssignmentState.LEASED or task.places_taken < task.votes_asked)
    )
