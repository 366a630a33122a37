"""Calls of annotators and their programs at a serving peer, answered from the decided state.

A call changes nothing itself. It puts a statement into the next batch, waits for the decision, and returns the resulting state.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar, Final

import trio

from curation.ledger.curation_module import serving_peers
from curation.ledger.curation_state import Assignment, AssignmentState, CurationState, Project, TaskPageRow
from curation.ledger.state_changes import CurationChanges
from curation.ledger.transaction_types import AnnotationStatement, AnswerOpening, LeaseRequest, ReleaseAssignment, SkipAssignment
from curation.limits import GUIDELINES_BYTES_MAX, LEASES_MAX, REASON_CHARACTERS_MAX, SALT_BYTES
from curation.service.access_control import AccessControl
from curation.service.annotators.answer_openings import AnswerOpenings, UnopenedAnswer, is_commitment_possible
from curation.service.annotators.session_api import AnnotatorSession, SessionApi
from curation.service.annotators.statement_batcher import DECISION_WAIT_SECONDS, StatementBatcher
from curation.service.project_tasks import PageFetcher, project_pages, read_task_page
from curation.service.rate_limits import HostRateLimiter
from curation.tasks.answers import answer_commitment, answer_problem
from curation.tasks.task_pages import AnnotationTask, TaskPageBlob, task_id
from features.services import ServiceContext
from ledger.members import MembersState
from protocol import codec
from protocol.codec import Count, Digest
from protocol.errors import FolkmootError
from protocol.identity import derive_secret
from web.calls import HttpProblem, Json, TextReply

# longest time between heartbeats of a lease: pages send one in 15 seconds, and a lease without them ends in a minute
HEARTBEAT_SECONDS_MAX: Final = 45.0
LEASE_WAIT_SECONDS: Final = 3.0  # longest wait of an HTTP call for a task
ANSWERS_PER_MINUTE: Final = 60
# Leases that an annotator can give back at once. A lease given back leaves an entry in the state for ten minutes, and its task
# may be drawn again.
GIVE_BACK_BURST: Final = 32
GIVE_BACK_INTERVAL_SECONDS: Final = 2.0  # seconds until the annotator may give back one more lease
PAGES_OPEN_MAX: Final = 64  # decoded pages of tasks in memory: a decoded text may take four times its bytes
PAGES_OPEN_BYTES_MAX: Final = 8 << 20
EMPTY_BATCH_DELAY_SECONDS: Final = 1.0
SALT_DOMAIN: Final = "custodial-salt"


class LeaseHeartbeats:
    """Time of the last heartbeat of each lease, in seconds of the caller's clock. The ledger limits the number of leases."""

    def __init__(self) -> None:
        self._last: dict[bytes, float] = {}  # time by assignment, in order of time

    def record_heartbeats(self, assignments: Iterable[bytes], now: float) -> None:
        for assignment in assignments:
            self._last.pop(assignment, None)
            self._last[assignment] = now

    def __contains__(self, assignment: bytes) -> bool:
        return assignment in self._last

    def pop_lapsed(self, now: float) -> list[bytes]:
        """Remove and return the assignments whose last heartbeat is HEARTBEAT_SECONDS_MAX or longer ago."""
        found = [assignment for assignment, last in self._last.items() if now - last >= HEARTBEAT_SECONDS_MAX]
        for assignment in found:
            del self._last[assignment]
        return found

    def seconds_left(self, now: float) -> float:
        """Return the seconds until the next lease may lapse.

        It is at most HEARTBEAT_SECONDS_MAX, because a heartbeat does not wake the caller.
        """
        return next((max(0.0, last + HEARTBEAT_SECONDS_MAX - now) for last in self._last.values()), HEARTBEAT_SECONDS_MAX)


@dataclass(frozen=True, slots=True)
class AnnotationReceipt:
    """This peer's signed statement that a block has decided an annotation. The annotator can show the receipt to others."""

    TAG: ClassVar[str] = "annotation-receipt"
    annotation: Digest
    commitment: Digest
    height: Count


class AnnotatorApi:
    def __init__(
        self,
        desk: ServiceContext,
        doors: AccessControl,
        fetching: PageFetcher,
        sessions: SessionApi,
        gatherer: StatementBatcher,
    ) -> None:
        self._desk, self._doors, self._fetching, self._sessions, self._gatherer = desk, doors, fetching, sessions, gatherer
        self._openings = AnswerOpenings(desk, gatherer)
        self._returns = HostRateLimiter(GIVE_BACK_BURST, GIVE_BACK_INTERVAL_SECONDS)  # rate of leases given back, by annotator
        self._heartbeats = LeaseHeartbeats()
        self._pages: OrderedDict[bytes, tuple[TaskPageBlob, int]] = OrderedDict()  # decoded page and its size in bytes, by digest
        self._answered: OrderedDict[bytes, deque[float]] = OrderedDict()  # times of each annotator's answers in the last minute

    @property
    def _state(self) -> CurationState:
        return self._desk.state.module_state(CurationState)

    async def run_openings_and_expiry(self) -> None:
        """Open answers as soon as all requested votes are committed. Request a batch when an entry of the ledger has expired."""
        while True:
            height, state = self._desk.height, self._state
            await self._openings.process_due_openings(state, self._sessions.now_ms)
            for assignment in self._heartbeats.pop_lapsed(trio.current_time()):  # leases whose pages send no more heartbeats
                row = state.assignments.get_record(assignment)
                is_leased = row is not None and row.state is AssignmentState.LEASED
                if is_leased and self._openings.pending_commitment(assignment) is None:
                    self._gatherer.add_statement(ReleaseAssignment(assignment))
            lapse = self._heartbeats.seconds_left(trio.current_time())
            seconds = 1.0 if self._openings.asked else max(1.0, min(lapse, self._seconds_to_expiry()))
            with trio.move_on_after(seconds):
                await self._desk.wait_for_block_above(height)
            if self._seconds_to_expiry() <= -self._nudge_seconds:
                self._gatherer.request_empty_batch()

    @property
    def _nudge_seconds(self) -> float:
        """Seconds after an expiry until this peer sends an empty batch.

        A batch with statements, or of another peer, may come earlier.
        """
        peers = serving_peers(self._desk.state.module_state(MembersState))
        return EMPTY_BATCH_DELAY_SECONDS * (1 + peers.index(self._desk.me)) if self._desk.me in peers else math.inf

    def _seconds_to_expiry(self) -> float:
        """Return the seconds until a batch is needed, because a lease, an opening or an enrolment expires or a project closes."""
        at_ms = CurationChanges(self._state, b"").next_expiry_ms()
        return 3_600.0 if at_ms is None else (at_ms - self._sessions.now_ms) / 1_000

    # Calls -----------------------------------------------------------------------------------------------------------

    async def lease_tasks(self, session: AnnotatorSession, limit: int, project: bytes) -> Json:
        """Return an annotator's leased tasks of one project, or of all, and lease new tasks up to `limit`."""
        if self._doors.is_refused(session.key):
            raise HttpProblem(
                "forbidden", "this peer's operator has blocked you from new tasks; answers already given still count"
            )
        deadline = trio.current_time() + LEASE_WAIT_SECONDS
        wished = False
        while True:
            height, state = self._desk.height, self._state
            if project and project not in state.open:
                raise HttpProblem(
                    "not-found", f"no open project has the id {project.hex()}: omit `project` to get tasks of all projects"
                )
            held = self._sessions.find_annotator(state, session.key).leases
            leases = self._answerable(state, held)
            shown = list(islice(self._shown(state, [lease for lease in leases if project in (b"", lease[1].project)]), limit))
            room = LEASES_MAX - len(held)
            lacks = min(limit - len(shown), room)
            if project:
                others = [lease for lease in leases if lease[1].project != project]
                returning = sum(self._gatherer.pending_release(lease) is not None for lease in held)
                self._release_idle(session.key, others, limit - len(shown) - room - returning)
            without = self._fetching.projects_without_pages
            if (
                lacks > 0
                and not wished
                and CurationChanges(state, self._desk.state_root).has_task_to_draw(session.key, without, project or None)
            ):
                self._gatherer.require_room()
                wish = LeaseRequest(
                    session.key, session.nonce, session.expires_ms, session.signature, lacks, without, project or None
                )
                done, wished = self._gatherer.add_statement(wish), True
                with trio.move_on_at(deadline):
                    await done.wait()
                continue
            if shown or trio.current_time() >= deadline:
                return {"tasks": shown}
            with trio.move_on_at(deadline):
                await self._desk.wait_for_block_above(height)

    def _release_idle(self, annotator: bytes, leases: Sequence[tuple[bytes, Assignment]], count: int) -> None:
        """Release at most `count` of the leases `leases`, among those without a heartbeat and without an answer."""
        idle = [
            key
            for key, row in leases
            if row.state is AssignmentState.LEASED and self._sessions.is_here(row.peer) and key not in self._heartbeats
        ]
        for assignment in [key for key in idle if self._openings.pending_commitment(key) is None][: max(0, count)]:
            if self._gatherer.is_full or self._returns.try_take(annotator.hex()):
                return
            self._gatherer.add_statement(ReleaseAssignment(assignment))

    async def heartbeat(self, session: AnnotatorSession, assignments: tuple[bytes, ...]) -> Json:
        state = self._state
        leases = self._sessions.find_annotator(state, session.key).leases
        held = [key for key in assignments if key in leases and self._sessions.is_here(state.assignments[key].peer)]
        self._heartbeats.record_heartbeats(held, trio.current_time())
        return {"assignments": [key.hex() for key in held]}

    def _answerable(self, state: CurationState, leases: Sequence[bytes]) -> list[tuple[bytes, Assignment]]:
        """Return the leases that can be answered: their project is not closed, the task is begun, and no release is pending."""
        rows = ((lease, state.assignments[lease]) for lease in leases if self._gatherer.pending_release(lease) is None)
        return [(lease, row) for lease, row in rows if is_commitment_possible(state, row)]

    def _shown(self, state: CurationState, leases: Sequence[tuple[bytes, Assignment]]) -> Iterator[Json]:
        for assignment, row in leases:
            project = state.projects[row.project]
            task = self._text(state, project, row)
            if task is None:
                continue  # This peer lacks the page of this task.
            asked = project.spec
            body: Json = {
                "assignment": assignment.hex(),
                "task": task_id(row.project, row.number).hex(),
                "project": row.project.hex(),
                "name": asked.name,
                "kind": asked.kind.value,
            }
            if task.items:
                body["items"] = list(task.items)
            if task.text or not task.items:
                body["text"] = task.text
            body |= {"options": list(asked.options), "many": asked.many, "display": asked.display.value}
            if asked.guidelines is not None:
                body["guidelines"] = f"/api/v1/projects/{row.project.hex()}/guidelines"
            if asked.suggests_first and task.suggestion is not None:
                body["suggestion"] = list(task.suggestion)
            yield body

    def _text(self, state: CurationState, project: Project, row: Assignment) -> AnnotationTask | None:
        for page in project_pages(state, row.project, project):
            if page.first <= row.number < page.first + page.count:
                known = self._page(project, page)
                return known.entries[row.number - page.first].task if known else None
        return None

    def _page(self, project: Project, page: TaskPageRow) -> TaskPageBlob | None:
        """Return a decoded page, or None if this peer lacks the page. The most recently used pages stay in memory."""
        if page.digest not in self._pages:
            found = read_task_page(project, page, self._desk.read_blob)
            if found is None:
                return None
            self._pages[page.digest] = found, page.bytes
            while len(self._pages) > PAGES_OPEN_MAX or sum(size for _, size in self._pages.values()) > PAGES_OPEN_BYTES_MAX:
                self._pages.popitem(last=False)
        self._pages.move_to_end(page.digest)
        return self._pages[page.digest][0]

    async def submit_answer(
        self,
        session: AnnotatorSession,
        assignment: bytes,
        answer: tuple[int, ...],
        salt: bytes | None,
        signature: bytes | None,
    ) -> tuple[int, Json]:
        if (leaving := self._gatherer.pending_release(assignment)) is not None:
            # An answer after a release is accepted as long as the task has a free place.
            await self._gatherer.wait_for_decision(leaving)
        state = self._state
        row = self._mine(state, session, assignment)
        asked = state.projects[row.project].spec
        if problem := answer_problem(asked.kind, len(asked.options), asked.many, asked.items, answer):
            raise HttpProblem("misfit", f"{list(answer)} is not a valid answer to this task: {problem}")
        if salt is None or signature is None:
            salt, signature = self._signed_here(session, assignment, answer)
        said = answer_commitment(assignment, salt, answer)
        self._sessions.require_signature(session.key, AnnotationStatement(assignment, said), signature)
        if row.commitment is not None:
            if row.commitment != said:
                raise HttpProblem("already-answered", "you have already given another answer to this task")
            return 200, self._receipt(state, row, assignment)
        if row.state is AssignmentState.SKIPPED:
            raise HttpProblem("gone", "you have skipped this task")
        if not is_commitment_possible(state, row):
            raise HttpProblem("gone", "this task was given to another annotator, or is not open any more")
        pending = self._openings.pending_commitment(assignment)
        if pending is not None and pending.commitment != said:
            raise HttpProblem("already-answered", "another answer of yours to this task is already being recorded")
        if pending is None:
            self._gatherer.require_room()
            self._count_answer(session.key)
            pending = await self._openings.commit_answer(UnopenedAnswer(assignment, salt, answer, signature))
            task = state.tasks[task_id(row.project, row.number)]
            # With the last requested vote, the answer may be opened in the same batch.
            if task.committed + 1 == task.votes_asked:
                self._gatherer.add_statement(AnswerOpening(assignment, salt, answer))
        with trio.move_on_after(DECISION_WAIT_SECONDS):
            await pending.done.wait()
            after = self._state.assignments[assignment]
            if after.commitment == said:
                return 201, self._receipt(self._state, after, assignment)
            self._openings.forget_answer(assignment)
            raise HttpProblem("gone", "the reservation of this task expired before the answer was recorded")
        return 202, {"annotation": assignment.hex()}

    def _signed_here(self, session: AnnotatorSession, assignment: bytes, answer: tuple[int, ...]) -> tuple[bytes, bytes]:
        """Return the salt of a custodial annotator's answer and the signature.

        The salt is derived from the annotator's key: it is secret, and the same when the call is repeated.
        """
        if session.identity is None:
            raise HttpProblem(
                "malformed", "an answer needs `salt` and `signature`: this peer signs only for custodial annotators"
            )
        salt = derive_secret(session.identity, SALT_DOMAIN, self._desk.chain_id, assignment)[:SALT_BYTES]
        return salt, self._sessions.sign_statement(
            session.identity, AnnotationStatement(assignment, answer_commitment(assignment, salt, answer))
        )

    async def skip_task(self, session: AnnotatorSession, assignment: bytes, reason: str) -> Json:
        if len(reason) > REASON_CHARACTERS_MAX:
            raise HttpProblem("misfit", f"the reason is longer than {REASON_CHARACTERS_MAX} characters")
        return await self._give_back(session, SkipAssignment(assignment, reason), AssignmentState.SKIPPED)

    async def release_task(self, session: AnnotatorSession, assignment: bytes) -> Json:
        return await self._give_back(session, ReleaseAssignment(assignment), AssignmentState.RELEASED)

    async def _give_back(
        self, session: AnnotatorSession, statement: SkipAssignment | ReleaseAssignment, after: AssignmentState
    ) -> Json:
        assignment = statement.assignment
        row = self._mine(self._state, session, assignment)
        if row.state is not after:
            if row.state is not AssignmentState.LEASED:
                raise HttpProblem("gone", f"this assignment is {row.state.value}")
            if self._openings.pending_commitment(assignment) is not None:
                raise HttpProblem("already-answered", "your answer to this task is being recorded")
            if not self._sessions.is_here(row.peer):
                raise HttpProblem("forbidden", "this task was reserved at another peer: return it there")
            self._gatherer.require_room()
            if wait := self._returns.try_take(row.annotator.hex()):
                raise HttpProblem("too-many", f"more than {GIVE_BACK_BURST} tasks returned at once: wait a moment", wait)
            await self._gatherer.wait_for_decision(self._gatherer.add_statement(statement))
            row = self._mine(self._state, session, assignment)
            if row.state is not after:
                raise HttpProblem("gone", f"this assignment is {row.state.value}")
        return {"assignment": assignment.hex(), "state": after.value}

    async def annotation_status(self, annotation: bytes) -> Json:
        state = self._state
        row = state.assignments.get_record(annotation)
        if row is None or row.commitment is None:
            raise HttpProblem("not-found", "no decided annotation has this id")
        task = state.tasks[task_id(row.project, row.number)]
        return {
            "annotation": annotation.hex(),
            "state": row.state.value,
            "height": row.height,
            "label": None if task.label is None else list(task.label),
        }

    async def guidelines(self, project: bytes) -> TextReply:
        found = self._state.projects.get_record(project)
        if found is None or found.spec.guidelines is None:
            raise HttpProblem("not-found", "unknown project, or it has no guidelines")
        try:
            text = self._desk.read_blob(found.spec.guidelines, GUIDELINES_BYTES_MAX)
        except FolkmootError:
            raise HttpProblem("not-found", "this peer does not have the guidelines yet: try again later") from None
        return TextReply("text/plain", text.decode("utf-8", "replace"))

    # Looking up ------------------------------------------------------------------------------------------------------

    def _mine(self, state: CurationState, session: AnnotatorSession, assignment: bytes) -> Assignment:
        row = state.assignments.get_record(assignment)
        if row is None:
            raise HttpProblem("not-found", "unknown assignment")
        if row.annotator != session.key:
            raise HttpProblem("forbidden", "this task is assigned to another annotator")
        return row

    def _receipt(self, state: CurationState, row: Assignment, assignment: bytes) -> Json:
        """Return the reply to a decided answer: a receipt, and the model's suggestion if the page has not shown it."""
        assert row.commitment is not None
        receipt = self._desk.sign(AnnotationReceipt(assignment, row.commitment, row.height))
        body: Json = {"annotation": assignment.hex(), "height": row.height, "receipt": codec.encode(receipt).hex()}
        project = state.projects[row.project]
        task = None if project.spec.suggests_first else self._text(state, project, row)
        if task is not None and task.suggestion is not None:
            body["suggestion"] = list(task.suggestion)
        return body

    def _count_answer(self, key: bytes) -> None:
        """Count an annotator's answer, over all its sessions. Raises `HttpProblem` above ANSWERS_PER_MINUTE."""
        now = trio.current_time()
        while self._answered and next(iter(self._answered.values()))[-1] <= now - 60:
            self._answered.popitem(last=False)
        answered = self._answered.setdefault(key, deque())
        while answered and answered[0] <= now - 60:
            answered.popleft()
        if len(answered) >= ANSWERS_PER_MINUTE:
            wait = 1 + int(answered[0] + 60 - now)
            raise HttpProblem("too-many", f"more than {ANSWERS_PER_MINUTE} answers in a minute: wait a moment", wait)
        answered.append(now)
        self._answered.move_to_end(key)
