"""A ledger with curation, without a network: annotators, serving peers, and batches that the test decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from curation.ledger.curation_module import CurationModule, project_id
from curation.ledger.curation_state import Annotator, Assignment, CurationState, Project, ProjectPhase, ProjectSpec, TaskRow
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
    SessionStatement,
    SetProjectPhase,
    StatementBatch,
)
from curation.limits import LEASES_MAX, OPENING_MS, PAGE_TASKS_MAX
from curation.tasks.answers import Answer, QuestionKind, answer_commitment, gold_leaf
from curation.tasks.task_pages import AnnotationTask, PageEntry, TaskPageBlob, page_merkle_root, task_id
from ledger.core.module import Refused
from ledger.ledger_state import decode_body
from ledger.members import RegisterRoles
from protocol import codec, merkle
from protocol.errors import RemoteProtocolError
from protocol.identity import signing_preimage
from tests.ledger.blocks import compute_transition
from tests.ledger.world import PEOPLE, World
from tests.sim.keys import FastSigner

AUTHOR, PEER, OTHER = PEOPLE[0], PEOPLE[1], PEOPLE[2]  # founders; the last two serve
NONCE, FAR_MS = bytes(16), 86_400_000
ONE = ProjectSpec("moods", QuestionKind.LABEL, ("glad", "sad"), False, 0, None, 1, 0, False)
GOLD_SALT = b"g" * 16
SEVERAL = replace(ONE, votes=7)


def salt(annotator: bytes) -> bytes:
    return annotator[:16]


def held(record: Any) -> Any:
    assert record is not None
    return record


class Room(World):
    def __init__(self) -> None:
        self.module = CurationModule()
        super().__init__(modules=(self.module,))
        self.now = self.state.time_ms
        self.decide(*(self.tx(peer, "member/register", RegisterRoles(("annotator",))) for peer in (PEER, OTHER)))

    @property
    def curation(self) -> CurationState:
        return self.state.module_state(CurationState)

    def later(self, ms: int, batches: int = 0) -> None:
        """Advance the time of the next block by `ms`. The state has this time only after that block."""
        self.now += ms
        for _ in range(batches):
            self.batch()

    def decide_body(self, body: bytes) -> Any:
        before = self.state
        transition = compute_transition(self.rules, before, before.height + 1, self.now, before.state_root, decode_body(body))
        self.ledger.advance_state(transition.finish_state({}), before.state_root)
        return self.state

    def say(self, who: FastSigner, kind: str, content: Any) -> CurationState:
        self.decide(self.tx(who, kind, content))
        return self.curation

    def batch(self, peer: FastSigner = PEER, **statements: Any) -> CurationState:
        return self.say(peer, "curation/statements", StatementBatch(**{name: tuple(items) for name, items in statements.items()}))

    # Projects

    def project(
        self, asked: ProjectSpec = ONE, tasks: int = 3, author: FastSigner = AUTHOR, gold: Mapping[int, Answer] = {}
    ) -> bytes:
        self.decide(self.tx(author, "curation/create-project", CreateProject(asked)))
        key = project_id(author.public, self.nonce(author))
        for first in range(0, tasks, PAGE_TASKS_MAX):
            count = min(tasks - first, PAGE_TASKS_MAX)
            self.page(key, count, author, {number - first: answer for number, answer in gold.items() if number < first + count})
        return key

    def page(self, project: bytes, tasks: int, author: FastSigner = AUTHOR, gold: Mapping[int, Answer] = {}) -> None:
        page = TaskPageBlob(
            tuple(PageEntry(bytes([number % 256]) * 16, AnnotationTask(f"text {number}")) for number in range(tasks))
        )
        root = merkle.merkle_root(gold_leaves(tasks, gold)) if gold else None
        self.say(author, "curation/add-page", AddTaskPage(project, bytes(32), 100, page_merkle_root(page), tasks, root))

    def row(self, project: bytes) -> Project:
        return held(self.curation.projects.get_record(project))

    def task(self, assignment: bytes) -> TaskRow:
        row = self.assignment(assignment)
        return held(self.curation.tasks.get_record(task_id(row.project, row.number)))

    # Annotators

    def signed(self, who: FastSigner, statement: Any) -> bytes:
        return who.sign(signing_preimage(statement.TAG, self.chain, codec.encode(statement)))

    def enrolment(self, who: FastSigner, peer: FastSigner = PEER, name: str = "ann") -> EnrolmentEntry:
        return EnrolmentEntry(who.public, name, False, self.signed(who, EnrolStatement(name, peer.public, False)))

    def wish(self, who: FastSigner, count: int = 1, peer: FastSigner = PEER, expires_ms: int = FAR_MS) -> LeaseRequest:
        return LeaseRequest(
            who.public, NONCE, expires_ms, self.signed(who, SessionStatement(peer.public, NONCE, expires_ms)), count
        )

    def commit(self, who: FastSigner, assignment: bytes, answer: Answer) -> AnswerCommitment:
        digest = answer_commitment(assignment, salt(who.public), answer)
        return AnswerCommitment(assignment, who.public, digest, self.signed(who, AnnotationStatement(assignment, digest)))

    def opening(self, who: FastSigner, assignment: bytes, answer: Answer) -> AnswerOpening:
        return AnswerOpening(assignment, salt(who.public), answer)

    def person(self, who: FastSigner) -> Annotator:
        return held(self.curation.annotators.get_record(who.public))

    def assignment(self, key: bytes) -> Assignment:
        return held(self.curation.assignments.get_record(key))

    def leased(self, *people: FastSigner, count: int = 1) -> list[tuple[bytes, ...]]:
        """Request leases for these people, enrol them first if necessary, and return the leases that each then has."""
        new = [who for who in people if self.curation.annotators.get_record(who.public) is None]
        self.batch(enrolments=[self.enrolment(who) for who in new], leases=[self.wish(who, count) for who in people])
        return [self.person(who).leases for who in people]

    def answered(self, answers: Sequence[tuple[FastSigner, bytes, Answer]]) -> None:
        """Commit the answers in one batch, and open them in the next."""
        self.batch(commits=[self.commit(*answer) for answer in answers])
        self.batch(openings=[self.opening(*answer) for answer in answers])

    def worked(self, people: Sequence[FastSigner], says: Callable[[int, int], Answer]) -> None:
        """Lease and answer until nobody gets a task. `says(person, task)` maps two numbers to the answer."""
        draw, order = Random(0), list(enumerate(people))  # shuffled, or the same two people would meet each time
        while any(leases := self.leased(*(who for _, who in order), count=4)):
            self.answered(
                [
                    (who, lease, says(place, self.assignment(lease).number))
                    for (place, who), mine in zip(order, leases, strict=True)
                    for lease in mine
                ]
            )
            draw.shuffle(order)

    def worked_once(self, who: FastSigner, most: int, says: Callable[[int], Answer]) -> None:
        """Let one person answer up to `most` tasks."""
        while most > 0 and (mine := self.leased(who, count=min(most, LEASES_MAX))[0]):
            self.answered([(who, lease, says(self.assignment(lease).number)) for lease in mine])
            most -= len(mine)

    def closed(self, project: bytes) -> int:
        """Close the project, run batches until the close is done, and return the number of batches."""
        self.say(AUTHOR, "curation/set-phase", SetProjectPhase(project, ProjectPhase.CLOSED))
        self.later(OPENING_MS, batches=1)
        batches = 0
        while project in self.curation.closing:
            self.batch()
            batches += 1
        return batches

    def refused(self, who: FastSigner, kind: str, content: Any) -> str:
        try:
            self.rules.apply_transaction(self.state, self.tx(who, kind, content))
        except (Refused, RemoteProtocolError) as error:
            return str(error)
        return ""


def gold_leaves(tasks: int, gold: Mapping[int, Answer]) -> list[bytes]:
    """Return the leaves of one page. Leaves of tasks without gold look alike, and are the hash of no known bytes."""
    return [gold_leaf(GOLD_SALT, gold[number]) if number in gold else bytes([number]) * 32 for number in range(tasks)]


def gold_answers(tasks: int, gold: Mapping[int, Answer]) -> tuple[GoldAnswerProof, ...]:
    leaves = gold_leaves(tasks, gold)
    return tuple(
        GoldAnswerProof(number, answer, GOLD_SALT, tuple(merkle.merkle_proof(leaves, number))) for number, answer in gold.items()
    )


def annotators(count: int) -> list[FastSigner]:
    return [FastSigner(f"annotator {number}") for number in range(count)]
