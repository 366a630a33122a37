"""Bugs in decisions about annotators: votes, places, lists, labels, points."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import curation.ledger.curation_module
import curation.ledger.project_close
import curation.ledger.redaction
from consensus.voter_set import VoterSet
from curation.estimation import reputation
from curation.ledger.curation_module import CurationModule
from curation.ledger.curation_state import AssignmentState, ProjectPhase, TaskStage
from curation.ledger.project_close import ProjectEstimate, ProjectVotes
from curation.ledger.state_changes import CurationChanges
from curation.ledger.transaction_types import (
    AnnotationStatement,
    AnswerCommitment,
    AnswerOpening,
    EnrolStatement,
    ReleaseAssignment,
)
from curation.tasks.task_pages import assignment_id, task_id
from ledger.core.module import BlockContext, EmbeddedStatement
from ledger.members import MembersState
from tests.sim.crowd import MOODS
from tests.sim.mutants.planting import Mutant, Plant, Planter, everywhere, replaced, wrapped
from tests.sim.mutants.scenarios import Scenario
from tests.sim.simulation import Simulation

CURATES = Scenario(blocks=40, minute_ms=150, jobs=False, work=2.0)
CLOSES = Scenario(blocks=90, minute_ms=150, jobs=False, work=2.0)

# Statements ----------------------------------------------------------------------------------------------------------


def _unsigned(kind: type) -> Plant:
    def statements(real: Any, self: CurationModule, author: bytes, content: object) -> list[EmbeddedStatement]:
        return [statement for statement in real(self, author, content) if not isinstance(statement.message, kind)]

    return wrapped(CurationModule, "embedded_statements", statements)


def _of_committed(act: Any) -> Plant:
    """Plant: call `act` at a second commitment for an assignment."""

    def commit(real: Any, self: Any, work: CurationChanges, said: AnswerCommitment, peer: bytes, context: BlockContext) -> None:
        row = work.assignments.get_record(said.assignment)
        if row is not None and row.state is AssignmentState.COMMITTED:
            act(work, row, said)
        else:
            real(self, work, said, peer, context)

    return wrapped(CurationModule, "_commit", commit)


@_of_committed
def _commitment_replaced(work: CurationChanges, row: Any, said: AnswerCommitment) -> None:
    work.assignments[said.assignment] = replace(row, commitment=said.commitment)


@_of_committed
def _replay_counts(work: CurationChanges, row: Any, said: AnswerCommitment) -> None:
    if said.commitment == row.commitment:
        person = work.annotators[row.annotator]
        work.annotators[row.annotator] = replace(person, annotations=person.annotations + 1)
        work.add_to_field("annotations")


@partial(wrapped, CurationModule, "_commit")
def _closed_takes_votes(
    real: Any, self: CurationModule, work: CurationChanges, said: AnswerCommitment, peer: bytes, context: BlockContext
) -> None:
    row = work.assignments.get_record(said.assignment)
    phase = work.projects[row.project].phase if row is not None else None
    if row is not None and phase is ProjectPhase.CLOSED:
        work.projects[row.project] = replace(work.projects[row.project], phase=ProjectPhase.OPEN)
    try:
        real(self, work, said, peer, context)
    finally:
        if row is not None and phase is ProjectPhase.CLOSED:
            work.projects[row.project] = replace(work.projects[row.project], phase=ProjectPhase.CLOSED)


@partial(wrapped, CurationModule, "_commit")
def _all_are_blind(
    real: Any, self: CurationModule, work: CurationChanges, said: AnswerCommitment, peer: bytes, context: BlockContext
) -> None:
    real(self, work, said, peer, context)
    work.assignments[said.assignment] = replace(work.assignments[said.assignment], is_blind=True)


@partial(wrapped, CurationModule, "_commit")
def _seals_dropped(
    real: Any, self: CurationModule, work: CurationChanges, said: AnswerCommitment, peer: bytes, context: BlockContext
) -> None:
    """Plant: only the peer that carried a vote can open it."""
    real(self, work, replace(said, seals=()), peer, context)


@partial(wrapped, CurationChanges, "release_place")
def _seals_kept(real: Any, self: CurationChanges, assignment: bytes, state: AssignmentState) -> None:
    """Plant: a forfeited vote can still be read by the peers for which its answer is sealed."""
    seals = self.assignments[assignment].seals
    real(self, assignment, state)
    self.assignments[assignment] = replace(self.assignments[assignment], seals=seals)


@partial(wrapped, curation.ledger.curation_module, "_open")
def _opened_early(real: Any, work: CurationChanges, said: AnswerOpening, peer: bytes, context: BlockContext) -> None:
    row = work.assignments.get_record(said.assignment)
    task = task_id(row.project, row.number) if row is not None and row.state is AssignmentState.COMMITTED else None
    if task is None or work.tasks[task].stage is not TaskStage.BEGUN:
        return real(work, said, peer, context)
    work.tasks[task] = replace(work.tasks[task], stage=TaskStage.OPENING)
    try:
        return real(work, said, peer, context)
    finally:
        work.tasks[task] = replace(work.tasks[task], stage=TaskStage.BEGUN)


class _Whatever:
    def __ne__(self, other: object) -> bool:
        return False


def _remembered_too_long(planter: Planter) -> None:
    """Plant: the effect of a batch on one state is reused for every other state."""
    real, done = CurationModule.apply_transaction, dict[Any, Any]()

    def apply(self: CurationModule, state: Any, said: Any, view: Any, context: BlockContext) -> Any:
        key = (id(self), said.transaction)
        done[key] = done.get(key) or real(self, state, said, view, context)
        return done[key]

    planter.replace(CurationModule, "apply_transaction", apply)


class _OneIsEnough(VoterSet):
    quorum, faults_tolerated = 1, 0  # type: ignore[assignment]


@partial(wrapped, CurationChanges, "redact_task")
def _redacted_is_drawn(real: Any, self: CurationChanges, project: bytes, number: int) -> None:
    stage = (self.tasks.get_record(task_id(project, number)) or self.new_task_row(project, number)).stage
    real(self, project, number)
    if stage is TaskStage.BEGUN:
        self.tasks[task_id(project, number)] = replace(self.tasks[task_id(project, number)], stage=stage)


# Places and lists ----------------------------------------------------------------------------------------------------


def _keeps_place(of: AssignmentState) -> Plant:
    def give_back(real: Any, self: CurationChanges, assignment: bytes, state: AssignmentState) -> None:
        if state is of:
            row = self.assignments[assignment]
            task = task_id(row.project, row.number)
            self.tasks[task] = replace(self.tasks[task], places_taken=self.tasks[task].places_taken + 1)
        real(self, assignment, state)

    return wrapped(CurationChanges, "release_place", give_back)


@partial(replaced, curation.ledger.curation_module, "_release")
def _anybody_releases(work: CurationChanges, said: ReleaseAssignment, peer: bytes, members: MembersState) -> None:
    row = work.assignments.get_record(said.assignment)
    if row is None or row.state is not AssignmentState.LEASED:
        raise curation.ledger.curation_module.InapplicableStatement("unknown lease")
    work.release_place(said.assignment, AssignmentState.RELEASED)


@partial(wrapped, CurationChanges, "_is_released")
def _expired_is_drawn(real: Any, self: CurationChanges, task: bytes, annotator: bytes) -> bool:
    """Plant: an annotator gets an expired task again, as if its lease had been released."""
    assignment = self.assignments.get_record(assignment_id(task, annotator))
    return real(self, task, annotator) or (assignment is not None and assignment.state is AssignmentState.EXPIRED)


@partial(wrapped, CurationChanges, "_is_released")
def _leased_twice(real: Any, self: CurationChanges, task: bytes, annotator: bytes) -> bool:
    """Plant: an annotator gets the same task twice at once."""
    assignment = assignment_id(task, annotator)
    if (row := self.assignments.get_record(assignment)) is not None and row.state is AssignmentState.LEASED:
        self.release_place(assignment, AssignmentState.RELEASED)
    return real(self, task, annotator)


@partial(wrapped, CurationChanges, "forfeit_vote")
def _forfeit_costs(real: Any, self: CurationChanges, assignment: bytes) -> None:
    real(self, assignment)
    person = self.annotators[self.assignments[assignment].annotator]
    self.annotators[self.assignments[assignment].annotator] = replace(person, accepted=max(0, person.accepted - 1))


@partial(replaced, CurationChanges, "_draw_begun")
def _drawn_again(self: CurationChanges, project: bytes, annotator: bytes) -> bytes | None:
    row = self.projects[project]
    return task_id(project, self._number_at(project, b"b", 0)) if row.begun else None


@partial(wrapped, CurationChanges, "_draw_fresh")
def _fresh_twice(real: Any, self: CurationChanges, project: bytes, annotator: bytes) -> bytes | None:
    """Plant: the first element of the list is not moved to the place of the drawn one."""
    before = dict(self.places.changes)
    task = real(self, project, annotator)
    self.places.changes = before
    return task


@partial(wrapped, CurationChanges, "update_task_index")
def _full_is_listed(real: Any, self: CurationChanges, task: bytes) -> None:
    if self.tasks[task].index_slot is None or self.tasks[task].stage is not TaskStage.BEGUN:
        real(self, task)


@partial(wrapped, CurationChanges, "enqueue_expiry")
def _forgotten_lease(real: Any, self: CurationChanges, name: str, assignment: bytes, at_ms: int) -> None:
    if assignment[0] >= 64:
        real(self, name, assignment, at_ms)


# Labels and points ---------------------------------------------------------------------------------------------------


@partial(wrapped, curation.ledger.curation_module, "_settle")
def _settled_follows_votes(real: Any, work: CurationChanges, task: bytes, asked: Any, label: Any, context: Any) -> None:
    """Plant: a settled task changes labels of earlier tasks that one of its annotators answered otherwise."""
    real(work, task, asked, label, context)
    row = work.tasks[task]
    for number in range(row.number):
        other = task_id(row.project, number)
        found = work.tasks.get_record(other)
        if found is not None and found.stage is TaskStage.SETTLED and not set(found.annotators).isdisjoint(row.annotators):
            curation.ledger.project_close._relabel(work, other, label, False)


@partial(wrapped, curation.ledger.curation_module, "_settle")
def _label_of_nobody(real: Any, work: CurationChanges, task: bytes, asked: Any, label: Any, context: Any) -> None:
    """Plant: the label counts as accepted for every annotator that opened a vote."""
    real(work, task, asked, label, context)
    for annotator in work.tasks[task].annotators:
        vote = work.assignments[assignment_id(task, annotator)]
        if vote.answer is not None and tuple(vote.answer) != label:
            person = work.annotators[annotator]
            work.annotators[annotator] = replace(person, accepted=person.accepted + 1)


@partial(everywhere, reputation.divide_points)
def _points_from_nothing(points: int, shares: Mapping[bytes, int]) -> dict[bytes, int]:
    total = sum(shares.values()) or 1
    return {key: -(-points * share // total) for key, share in shares.items()}


@partial(wrapped, ProjectEstimate, "divide_points")
def _paid_beside(real: Any, self: ProjectEstimate, of: int) -> dict[bytes, int]:
    """Plant: one point more is divided than the project promised."""
    return real(self, of + 1)


@partial(wrapped, ProjectVotes, "read_votes")
def _votes_by_looks(real: Any, self: ProjectVotes, work: CurationChanges, project: bytes, upto: int) -> None:
    """Plant: votes of a project are read again with each body that is judged, decided or not."""
    self._read = 0
    real(self, work, project, upto)


def _diligent(simulation: Simulation) -> None:
    """Let three annotators do all tasks of long projects, so that their weights are not 0."""
    for peer in simulation.peers:
        desk = peer.author.desk
        assert desk is not None
        desk.people, desk.asks = desk.people[:3], (MOODS,)
        desk.open_at_once, desk.closes_after, desk.is_careful = 1, 30, True


CURATION = (
    Mutant(
        "anybody-serves",
        "who has no such role carries a batch",
        ("curation consent",),
        replaced(curation.ledger.curation_module, "ANNOTATOR_ROLE", "trainer"),
        CURATES,
    ),
    Mutant(
        "annotation-unsigned",
        "a commitment need not be signed by the annotator",
        ("curation consent",),
        _unsigned(AnnotationStatement),
        CURATES,
    ),
    Mutant(
        "enrolment-unsigned",
        "a wish to enrol at one peer enrols at another",
        ("curation consent",),
        _unsigned(EnrolStatement),
        CURATES,
    ),
    Mutant(
        "commitment-replaced",
        "a second commitment takes the first one's place",
        ("curation votes",),
        _commitment_replaced,
        CURATES,
    ),
    Mutant("replay-counts", "a commitment that comes again is counted again", ("curation counts",), _replay_counts, CURATES),
    Mutant("closed-takes-votes", "a closed project takes commitments", ("curation closed",), _closed_takes_votes, CLOSES),
    Mutant("all-are-blind", "who could see an answer counts as one who could not", ("curation votes",), _all_are_blind, CURATES),
    Mutant("seals-dropped", "a vote loses its seals: its peer alone can open it", ("curation seals",), _seals_dropped, CURATES),
    Mutant("seals-kept", "a vote that is forfeited keeps its seals", ("curation seals",), _seals_kept, CURATES),
    Mutant("opened-early", "an opening counts before all votes are committed", ("curation early",), _opened_early, CURATES),
    Mutant(
        "opened-otherwise",
        "an answer counts that was not committed",
        ("curation votes",),
        replaced(curation.ledger.curation_module, "answer_commitment", lambda assignment, salt, answer: _Whatever()),
        CURATES,
    ),
    Mutant(
        "one-stops",
        "one voter stops a project",
        ("curation consent",),
        replaced(curation.ledger.curation_module, "VoterSet", _OneIsEnough),
        CLOSES,
    ),
    Mutant(
        "one-redacts",
        "one voter takes a task's text out",
        ("curation consent",),
        replaced(curation.ledger.redaction, "VoterSet", _OneIsEnough),
        CURATES,
    ),
    Mutant("redacted-goes-on", "a task without a text is asked on", ("curation redacted",), _redacted_is_drawn, CURATES),
    Mutant("remembered-too-long", "a batch acts on a state as it did on another one", ("roots",), _remembered_too_long, CURATES),
    Mutant(
        "expired-keeps-place",
        "the place of a lease that expired is not free",
        ("curation places",),
        _keeps_place(AssignmentState.EXPIRED),
        CURATES,
    ),
    Mutant(
        "forfeit-keeps-place",
        "the place of a vote that nobody opened is not free",
        ("curation places",),
        _keeps_place(AssignmentState.FORFEITED),
        CURATES,
    ),
    Mutant(
        "release-keeps-place",
        "the place of a lease that was released is not free",
        ("curation places",),
        _keeps_place(AssignmentState.RELEASED),
        CURATES,
    ),
    Mutant("anybody-releases", "a peer releases a lease of another", ("curation consent",), _anybody_releases, CURATES),
    Mutant("expired-again", "an annotator gets a task that it let expire", ("curation draws",), _expired_is_drawn, CURATES),
    Mutant("leased-twice", "an annotator gets a task that it has", ("curation draws",), _leased_twice, CURATES),
    Mutant("forfeit-costs", "a forfeit takes an accepted answer away", ("curation counts",), _forfeit_costs, CURATES),
    Mutant("drawn-again", "an annotator gets a task that it has had", ("curation draws",), _drawn_again, CURATES),
    Mutant(
        "project-ignored",
        "a wish for one project takes any",
        ("curation consent",),
        wrapped(CurationChanges, "draw_task", lambda real, self, annotator, without, project: real(self, annotator, without)),
        CURATES,
    ),
    Mutant("fresh-twice", "a task is drawn from the fresh ones twice", ("curation draws",), _fresh_twice, CURATES),
    Mutant(
        "full-is-listed",
        "a task without a free place can be drawn",
        ("curation lists", "curation places"),
        _full_is_listed,
        CURATES,
    ),
    Mutant("lease-forgotten", "some leases are never looked at again", ("curation queues",), _forgotten_lease, CURATES),
    Mutant("settled-follows", "a settled label changes before the close", ("curation labels",), _settled_follows_votes, CURATES),
    Mutant("all-accepted", "a vote that is not the label counts as accepted", ("curation counts",), _label_of_nobody, CLOSES),
    Mutant(
        "points-from-nothing",
        "each share of the points is rounded up",
        ("curation points",),
        _points_from_nothing,
        CLOSES,
        change=_diligent,
    ),
    Mutant(
        "one-point-more",
        "a close pays a point that nobody promised",
        ("curation points",),
        _paid_beside,
        CLOSES,
        change=_diligent,
    ),
    Mutant(
        "votes-by-looks",
        "an estimate depends on how often bodies were judged",
        ("roots",),
        _votes_by_looks,
        CLOSES,
        change=_diligent,
    ),
)
