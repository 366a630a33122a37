"""The ledger module of curation.

A batch is a transaction of a serving peer with annotators' statements. Time alone changes nothing: the first batch of a block
handles expired entries, by the time of the parent block. Then the statements of each batch act. A statement that cannot act is
passed over and counted: another peer may have carried it before, or another annotator may have the place in the task. A task has
one place for each requested vote.

| a task is | event | consequence |
|---|---|---|
| begun | an annotator gets a lease | one of its places is taken |
| begun | a lease expires, is released or is skipped | its place is free; after four skips the task waits for its author |
| begun | the last requested vote is committed | the task is opening: each of its annotators has a minute to open |
| opening | the last requested vote is opened | the label is decided, or another vote is requested, or the author reviews |
| opening | the minute is over | unopened votes are forfeited, their places are free, and the task is begun again |

An annotator without an answer ENROLMENT_MS after its enrolment is removed, and may enrol again. A closed project gives out no
tasks and takes no commitments. A minute later the computation of its results begins, see `project_close`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Final

from consensus.voter_set import VoterSet
from curation.estimation.annotator_agreement import (
    add_coincidences,
    agreement_units,
    alpha_from_table,
    measurement_level,
    value_count,
)
from curation.estimation.online_dawid_skene import LABEL_CONFIDENCE_MIN, estimate_label, updated_counts
from curation.ledger.curation_state import (
    AgreementCounts,
    Annotator,
    AnnotatorSkill,
    Assignment,
    AssignmentState,
    CurationState,
    GoldRow,
    PeerAnnotators,
    Project,
    ProjectCloseProgress,
    ProjectPhase,
    ProjectSpec,
    Redaction,
    TaskPageRow,
    TaskRow,
    TaskStage,
    page_key,
)
from curation.ledger.redaction import apply_redaction, page_replacement
from curation.ledger.state_changes import CurationChanges
from curation.ledger.transaction_types import (
    AddTaskPage,
    AnnotationStatement,
    AnswerCommitment,
    AnswerOpening,
    CreateProject,
    EnrolmentEntry,
    EnrolStatement,
    LeaseRequest,
    ReleaseAssignment,
    RevealGold,
    ReviewTask,
    SessionStatement,
    SetProjectPhase,
    SkipAssignment,
    StatementBatch,
    VoteToStopProject,
)
from curation.limits import (
    ANNOTATORS_MAX,
    BATCH_MAX,
    DRAW_LOOKS_MAX,
    ENROLMENT_MS,
    EXPIRED_PER_BATCH_MAX,
    LEASE_MS,
    LEASES_MAX,
    LOOKS_FOR_DRAW,
    OPENING_MS,
    PAGES_MAX,
    PROJECTS_MAX,
    PROJECTS_OPEN_MAX,
    PROJECTS_UNFINISHED_MAX,
    SESSION_MS_MAX,
)
from curation.tasks.answers import (
    Answer,
    QuestionKind,
    answer_commitment,
    answer_problem,
    gold_leaf,
    items_problem,
    options_problem,
)
from curation.tasks.task_pages import assignment_id, task_id
from ledger.core.genesis import Genesis
from ledger.core.module import (
    BlobReplacement,
    BlockContext,
    DecodedTransaction,
    EmbeddedStatement,
    Module,
    Refused,
    StateChange,
    StateReader,
)
from ledger.members import MembersState
from ledger.network_governance import NetworkState
from protocol import merkle
from protocol.limits import COST_PER_BLOCK_MAX
from protocol.name_validation import name_problem

if TYPE_CHECKING:
    from curation.ledger.project_close import ProjectCloser

ANNOTATOR_ROLE: Final = "annotator"  # the ledger role of a serving peer
DRAWS_FOR_COST: Final = 3  # draws of tasks that cost as much as one signature check
LOOKS_FOR_COST: Final = 6  # begun tasks that draws can try at the cost of one signature check
ANSWERS_FOR_COST: Final = 4  # gold answers that cost as much as one signature check: each has a proof of eight hashes
# cost of an opening in signature checks: a task's last opening computes its label and its annotators' skills
OPENING_COST: Final = 4
CHANGES_MAX: Final = 16  # cached state changes of one height: each serving peer may have a pending batch


COST_OF_STATEMENT_MAX: Final = max(1 + -(-LEASES_MAX // DRAWS_FOR_COST), OPENING_COST)
# cost of DRAW_LOOKS_MAX in signature checks, once per batch with lease requests; the cost of each draw includes LOOKS_FOR_DRAW
COST_OF_LOOKS: Final = -(-DRAW_LOOKS_MAX // LOOKS_FOR_COST)
assert 1 + BATCH_MAX * COST_OF_STATEMENT_MAX + COST_OF_LOOKS <= COST_PER_BLOCK_MAX, "any batch fits into a block"


class InapplicableStatement(Exception):
    """Reason why a statement does not act. The rest of its batch still acts."""


def signed_statement(carrier: bytes, part: EnrolmentEntry | LeaseRequest | AnswerCommitment) -> EmbeddedStatement:
    """Return the statement that the annotator signed for this entry of a batch. `carrier`: the batch's author."""
    match part:
        case EnrolmentEntry():
            said: EnrolStatement | SessionStatement | AnnotationStatement = EnrolStatement(part.name, carrier, part.custodial)
        case LeaseRequest():
            said = SessionStatement(carrier, part.nonce, part.expires_ms)
        case AnswerCommitment():
            said = AnnotationStatement(part.assignment, part.commitment)
    return EmbeddedStatement(part.annotator, said, part.signature)


def project_id(author: bytes, nonce: int) -> bytes:
    """Return the id of the project that an author creates by a transaction with this nonce."""
    return hashlib.sha256(b"folkmoot/project\x00" + author + nonce.to_bytes(8, "big")).digest()


def runs_curation(view: StateReader) -> bool:
    """Return whether this network runs the module. Networks that were founded without this module can add it by an upgrade."""
    return any(module.name == CurationModule.name for module in view.module_state(NetworkState).modules)


def serving_peers(members: MembersState) -> tuple[bytes, ...]:
    """Return the keys of members with the role annotator, in ascending order."""
    return tuple(
        sorted(key for key, member in members.members.items() if ANNOTATOR_ROLE in member.roles and members.is_current_key(key))
    )


class CurationModule(Module[CurationState]):
    name = "curation"
    state_type = CurationState
    contents: ClassVar[Mapping[str, type]] = {
        "curation/create-project": CreateProject,
        "curation/add-page": AddTaskPage,
        "curation/reveal-gold": RevealGold,
        "curation/set-phase": SetProjectPhase,
        "curation/vote-to-stop": VoteToStopProject,
        "curation/review-task": ReviewTask,
        "curation/redact": Redaction,
        "curation/statements": StatementBatch,
    }

    def __init__(self) -> None:
        self._changes: list[tuple[CurationState, tuple[Any, ...], StateChange]] = []

    @cached_property
    def _closer(self) -> ProjectCloser:
        from curation.ledger.project_close import ProjectCloser  # imported late: only closing a project needs numpy

        return ProjectCloser()

    def genesis_state(self, genesis: Genesis) -> CurationState:
        return CurationState()

    def transaction_cost(self, kind: str, content: object) -> int:
        if isinstance(content, RevealGold):
            return len(content.answers) // ANSWERS_FOR_COST
        if not isinstance(content, StatementBatch):
            return 0
        draws = sum(wish.count for wish in content.leases)
        drawing = draws // DRAWS_FOR_COST + COST_OF_LOOKS if draws else 0
        return drawing + OPENING_COST * len(content.openings) + len(content.commits) + len(content.skips) + len(content.releases)

    def embedded_statements(self, author: bytes, content: object) -> Sequence[EmbeddedStatement]:
        if not isinstance(content, StatementBatch):
            return ()
        parts: tuple[EnrolmentEntry | LeaseRequest | AnswerCommitment, ...] = (
            *content.enrolments,
            *content.leases,
            *content.commits,
        )
        return [signed_statement(author, part) for part in parts]

    def apply_transaction(
        self, state: CurationState, said: DecodedTransaction, view: StateReader, context: BlockContext
    ) -> StateChange:
        """Apply a transaction.

        State changes are cached: a peer applies a transaction about four times, mostly to the same state.
        """
        members = view.module_state(MembersState)
        # no transaction of curation depends on the block's facts
        given = (said.author, said.transaction, members, replace(context, facts=()))
        for before, of, change in self._changes:
            if before is state and of == given:
                return change
        work = CurationChanges(
            state, context.certified_roots[max(context.certified_roots)] if context.certified_roots else context.chain_id
        )
        match said.content:
            case CreateProject(asked):
                _found(work, said, members, asked)
            case AddTaskPage():
                _add_page(work, said, members)
            case RevealGold():
                _say_gold(work, said, members, context.time_ms)
            case SetProjectPhase():
                _move(work, said, members, context.time_ms)
            case VoteToStopProject(key):
                _stop(work, said, members, key, context.time_ms)
            case ReviewTask():
                _review(work, said, members, context)
            case Redaction():
                apply_redaction(work, said, members)
            case StatementBatch():
                self._batch(work, said, members, context)
        change = StateChange(work.new_state())
        # changes of other heights are obsolete
        of_height = [known for known in self._changes if known[1][-1].height == context.height]
        self._changes = [*of_height, (state, given, change)][-CHANGES_MAX:]
        return change

    def follow_key_rotations(self, state: CurationState, current: Callable[[bytes], bytes]) -> CurationState:
        """Move a serving peer's number of annotators to its new key.

        Rows that name the old key stay: readers look up the current key.
        """
        rows: dict[bytes, PeerAnnotators | None] = {}
        for old, share in state.shares.items():
            if (new := current(old)) != old:
                # the new key has a row if it enrolled annotators in this block
                other = rows.get(new) or state.shares.get_record(new) or PeerAnnotators(0)
                rows |= {old: None, new: PeerAnnotators(other.annotators + share.annotators)}
        return replace(state, shares=state.shares.with_rows(rows)) if rows else state

    def replaced_blobs(self, state: CurationState, since: int) -> Sequence[BlobReplacement]:
        return [page_replacement(state, place) for place in range(since, state.redacted)]

    def lingers(self, content: object) -> bool:
        """Return True for a batch. It waits briefly for other peers' batches, and for a block that closes a round."""
        return isinstance(content, StatementBatch)

    # Batches ---------------------------------------------------------------------------------------------------------

    def _batch(self, work: CurationChanges, said: DecodedTransaction, members: MembersState, context: BlockContext) -> None:
        batch, peer = said.content, said.author
        if ANNOTATOR_ROLE not in members.members[peer].roles:
            raise Refused(f"only members with the role {ANNOTATOR_ROLE!r} may submit statements of annotators")
        if batch.size > BATCH_MAX:
            raise Refused(f"the batch has {batch.size} statements, more than {BATCH_MAX}")
        if work.state.expired_height != context.height:  # only the block's first batch
            work.changed_fields |= {"expired_height": context.height, "serving_count": len(serving_peers(members))}
            _expire(work, context.time_ms, members)
            if work.closing:
                self._closer.advance_close(work, context.chain_id, context.time_ms)
        work.looks_left = DRAW_LOOKS_MAX + LOOKS_FOR_DRAW * sum(wish.count for wish in batch.leases)

        def act(statements: tuple[object, ...], do: Callable[..., None]) -> None:
            for statement in statements:
                try:
                    do(work, statement, peer, context)
                except InapplicableStatement:
                    work.add_to_field("passed_over")

        act(batch.enrolments, self._enrol)
        wished: set[bytes] = set()
        act(batch.leases, lambda work, wish, peer, context: self._lease(work, wish, peer, context, wished))
        act(batch.commits, self._commit)
        act(batch.openings, _open)
        act(batch.skips, lambda work, skip, peer, context: _skip(work, skip, peer, members))
        act(batch.releases, lambda work, release, peer, context: _release(work, release, peer, members))

    def _enrol(self, work: CurationChanges, wish: EnrolmentEntry, peer: bytes, context: BlockContext) -> None:
        share = work.shares.get_record(peer) or PeerAnnotators(0)
        places = ANNOTATORS_MAX // max(1, work.changed_fields.get("serving_count", work.state.serving_count))
        if work.annotators.get_record(wish.annotator) is not None:
            raise InapplicableStatement("already enrolled")
        if name_problem(wish.name):
            raise InapplicableStatement("the name has characters that a screen may not show")
        if (
            share.annotators >= places
            or work.changed_fields.get("annotators_count", work.state.annotators_count) >= ANNOTATORS_MAX
        ):
            raise InapplicableStatement("this peer cannot enrol more annotators")
        work.annotators[wish.annotator] = Annotator(wish.name, peer, wish.custodial, context.height)
        work.shares[peer] = PeerAnnotators(share.annotators + 1)
        work.add_to_field("annotators_count")
        work.enqueue_expiry("enrolments", wish.annotator, context.time_ms + ENROLMENT_MS)

    def _lease(self, work: CurationChanges, wish: LeaseRequest, peer: bytes, context: BlockContext, wished: set[bytes]) -> None:
        """Lease tasks to an annotator. A batch may contain one lease request per annotator.

        `wished` are the annotators with an earlier request in the batch. A request that finds no free task costs the most time.
        Without the limit of one request, one annotator could fill a batch with 512 such requests.
        """
        person = work.annotators.get_record(wish.annotator)
        if person is None:
            raise InapplicableStatement("not enrolled")
        if not context.time_ms <= wish.expires_ms <= context.time_ms + SESSION_MS_MAX:
            raise InapplicableStatement("the session has expired, or is longer than allowed")
        if wish.annotator in wished:
            raise InapplicableStatement("the batch has another lease request of this annotator")
        wished.add(wish.annotator)
        for _ in range(min(wish.count, LEASES_MAX - len(person.leases))):
            if not work.lease_task(peer, context.time_ms + LEASE_MS, wish):
                break

    def _commit(self, work: CurationChanges, commit: AnswerCommitment, peer: bytes, context: BlockContext) -> None:
        row = work.assignments.get_record(commit.assignment)
        if row is None:
            raise InapplicableStatement("unknown assignment")
        if work.annotators.get_record(row.annotator) is None:
            raise InapplicableStatement("the annotator is not enrolled any more, since it never answered")
        if row.annotator != commit.annotator:
            raise InapplicableStatement("the assignment belongs to another annotator")
        task = task_id(row.project, row.number)
        now = work.tasks[task]
        is_over = row.state in (AssignmentState.EXPIRED, AssignmentState.RELEASED)
        if row.state is not AssignmentState.LEASED and not is_over:
            raise InapplicableStatement(f"the assignment is {row.state.value}")
        if now.stage is not TaskStage.BEGUN:
            raise InapplicableStatement("the task needs no more answers")
        if is_over and now.places_taken == now.votes_asked:
            raise InapplicableStatement("the lease has expired, and another annotator has the task")
        project = work.projects[row.project]
        if project.phase is ProjectPhase.CLOSED:
            raise InapplicableStatement("the project is closed")
        if is_over:
            now = replace(now, places_taken=now.places_taken + 1)
        work.assignments[commit.assignment] = replace(
            row,
            peer=peer,
            state=AssignmentState.COMMITTED,
            commitment=commit.commitment,
            height=context.height,
            time_ms=context.time_ms,
            is_blind=now.opened == 0 and not (project.golds and work.golds.get_record(task)),
            seals=commit.seals,
        )
        work.tasks[task] = replace(now, committed=now.committed + 1)
        work.update_task_index(task)
        work.remove_lease(row.annotator, commit.assignment, committed=1)
        work.add_to_field("annotations")
        if now.committed + 1 == now.votes_asked:
            _ask_for_openings(work, task, context.time_ms)


def _expire(work: CurationChanges, now_ms: int, members: MembersState) -> None:
    for assignment in work.pop_expired("leases", now_ms, EXPIRED_PER_BATCH_MAX):
        row = work.assignments[assignment]
        # The annotator may have released the task and leased it again, so this entry can belong to an earlier lease.
        if row.state is AssignmentState.LEASED and row.deadline_ms <= now_ms:
            work.release_place(assignment, AssignmentState.EXPIRED)
    for assignment in work.pop_expired("openings", now_ms, EXPIRED_PER_BATCH_MAX):
        row = work.assignments[assignment]
        if row.state is AssignmentState.COMMITTED and row.deadline_ms <= now_ms:
            task = task_id(row.project, row.number)
            now = work.tasks[task]
            # a task that waits for its author's review stays there
            stage = TaskStage.BEGUN if now.stage is TaskStage.OPENING else now.stage
            work.tasks[task] = replace(now, stage=stage)
            work.forfeit_vote(assignment)
    for annotator in work.pop_expired("enrolments", now_ms, EXPIRED_PER_BATCH_MAX):
        if not work.annotators[annotator].annotations:
            _unenrol(work, annotator, members)


def _unenrol(work: CurationChanges, annotator: bytes, members: MembersState) -> None:
    """Remove an annotator that never answered. Its leases end, and its serving peer may enrol one more annotator."""
    person = work.annotators[annotator]
    for assignment in person.leases:
        assert work.assignments[assignment].state is AssignmentState.LEASED, "a commitment is an answer"
        work.release_place(assignment, AssignmentState.EXPIRED)
    work.annotators.delete_row(annotator)
    work.add_to_field("annotators_count", -1)
    peer = person.peer
    while (share := work.shares.get_record(peer)) is None:  # After a key rotation, the row is under the peer's new key.
        successor = members.members[peer].successor
        assert successor is not None, "the peer has a row with this place"
        peer = successor
    work.shares[peer] = PeerAnnotators(share.annotators - 1)


def _ask_for_openings(work: CurationChanges, task: bytes, now_ms: int) -> None:
    row = work.tasks[task]
    assert row.committed == row.votes_asked == row.places_taken
    work.tasks[task] = replace(row, stage=TaskStage.OPENING)
    for annotator in row.annotators:
        assignment = assignment_id(task, annotator)
        waiting = work.assignments[assignment]
        if waiting.state is AssignmentState.COMMITTED:
            work.assignments[assignment] = replace(waiting, deadline_ms=now_ms + OPENING_MS)
            work.enqueue_expiry("openings", assignment, now_ms + OPENING_MS)


def _open(work: CurationChanges, opening: AnswerOpening, peer: bytes, context: BlockContext) -> None:
    row = work.assignments.get_record(opening.assignment)
    if row is None or row.state is not AssignmentState.COMMITTED:
        raise InapplicableStatement("no committed answer waits for this opening")
    task = task_id(row.project, row.number)
    now, asked = work.tasks[task], work.projects[row.project].spec
    if now.stage is not TaskStage.OPENING:
        raise InapplicableStatement("not all requested answers are committed")
    if is_closed_for_votes(work, row.project, context.time_ms):
        raise InapplicableStatement("the project is closed")
    answer = tuple(opening.answer)
    if answer_commitment(opening.assignment, opening.salt, answer) != row.commitment:
        raise InapplicableStatement("the annotator committed to another answer")
    if answer_problem(asked.kind, len(asked.options), asked.many, asked.items, answer):
        raise InapplicableStatement("not a valid answer to this task")
    work.assignments[opening.assignment] = replace(row, state=AssignmentState.OPENED, answer=answer, seals=())
    work.tasks[task] = now = replace(now, opened=now.opened + 1)
    if now.opened == now.votes_asked:
        _decide(work, task, asked, context)


def _decide(work: CurationChanges, task: bytes, asked: ProjectSpec, context: BlockContext) -> None:
    """Settle a task whose requested votes are all opened, request one more vote, or send the task to its author."""
    row = work.tasks[task]
    answers = {key: work.assignments[assignment_id(task, key)].answer for key in row.annotators}
    label = _label(work, row, asked, [(key, tuple(answer)) for key, answer in answers.items() if answer is not None])
    if label is not None:
        _settle(work, task, asked, label, context)
    elif row.votes_asked < asked.votes:
        work.tasks[task] = replace(row, votes_asked=row.votes_asked + 1, stage=TaskStage.BEGUN)
        work.update_task_index(task)
    else:
        work.send_to_review(task)


def _label(work: CurationChanges, row: TaskRow, asked: ProjectSpec, votes: list[tuple[bytes, Answer]]) -> Answer | None:
    """Return the most likely label of a task, or None if its probability is below LABEL_CONFIDENCE_MIN."""
    if asked.votes == 1:
        return votes[0][1]
    told = [(_counts(work, row.project, key), answer) for key, answer in votes]
    label, chance = estimate_label(asked.kind, len(asked.options), asked.many, told)
    # Annotators rarely agree on the order of many items. After the last vote, the order of ranked pairs is the label in any case:
    # every majority against it lost to larger majorities.
    is_last_ranking = asked.kind is QuestionKind.RANKING and row.votes_asked >= asked.votes
    return label if chance >= LABEL_CONFIDENCE_MIN or is_last_ranking else None


def _counts(work: CurationChanges, project: bytes, annotator: bytes) -> tuple[int, ...]:
    skill = work.skills.get_record(project + annotator)
    return tuple(skill.counts) if skill else ()


def _settle(work: CurationChanges, task: bytes, asked: ProjectSpec, label: Answer, context: BlockContext) -> None:
    row = work.tasks[task]
    work.tasks[task] = replace(row, stage=TaskStage.SETTLED, label=label, height=context.height, time_ms=context.time_ms)
    project = work.projects[row.project]
    work.projects[row.project] = replace(project, settled=project.settled + 1)
    work.add_to_field("settled")
    answers: list[Answer] = []
    for annotator in row.annotators:
        assignment = assignment_id(task, annotator)
        vote = work.assignments[assignment]
        if vote.answer is None:
            continue
        answer = tuple(vote.answer)
        answers.append(answer)
        work.assignments[assignment] = replace(vote, state=AssignmentState.SETTLED)
        person = work.annotators[annotator]
        work.annotators[annotator] = replace(person, accepted=person.accepted + (answer == label))
        before = _counts(work, row.project, annotator)
        if after := updated_counts(asked.kind, len(asked.options), asked.many, before, label, answer):
            work.skills[row.project + annotator] = AnnotatorSkill(after)
    if len(answers) > 1:
        kind, options = asked.kind, len(asked.options)
        known = work.agreements.get_record(row.project)
        units, lowest = agreement_units(kind, options, asked.many, answers), int(kind is QuestionKind.RATING)
        together = add_coincidences(known.counts if known else (), value_count(kind, options, asked.many), units, lowest)
        work.agreements[row.project] = AgreementCounts(together)


def project_alpha(state: CurationState, project: bytes) -> Fraction | None:
    """Return Krippendorff's α over the settled tasks of a project, or None if there are fewer than two different votes."""
    row, agreed = state.projects.get_record(project), state.agreements.get_record(project)
    if row is None or agreed is None:
        return None
    kind, options = row.spec.kind, len(row.spec.options)
    return alpha_from_table(agreed.counts, value_count(kind, options, row.spec.many), measurement_level(kind))


def _leased_by(work: CurationChanges, assignment: bytes, peer: bytes, members: MembersState) -> Assignment:
    row = work.assignments.get_record(assignment)
    if row is None or row.state is not AssignmentState.LEASED:
        raise InapplicableStatement("unknown lease")
    if members.current_key(row.peer) != peer:
        raise InapplicableStatement("another peer took this lease")
    return row


def _release(work: CurationChanges, release: ReleaseAssignment, peer: bytes, members: MembersState) -> None:
    _leased_by(work, release.assignment, peer, members)
    work.release_place(release.assignment, AssignmentState.RELEASED)


def _skip(work: CurationChanges, skip: SkipAssignment, peer: bytes, members: MembersState) -> None:
    row = _leased_by(work, skip.assignment, peer, members)
    task = task_id(row.project, row.number)
    now = work.tasks[task]
    work.tasks[task] = replace(now, skipped=now.skipped + 1)
    work.release_place(skip.assignment, AssignmentState.SKIPPED)
    work.assignments[skip.assignment] = replace(work.assignments[skip.assignment], reason=skip.reason)


# Projects -----------------------------------------------------------------------------------------------------------------


def _found(work: CurationChanges, said: DecodedTransaction, members: MembersState, asked: ProjectSpec) -> None:
    if name := name_problem(asked.name):
        raise Refused(f"the project's name {name}")
    if problem := options_problem(asked.kind, tuple(asked.options), asked.many) or items_problem(asked.kind, asked.items):
        raise Refused(problem)
    open_count, closing_count = (
        sum(members.current_key(work.projects[key].author) == said.author for key in keys) for keys in (work.open, work.closing)
    )
    if open_count >= PROJECTS_OPEN_MAX:
        raise Refused(f"{PROJECTS_OPEN_MAX} projects of this member are open, the maximum: close one first")
    if open_count + closing_count >= PROJECTS_UNFINISHED_MAX:  # a member must not fill the queue of closings
        raise Refused(f"{PROJECTS_UNFINISHED_MAX} projects of this member are open or closing, the maximum: wait a minute")
    if len(work.open) + len(work.closing) >= PROJECTS_MAX:
        raise Refused(f"{PROJECTS_MAX} projects are open or closing in this network, the maximum: wait until one is closed")
    key = project_id(said.author, said.transaction.nonce)
    work.projects[key] = Project(said.author, asked, ProjectPhase.OPEN)
    work.changed_fields["open"] = (*work.open, key)


def _own(work: CurationChanges, said: DecodedTransaction, members: MembersState, key: bytes) -> Project:
    project = work.projects.get_record(key)
    if project is None:
        raise Refused("unknown project")
    if members.current_key(project.author) != said.author:
        raise Refused("this project belongs to another member: only its author may change it")
    return project


def is_closed_for_votes(of: CurationChanges | CurationState, key: bytes, now_ms: int) -> bool:
    """Return whether a project is closed and the time for its last openings is over.

    Later changes come only from `project_close`.
    """
    project, closing = of.projects.get_record(key), of.closings.get_record(key)
    return project is not None and project.phase is ProjectPhase.CLOSED and (closing is None or closing.start_ms <= now_ms)


def reviews_left(state: CurationState, key: bytes, now_ms: int) -> int:
    """Return the number of tasks that wait for their author's review.

    It is 0 when the time for votes is over: the author can decide no task then.
    """
    project = state.projects.get_record(key)
    return 0 if project is None or is_closed_for_votes(state, key, now_ms) else project.review


def _add_page(work: CurationChanges, said: DecodedTransaction, members: MembersState) -> None:
    page = said.content
    project = _own(work, said, members, page.project)
    if project.phase is ProjectPhase.CLOSED:
        raise Refused("the project is closed")
    if project.pages >= PAGES_MAX:
        raise Refused(f"a project has at most {PAGES_MAX} pages")
    work.pages[page_key(page.project, project.pages)] = TaskPageRow(
        page.digest, page.bytes, page.root, project.tasks, page.count, page.gold
    )
    work.projects[page.project] = replace(project, pages=project.pages + 1, tasks=project.tasks + page.count)


def _say_gold(work: CurationChanges, said: DecodedTransaction, members: MembersState, now_ms: int) -> None:
    """Record revealed right answers, all or none.

    Each must be under the page's root of gold, be new, and be a valid answer to its task.
    """
    content: RevealGold = said.content
    project, page = _own(work, said, members, content.project), work.pages.get_record(page_key(content.project, content.page))
    if page is None or page.gold is None:
        raise Refused("unknown page, or it has no gold")
    if is_closed_for_votes(work, content.project, now_ms):
        raise Refused("the project is already being closed")
    asked = project.spec
    for gold in content.answers:
        number, answer = page.first + gold.index, tuple(gold.answer)
        task = task_id(content.project, number)
        if work.golds.get_record(task) is not None:
            raise Refused(f"the gold of task {number} is already revealed")
        if not merkle.verify_merkle_proof(gold_leaf(gold.salt, answer), gold.index, page.count, gold.proof, page.gold):
            raise Refused(f"this is not the gold that was committed for task {number}")
        if problem := answer_problem(asked.kind, len(asked.options), asked.many, asked.items, answer):
            raise Refused(f"{list(answer)} is not a valid answer: {problem}")
        work.golds[task] = GoldRow(answer)
    work.projects[content.project] = replace(project, golds=project.golds + len(content.answers))


def _move(work: CurationChanges, said: DecodedTransaction, members: MembersState, now_ms: int) -> None:
    move = said.content
    project = _own(work, said, members, move.project)
    if project.phase is ProjectPhase.CLOSED:
        raise Refused("the project is closed permanently")
    if project.phase is move.phase:
        raise Refused(f"the project is already {project.phase.value}")
    if move.phase is ProjectPhase.CLOSED:
        _close(work, move.project, now_ms)
    else:
        work.projects[move.project] = replace(project, phase=move.phase)


def _close(work: CurationChanges, key: bytes, now_ms: int) -> None:
    work.projects[key] = replace(work.projects[key], phase=ProjectPhase.CLOSED)
    work.closings[key] = ProjectCloseProgress(now_ms + OPENING_MS)
    work.changed_fields["closing"] = (*work.closing, key)
    work.changed_fields["open"] = tuple(other for other in work.open if other != key)


def _stop(work: CurationChanges, said: DecodedTransaction, members: MembersState, key: bytes, now_ms: int) -> None:
    """Record a voter's vote to stop a project. Votes of a quorum of the current voters close the project."""
    project = work.projects.get_record(key)
    if project is None or project.phase is ProjectPhase.CLOSED:
        raise Refused("unknown project, or it is closed already")
    if said.author not in members.voters:
        raise Refused("only voters can vote to stop a project: its author closes it")
    stops = tuple(sorted({*project.stop_requests, said.author} & set(members.voters)))
    work.projects[key] = replace(project, stop_requests=stops)
    if len(stops) >= VoterSet(members.voters).quorum:
        _close(work, key, now_ms)


def _review(work: CurationChanges, said: DecodedTransaction, members: MembersState, context: BlockContext) -> None:
    task = work.tasks.get_record(said.content.task)
    if task is None or task.stage is not TaskStage.REVIEW:
        raise Refused("this task does not wait for its author")
    project = _own(work, said, members, task.project)
    if is_closed_for_votes(work, task.project, context.time_ms):
        raise Refused("the project is closed")
    asked, label = project.spec, tuple(said.content.label)
    if problem := answer_problem(asked.kind, len(asked.options), asked.many, asked.items, label):
        raise Refused(f"{list(label)} is not a valid answer: {problem}")
    work.projects[task.project] = replace(project, review=project.review - 1)
    _settle(work, said.content.task, asked, label, context)
    work.tasks[said.content.task] = replace(work.tasks[said.content.task], is_reviewed=True)
