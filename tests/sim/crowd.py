"""Simulated annotators, and the transactions of the peers that serve them: mostly valid ones, and some invalid ones.

Answer and salt are derived from the assignment, so a restarted peer knows the votes that it carried. Only this peer opens a
vote; after its deadline a holder of a seal may open it. Each assignment has two answers. If an annotator signs both, the one
that is decided first counts.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any
from unittest import mock

import curation.ledger.curation_module
import curation.ledger.project_close
from curation.ledger.curation_module import serving_peers
from curation.ledger.curation_state import (
    Assignment,
    AssignmentState,
    CurationState,
    Project,
    ProjectPhase,
    ProjectSpec,
    Redaction,
    TaskStage,
    page_key,
)
from curation.ledger.transaction_types import (
    AddTaskPage,
    AnnotationStatement,
    AnswerCommitment,
    AnswerOpening,
    CreateProject,
    EnrolmentEntry,
    EnrolStatement,
    GoldAnswerProof,
    LeaseRequest,
    OpeningSecret,
    ReleaseAssignment,
    RevealGold,
    ReviewTask,
    SessionStatement,
    SetProjectPhase,
    SkipAssignment,
    StatementBatch,
    VoteToStopProject,
    seal_recipients,
)
from curation.tasks.answers import PAIR_ANSWERS, Answer, QuestionKind, answer_commitment, gold_leaf
from curation.tasks.task_pages import assignment_id, task_id
from ledger.ledger_state import LedgerState
from ledger.members import MembersState
from protocol import codec, merkle
from protocol.identity import Signer, signing_preimage
from tests.sim.keys import another

LEASE_MINUTES = 2  # ten would be longer than a history
CLOSING_ROWS_PER_BATCH = 100  # so that a close takes several batches
PEOPLE = (3, 6)  # drawn by seed
TASKS = (8, 24)  # of a page
PROJECTS_OF_ONE = 3
LEASES_WANTED = 5
SAID_KEPT = 40  # statements that are replayed
PROJECT_SHARE = 0.2  # of the wishes for tasks of one project alone
FORGED_SHARE = 0.3  # of the batches that a liar could replace by a forged one

SESSION_MS = 3_600_000
MOODS = ProjectSpec("moods", QuestionKind.LABEL, ("glad", "sad"), False, 0, None, 3, 7, False)
ASKED = (
    MOODS,
    MOODS,
    MOODS,
    MOODS,
    ProjectSpec("one vote", QuestionKind.LABEL, ("a", "b", "c"), False, 0, None, 1, 5, False),
    ProjectSpec("several", QuestionKind.LABEL, ("a", "b", "c"), True, 0, None, 4, 3, False),
    ProjectSpec("stars", QuestionKind.RATING, ("1", "2", "3"), False, 0, None, 3, 10, False),
    ProjectSpec("better", QuestionKind.PAIR, (), False, 2, None, 2, 1, False),
    ProjectSpec("best", QuestionKind.RANKING, (), False, 3, None, 3, 4, False),
)


@contextlib.contextmanager
def hurried(minute_ms: int) -> Iterator[None]:
    """Shorten the minute of curation inside the block, and close projects in small slices."""
    with (
        mock.patch.object(curation.ledger.curation_module, "LEASE_MS", LEASE_MINUTES * minute_ms),
        mock.patch.object(curation.ledger.curation_module, "OPENING_MS", minute_ms),
        mock.patch.object(curation.ledger.project_close, "CLOSING_ROWS_PER_BATCH", CLOSING_ROWS_PER_BATCH),
    ):
        yield


def _number(*parts: bytes) -> int:
    return int.from_bytes(hashlib.sha256(b"crowd" + b"".join(parts)).digest()[:8], "big")


def salt_of(assignment: bytes, which: int) -> bytes:
    return hashlib.sha256(b"salt" + assignment + bytes([which])).digest()[:16]


def answer_of(asked: ProjectSpec, row: Assignment, assignment: bytes, which: int) -> Answer:
    """Return mostly the true answer. The second answer is random, and so is one in sixteen of the first ones."""
    if which == 0 and _number(b"errs", assignment) % 16:
        return truth_of(asked, row.project, row.number)
    return _drawn(asked, random.Random(_number(assignment, bytes([which]))))


def truth_of(asked: ProjectSpec, project: bytes, number: int) -> Answer:
    return _drawn(asked, random.Random(_number(project, bytes([number % 256]))))


def gold_of(asked: ProjectSpec, project: bytes, first: int, count: int) -> list[bytes]:
    """Return the leaves of a page's gold. The author knows the true answers of all its tasks."""
    return [gold_leaf(bytes(16), truth_of(asked, project, first + index)) for index in range(count)]


def _drawn(asked: ProjectSpec, drawn: random.Random) -> Answer:
    match asked.kind:
        case QuestionKind.LABEL if asked.many:
            return tuple(option for option in range(len(asked.options)) if drawn.random() < 0.5)
        case QuestionKind.LABEL:
            return (drawn.randrange(len(asked.options)),)
        case QuestionKind.RATING:
            return (drawn.randint(1, len(asked.options)),)
        case QuestionKind.PAIR:
            return (drawn.randrange(len(PAIR_ANSWERS)),)
        case QuestionKind.RANKING:
            return tuple(drawn.sample(range(asked.items), asked.items))


def people(seed: int, like: Signer) -> list[Signer]:
    return [another(like, f"annotator {number}") for number in range(random.Random(f"crowd {seed}").randint(*PEOPLE))]


@dataclass
class Desk:
    """Curation transactions of one peer. All peers share `people`: each annotator uses any of the peers."""

    signer: Signer
    random: random.Random
    chain_id: bytes
    people: list[Signer]
    asks: tuple[ProjectSpec, ...] = ASKED
    open_at_once: int = 2
    closes_after: int = 18  # settled tasks
    is_careful: bool = False  # each annotator gives its first answer, and opens it at any peer
    founded: int = 0
    members: MembersState | None = None  # of the state in the last call
    _said: dict[str, list[Any]] = field(default_factory=dict)  # a sample of the statements carried before
    _carrier: bytes = b""  # the key of this peer that those statements name

    def wanted(self, state: LedgerState) -> tuple[str, Any]:
        curated, self.members = state.module_state(CurationState), state.members
        return self._of_member(curated, state.members.voters) or ("curation/statements", self._batch(curated, state.time_ms))

    def _of_member(self, state: CurationState, voters: tuple[bytes, ...]) -> tuple[str, Any] | None:
        """Return a transaction of this peer as an author or as a voter."""
        draw = self.random
        for key in state.open:
            project = state.projects.get_record(key)
            assert project is not None
            if self.signer.public in voters and project.tasks and _number(b"wish", key) % 3 == 0 and draw.random() < 0.3:
                wish = self._of_voter(state, key, project)
                if wish is not None:
                    return wish
            if project.author != self.signer.public:
                continue
            if project.tasks == project.fresh_drawn and project.pages < 3 and draw.random() < 0.6:
                count = draw.randint(*TASKS)
                gold = merkle.merkle_root(gold_of(project.spec, key, project.tasks, count))
                return "curation/add-page", AddTaskPage(key, draw.randbytes(32), 1_000, bytes(32), count, gold)
            if project.pages and draw.random() < 0.05:
                return self._gold_or_redaction(state, key, project)
            waiting = [task for task, row in state.tasks.items() if row.project == key and row.stage is TaskStage.REVIEW]
            if waiting and draw.random() < 0.5:
                row = state.assignments.get_record(assignment_id(waiting[0], state.tasks.get_record(waiting[0]).annotators[0]))  # type: ignore[union-attr]
                assert row is not None
                return "curation/review-task", ReviewTask(waiting[0], answer_of(project.spec, row, waiting[0], 1))
            is_paused, is_old = project.phase is ProjectPhase.PAUSED, project.settled > self.closes_after
            if draw.random() < (0.4 if is_paused or is_old else 0.05):
                return "curation/set-phase", SetProjectPhase(
                    key, ProjectPhase.CLOSED if is_old else ProjectPhase.OPEN if is_paused else ProjectPhase.PAUSED
                )
        if len(state.open) < self.open_at_once and self.founded < PROJECTS_OF_ONE and draw.random() < 0.4:
            self.founded += 1
            return "curation/create-project", CreateProject(draw.choice(self.asks))
        return None

    def _of_voter(self, state: CurationState, key: bytes, project: Project) -> tuple[str, Any] | None:
        """Return a wish of this voter. All voters have the same wishes, because one alone has no effect."""
        if project.settled > 12 and self.signer.public not in project.stop_requests:
            return "curation/vote-to-stop", VoteToStopProject(key)
        kind, wish = self._redaction(state, key, _number(b"index", key))
        task = state.tasks.get_record(task_id(key, wish.index))
        is_done = task is not None and task.is_redacted
        return None if is_done or state.wishes.get_record(self.signer.public) == wish else (kind, wish)

    def _gold_or_redaction(self, state: CurationState, key: bytes, project: Project) -> tuple[str, Any]:
        page = self.random.randrange(project.pages)
        row = state.pages.get_record(page_key(key, page))
        assert row is not None
        index = self.random.randrange(row.count)
        if self.random.random() < 0.4:
            return self._redaction(state, key, index)
        leaves = gold_of(project.spec, key, row.first, row.count)
        answer = GoldAnswerProof(
            index, truth_of(project.spec, key, row.first + index), bytes(16), tuple(merkle.merkle_proof(leaves, index))
        )
        return "curation/reveal-gold", RevealGold(key, page, (answer,))

    def _redaction(self, state: CurationState, key: bytes, index: int) -> tuple[str, Any]:
        """Redact a task of the first page."""
        page = state.pages.get_record(page_key(key, 0))
        assert page is not None
        return "curation/redact", Redaction(key, 0, index % page.count, page.digest, hashlib.sha256(page.digest).digest(), 1_000)

    # Batches ---------------------------------------------------------------------------------------------------------

    def _batch(self, state: CurationState, now_ms: int) -> StatementBatch:
        """Return a batch of correctly signed statements, or now and then one of wrongly signed statements."""
        found: dict[str, list[Any]] = {part.name: [] for part in fields(StatementBatch)}
        forged: dict[str, list[Any]] = {name: [] for name in ("enrolments", "leases", "commits")}
        for person in self.people:
            self._go_on(state, person, now_ms, found, forged)
        for assignment, row in dict(state.assignments.items()).items():
            if row.state is AssignmentState.COMMITTED and self.random.random() < 0.8:
                if self.is_careful or self._is_me(row.peer):
                    self._open(state, assignment, row, found)
                else:
                    self._unseal(assignment, row, now_ms, found)
            elif row.state in (AssignmentState.EXPIRED, AssignmentState.RELEASED) and self.random.random() < 0.2:
                self._answer(state, assignment, row, found, forged)
        if any(forged.values()) and self.random.random() < FORGED_SHARE:
            return StatementBatch(**{name: tuple(statements) for name, statements in forged.items()})
        if self._carrier != self.signer.public:  # statements that name a former key of this peer are false now
            self._said, self._carrier = {}, self.signer.public
        for name, statements in found.items():
            said = self._said.setdefault(name, [])
            again = self.random.sample(said, min(len(said), self.random.randrange(3)))
            said += statements
            del said[:-SAID_KEPT]
            statements += again
        return StatementBatch(**{name: tuple(statements) for name, statements in found.items()})

    def _go_on(
        self, state: CurationState, person: Signer, now_ms: int, found: dict[str, list[Any]], forged: dict[str, list[Any]]
    ) -> None:
        draw, row = self.random, state.annotators.get_record(person.public)
        if row is None:
            is_forged = draw.random() < 0.2
            (forged if is_forged else found)["enrolments"].append(self._enrolment(person, is_forged))
            return
        for assignment in row.leases:
            lease = state.assignments.get_record(assignment)
            assert lease is not None
            chance = draw.random()
            if _number(b"idle", assignment) % 12 == 0:
                continue  # until it has expired
            if chance < 0.7:
                self._answer(state, assignment, lease, found, forged)
            elif chance < 0.75:
                found["skips"].append(SkipAssignment(assignment, "unclear"))
            elif chance < (0.95 if self._is_me(lease.peer) else 0.8):
                found["releases"].append(ReleaseAssignment(assignment))
        if len(row.leases) < LEASES_WANTED and draw.random() < 0.6:
            is_forged = draw.random() < 0.1
            (forged if is_forged else found)["leases"].append(self._wish(state, person, now_ms, is_forged))

    def _answer(
        self,
        state: CurationState,
        assignment: bytes,
        row: Assignment,
        found: dict[str, list[Any]],
        forged: dict[str, list[Any]],
    ) -> None:
        """Commit one answer, two answers, or an answer that another key signs in its own or the annotator's name."""
        chance = 0.5 if self.is_careful else self.random.random()
        project = state.projects.get_record(row.project)
        assert project is not None
        for which in (0, 1) if chance < 0.1 else (1,) if chance < 0.2 else (0,):
            salt, answer = salt_of(assignment, which), answer_of(project.spec, row, assignment, which)
            digest = answer_commitment(assignment, salt, answer)
            key = row.annotator if chance < 0.95 else next(who.public for who in self.people if who.public != row.annotator)
            signature, seals = (
                self._signed(key, AnnotationStatement(assignment, digest)),
                self._seals(assignment, OpeningSecret(salt, answer)),
            )
            is_forged = key != row.annotator and self.random.random() < 0.5
            commit = AnswerCommitment(assignment, row.annotator if is_forged else key, digest, signature, seals)
            (forged if is_forged else found)["commits"].append(commit)

    def _open(self, state: CurationState, assignment: bytes, row: Assignment, found: dict[str, list[Any]]) -> None:
        """Open votes. One in ten is never opened, and some are opened with an answer that differs from the committed one."""
        if _number(b"lost", assignment) % 10 == 0:
            return
        project = state.projects.get_record(row.project)
        assert project is not None
        for which in (0, 1):
            salt, answer = salt_of(assignment, which), answer_of(project.spec, row, assignment, which)
            if (answer_commitment(assignment, salt, answer) == row.commitment) == (self.random.random() < 0.9):
                found["openings"].append(AnswerOpening(assignment, salt, answer))

    # Seals -----------------------------------------------------------------------------------------------------------

    def _is_me(self, key: bytes) -> bool:
        """Return True for this peer's current key and its earlier ones."""
        assert self.members is not None
        return self.members.current_key(key) == self.signer.public

    def _seals(self, assignment: bytes, secret: OpeningSecret) -> tuple[bytes, ...]:
        """Seal an opening for some members. A seal names its holder, and nobody else opens it. Some seals are false."""
        assert self.members is not None
        if _number(b"false", assignment) % 16 == 0:
            secret = OpeningSecret(bytes(16), secret.answer)
        keys = seal_recipients(serving_peers(self.members), assignment, self.signer.public)
        return tuple(key + codec.encode(secret) for key in keys)

    def _unseal(self, assignment: bytes, row: Assignment, now_ms: int, found: dict[str, list[Any]]) -> None:
        """The first peer with a seal waits for a quarter of the minute, the second one for half of it."""
        minute_ms = curation.ledger.curation_module.OPENING_MS
        for place, seal in enumerate(row.seals, 1):
            if self._is_me(seal[:32]) and now_ms >= row.deadline_ms - minute_ms + place * minute_ms // 4:
                secret = codec.decode(OpeningSecret, seal[32:])
                found["openings"].append(AnswerOpening(assignment, secret.salt, secret.answer))

    # Signed ----------------------------------------------------------------------------------------------------------

    def _signed(self, key: bytes, statement: Any) -> bytes:
        signer = next(who for who in self.people if who.public == key)
        return signer.sign(signing_preimage(statement.TAG, self.chain_id, codec.encode(statement)))

    def _enrolment(self, person: Signer, is_forged: bool) -> EnrolmentEntry:
        """Enrol an annotator. A forged enrolment is signed for another peer, as in a replay of that peer's."""
        peer = bytes(32) if is_forged else self.signer.public
        return EnrolmentEntry(person.public, "ann", False, self._signed(person.public, EnrolStatement("ann", peer, False)))

    def _wish(self, state: CurationState, person: Signer, now_ms: int, is_forged: bool) -> LeaseRequest:
        peer, until_ms = bytes(32) if is_forged else self.signer.public, now_ms + SESSION_MS
        signature = self._signed(person.public, SessionStatement(peer, bytes(16), until_ms))
        project = self.random.choice(state.open) if state.open and self.random.random() < PROJECT_SHARE else None
        return LeaseRequest(person.public, bytes(16), until_ms, signature, self.random.randint(1, 8), project=project)
