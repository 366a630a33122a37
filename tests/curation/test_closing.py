"""A project's close: the labels of the whole estimate, weights and points. It runs in slices, whatever a peer has cached."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from curation.estimation.annotator_agreement import (
    agreement_units,
    alpha_from_coincidences,
    count_coincidences,
    measurement_level,
)
from curation.estimation.reputation import WEIGHT_ONE
from curation.ledger.curation_module import project_alpha
from curation.ledger.curation_state import AssignmentState, CloseStep, CurationState, ProjectPhase, ProjectSpec, TaskStage
from curation.ledger.project_close import ProjectCloser
from curation.ledger.state_changes import CurationChanges
from curation.ledger.transaction_types import (
    CreateProject,
    RevealGold,
    ReviewTask,
    SetProjectPhase,
    SkipAssignment,
    StatementBatch,
)
from curation.limits import OPENING_MS, PROJECTS_OPEN_MAX, PROJECTS_UNFINISHED_MAX, SKIPS_MAX
from curation.tasks.answers import Answer, QuestionKind
from curation.tasks.task_pages import assignment_id, task_id
from ledger.core.module import Refused
from tests.curation.room import AUTHOR, ONE, OTHER, PEER, SEVERAL, Room, annotators, gold_answers

PRICE = 7
CROWD = annotators(8)
ANN, BOB, CAT = CROWD[:3]
MOODS = replace(SEVERAL, price=PRICE)
KINDS = {
    "label": MOODS,
    "many": replace(MOODS, options=("glad", "sad", "loud"), many=True),
    "rating": replace(MOODS, kind=QuestionKind.RATING, options=("bad", "fair", "good")),
    "pair": ProjectSpec("pairs", QuestionKind.PAIR, (), False, 2, None, 7, PRICE, False),
    "ranking": ProjectSpec("orders", QuestionKind.RANKING, (), False, 3, None, 7, PRICE, False),
}


def truth_of(asked: ProjectSpec, number: int) -> Answer:
    match asked.kind:
        case QuestionKind.RATING:
            return (1 + number % 3,)
        case QuestionKind.PAIR:
            return (number % 4,)
        case QuestionKind.RANKING:
            return ((0, 1, 2), (2, 0, 1), (1, 2, 0))[number % 3]
    return ((), (0,), (0, 2), (1, 2))[number % 4] if asked.many else (number % 2,)


def says(asked: ProjectSpec, seed: int = 0) -> Callable[[int, int], Answer]:
    """Return answers: the first two people guess, the others are right nine times in ten."""

    def said(person: int, number: int) -> Answer:
        draw = Random(f"{seed} {person} {number}")
        return truth_of(asked, draw.randrange(12) if person < 2 or draw.random() < 0.1 else number)

    return said


def worked_through(asked: ProjectSpec, tasks: int = 60) -> tuple[Room, bytes]:
    room = Room()
    project = room.project(asked, tasks)
    room.worked(CROWD, says(asked))
    return room, project


def weights(room: Room, project: bytes) -> list[int]:
    rows = [room.curation.skills.get_record(project + who.public) for who in CROWD]
    return [row.weight if row else 0 for row in rows]


@pytest.mark.parametrize("kind", KINDS)
def test_the_price_of_every_settled_task_is_divided(kind: str) -> None:
    room, project = worked_through(KINDS[kind], 400)
    room.closed(project)
    row, points = room.row(project), [room.person(who).points for who in CROWD]
    assert row.phase is ProjectPhase.CLOSED and row.settled > 200
    assert sum(points) == row.paid == PRICE * row.settled
    assert max(points[:2]) < min(points[2:]) and max(weights(room, project)[:2]) < min(weights(room, project)[2:])
    assert room.curation.closing == () and not dict(room.curation.closings.items())


@pytest.fixture
def room() -> Room:
    return Room()


def test_labels_are_those_of_the_whole_estimate_and_accepted_answers_follow(room: Room) -> None:
    """Three of eight people contradict the others. The first labels do not account for it yet."""
    project = room.project(MOODS, 200)
    honest = says(MOODS)
    room.worked(CROWD, lambda person, number: (number % 2 ^ (person < 3),) if person < 4 else honest(person, number))
    before = {key: row.label for key, row in room.curation.tasks.items()}
    room.closed(project)
    after = {key: row for key, row in room.curation.tasks.items() if row.stage is TaskStage.SETTLED}
    changed = [row for key, row in after.items() if row.label != before[key]]
    wrong = [
        sum(label != truth_of(MOODS, after[key].number) for key, label in labels.items() if key in after)
        for labels in (before, {key: row.label for key, row in after.items()})
    ]
    assert changed and wrong[1] <= wrong[0]
    votes = [vote for vote in dict(room.curation.assignments.items()).values() if vote.state is AssignmentState.SETTLED]
    for who in CROWD:
        right = [vote for vote in votes if vote.annotator == who.public]
        labels = [after[task_id(project, vote.number)].label for vote in right]
        assert room.person(who).accepted == sum(vote.answer == label for vote, label in zip(right, labels, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_project_has_the_agreement_of_its_settled_tasks(kind: str) -> None:
    asked = KINDS[kind]
    room, project = worked_through(asked)
    units = []
    for key, row in room.curation.tasks.items():
        votes = [room.curation.assignments.get_record(assignment_id(key, annotator)) for annotator in row.annotators]
        answers = [tuple(vote.answer) for vote in votes if vote and vote.answer is not None]
        if row.stage is TaskStage.SETTLED:
            units += agreement_units(asked.kind, len(asked.options), asked.many, answers)
    found = project_alpha(room.curation, project)
    alpha = alpha_from_coincidences(count_coincidences(units), measurement_level(asked.kind))
    assert found is not None and found == alpha and 0 < found < 1
    assert project_alpha(room.curation, bytes(32)) is None
    room.closed(project)
    assert project_alpha(room.curation, project) == found


@pytest.mark.parametrize("forgets", [False, True])
@pytest.mark.parametrize("kind", ["label", "many", "ranking"])
def test_slices_come_to_the_same(kind: str, forgets: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is the same also at a peer that restarts between any two slices."""

    def closed(most: int) -> tuple[CurationState, int]:
        room, project = worked_through(KINDS[kind])
        monkeypatch.setattr("curation.ledger.project_close.CLOSING_ROWS_PER_BATCH", most)
        room.say(AUTHOR, "curation/set-phase", SetProjectPhase(project, ProjectPhase.CLOSED))
        room.later(OPENING_MS, batches=1)
        batches = 0
        while project in room.curation.closing:
            if forgets:
                room.module._closer = ProjectCloser()
            closing = room.curation.closings.get_record(project)
            room.batch()
            batches += 1
            assert room.curation.closings.get_record(project) != closing, "each batch does something of it"
        return room.curation, batches

    whole, few = closed(1 << 30)
    sliced, many = closed(13)
    assert few == 1 and many > 20
    for name in ("tasks", "annotators", "assignments", "skills", "projects"):
        assert dict(getattr(sliced, name).items()) == dict(getattr(whole, name).items()), name


def test_openings_count_for_a_minute_and_then_nothing_changes(room: Room) -> None:
    project = room.project(MOODS, tasks=2)
    first, second = room.leased(ANN, BOB, count=2)
    answers = [(who, lease, (1,)) for who, mine in ((ANN, first), (BOB, second)) for lease in mine]
    room.batch(commits=[room.commit(*answer) for answer in answers])
    room.say(AUTHOR, "curation/set-phase", SetProjectPhase(project, ProjectPhase.CLOSED))
    number = room.assignment(first[0]).number
    room.batch(openings=[room.opening(*answer) for answer in answers if room.assignment(answer[1]).number == number])
    assert room.row(project).settled == 1
    room.later(OPENING_MS, batches=1)
    late = room.batch(openings=[room.opening(*answer) for answer in answers])
    assert room.row(project).settled == 1 and late.passed_over >= 2 and late.closing == ()


def test_what_its_author_said_stays(room: Room) -> None:
    project = room.project(replace(MOODS, votes=2), tasks=6)
    room.worked([ANN, BOB], lambda person, number: (int(number == 0 or person == 0),))
    tasks = {row.number: key for key, row in room.curation.tasks.items()}
    room.say(AUTHOR, "curation/review-task", ReviewTask(tasks[3], (0,)))
    room.say(AUTHOR, "curation/review-task", ReviewTask(tasks[4], (1,)))
    room.closed(project)
    row = room.curation.tasks.get_record(tasks[3])
    assert row is not None and row.is_reviewed and row.label == (0,)
    assert "the project is closed" in room.refused(AUTHOR, "curation/review-task", ReviewTask(tasks[5], (1,)))


@pytest.mark.parametrize("most", [1, 1_024])
def test_where_no_vote_tells_of_another_every_answer_is_worth_the_same(
    most: int, monkeypatch: pytest.MonkeyPatch, room: Room
) -> None:
    """Ann's four answers and Bob's two share 28 points: 18⅔ and 9⅓. The seventh task has its author's label and no answer."""
    monkeypatch.setattr("curation.ledger.project_close.CLOSING_ROWS_PER_BATCH", most)
    project = room.project(replace(ONE, price=4), tasks=7)
    for who, count in ((ANN, 4), (BOB, 2)):
        (mine,) = room.leased(who, count=count)
        room.answered([(who, lease, (1,)) for lease in mine])
    for who in CROWD[2 : 2 + SKIPS_MAX]:
        ((lease,),) = room.leased(who)
        room.batch(skips=[SkipAssignment(lease, "unclear")])
    room.say(AUTHOR, "curation/review-task", ReviewTask(task_id(project, room.assignment(lease).number), (0,)))
    labels = {key: row.label for key, row in room.curation.tasks.items()}
    room.closed(project)
    assert weights(room, project) == [WEIGHT_ONE, WEIGHT_ONE] + 6 * [0]
    assert [room.person(who).points for who in CROWD[:3]] == [19, 9, 0]
    assert room.row(project).paid == 4 * room.row(project).settled == 28
    assert {key: row.label for key, row in room.curation.tasks.items()} == labels


def test_a_project_too_small_to_know_anybody_s_weight_pays_answers_alike() -> None:
    room, project = worked_through(MOODS, 4)
    room.closed(project)
    points = [room.person(who).points for who in CROWD if room.curation.annotators.get_record(who.public)]
    assert not any(weights(room, project))
    assert sum(points) == room.row(project).paid == PRICE * room.row(project).settled > 0


def test_a_project_in_which_nothing_is_settled_pays_nobody(room: Room) -> None:
    project = room.project(MOODS, tasks=3)
    room.closed(project)
    assert room.row(project).paid == 0 and room.curation.closing == ()


def test_one_after_another(room: Room) -> None:
    first, second = room.project(MOODS, tasks=30), room.project(MOODS, tasks=30)
    room.worked(CROWD, says(MOODS))
    for project in (first, second):
        room.say(AUTHOR, "curation/set-phase", SetProjectPhase(project, ProjectPhase.CLOSED))
    assert room.curation.closing == (first, second)
    room.later(OPENING_MS + 1, batches=1)
    while room.curation.closing:
        now = room.curation.closings.get_record(first)
        assert now is None or (now.step in CloseStep and room.curation.closings.get_record(second).next_number == 0)  # type: ignore[union-attr]
        room.batch()
    assert all(room.row(project).paid in (0, PRICE * room.row(project).settled) for project in (first, second))


def test_a_member_that_founds_and_closes_cannot_fill_the_queue_of_closes(room: Room) -> None:
    """Otherwise one member could keep all others, and the voters, from closing a project."""
    for _ in range(PROJECTS_UNFINISHED_MAX):
        room.say(AUTHOR, "curation/set-phase", SetProjectPhase(room.project(MOODS, tasks=0), ProjectPhase.CLOSED))
    assert "20 projects of this member are open or closing" in room.refused(
        AUTHOR, "curation/create-project", CreateProject(MOODS)
    )
    room.later(OPENING_MS)
    room.batch()  # later batches see this block's time
    room.batch()
    assert len(room.curation.closing) == PROJECTS_UNFINISHED_MAX - 1
    assert not room.refused(AUTHOR, "curation/create-project", CreateProject(MOODS))


def test_a_member_has_ten_open_projects_and_a_close_frees_a_place_at_once(room: Room) -> None:
    projects = [room.project(MOODS, tasks=0) for _ in range(10)]
    assert len(projects) == PROJECTS_OPEN_MAX
    assert "10 projects of this member are open" in room.refused(AUTHOR, "curation/create-project", CreateProject(MOODS))
    assert not room.refused(OTHER, "curation/create-project", CreateProject(MOODS))
    room.say(AUTHOR, "curation/set-phase", SetProjectPhase(projects[3], ProjectPhase.PAUSED))
    assert room.refused(AUTHOR, "curation/create-project", CreateProject(MOODS)), "a paused project may be opened again"
    room.say(AUTHOR, "curation/set-phase", SetProjectPhase(projects[3], ProjectPhase.CLOSED))
    assert projects[3] in room.curation.closing and not room.refused(AUTHOR, "curation/create-project", CreateProject(MOODS))


def test_no_more_projects_are_unfinished_than_the_state_can_list(monkeypatch: pytest.MonkeyPatch, room: Room) -> None:
    monkeypatch.setattr("curation.ledger.curation_module.PROJECTS_MAX", 2)
    room.say(AUTHOR, "curation/set-phase", SetProjectPhase(room.project(MOODS), ProjectPhase.CLOSED))
    room.project(MOODS, author=OTHER)
    assert "2 projects are open or closing" in room.refused(OTHER, "curation/create-project", CreateProject(MOODS))


def test_a_serving_peer_knows_when_a_close_begins(room: Room) -> None:
    project = room.project(MOODS)
    assert CurationChanges(room.curation, b"").next_expiry_ms() is None
    room.say(AUTHOR, "curation/set-phase", SetProjectPhase(project, ProjectPhase.CLOSED))
    assert CurationChanges(room.curation, b"").next_expiry_ms() == room.now + OPENING_MS
    room.later(OPENING_MS, batches=2)
    assert CurationChanges(room.curation, b"").next_expiry_ms() is None


# Gold --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["label", "many", "rating", "ranking"])
@pytest.mark.parametrize("knows", [True, False], ids=["gold", "no gold"])
def test_a_majority_of_liars_cannot_outvote_gold(kind: str, knows: bool) -> None:
    """Five of eight people give the same wrong answers. Every fifth task is gold, and only the author knew which."""
    asked = KINDS[kind]
    liars, tasks = 5, 240
    golds = {number: truth_of(asked, number) for number in range(0, tasks, 5)}
    room = Room()
    project = room.project(asked, tasks, gold=golds)
    honest = says(asked)

    def lie(number: int) -> Answer:
        truth = truth_of(asked, number)
        if asked.kind is QuestionKind.RANKING:
            return truth[::-1]
        return tuple(option for option in range(3) if option not in truth) if asked.many else truth_of(asked, number + 1)

    room.worked(CROWD, lambda person, number: lie(number) if person < liars else honest(person, number))
    if knows:
        room.say(AUTHOR, "curation/reveal-gold", RevealGold(project, 0, gold_answers(tasks, golds)))
    room.closed(project)
    found, points = weights(room, project), [room.person(who).points for who in CROWD]
    assert sum(points) == room.row(project).paid == PRICE * room.row(project).settled
    settled = {row.number: row.label for _, row in room.curation.tasks.items() if row.stage is TaskStage.SETTLED}
    right = [number for number, label in settled.items() if label == truth_of(asked, number)]
    if knows:
        assert max(found[:liars]) == 0 < min(found[liars:]) and max(points[:liars]) == 0
        assert golds.keys() & settled.keys() <= set(right) and len(golds.keys() & settled.keys()) > 10
        if asked.kind is not QuestionKind.RANKING:
            assert len(right) > 0.9 * len(settled)
    else:
        assert max(points[liars:]) < min(points[:liars]) and len(right) < 0.4 * len(settled)


def test_where_one_vote_is_asked_for_gold_alone_gives_weights(room: Room) -> None:
    """Bob is wrong in each gold task. With one vote per task, the votes are the labels, except for gold."""
    golds: dict[int, Answer] = {number: (number // 2 % 2,) for number in range(0, 120, 2)}
    project = room.project(replace(ONE, price=PRICE), tasks=120, gold=golds)
    room.worked_once(BOB, 40, lambda number: (1 - number // 2 % 2,))
    room.worked_once(ANN, 1_000, lambda number: (number // 2 % 2,))
    voted = {row.number: row.label for _, row in room.curation.tasks.items()}
    room.say(AUTHOR, "curation/reveal-gold", RevealGold(project, 0, gold_answers(120, golds)))
    room.closed(project)
    for _, row in room.curation.tasks.items():
        assert row.label == (golds[row.number] if row.number in golds else voted[row.number])
    assert room.person(ANN).points > 0 == room.person(BOB).points
    assert sum(room.person(who).points for who in (ANN, BOB)) == room.row(project).paid == PRICE * 120
    assert room.person(BOB).accepted < 40


def test_gold_is_the_label_also_where_its_author_reviewed(room: Room) -> None:
    golds: dict[int, Answer] = {0: (1,)}
    project = room.project(replace(MOODS, votes=2), tasks=2, gold=golds)
    room.worked([ANN, BOB], lambda person, number: (person,))
    for number in range(2):
        room.say(AUTHOR, "curation/review-task", ReviewTask(task_id(project, number), (0,)))
    room.say(AUTHOR, "curation/reveal-gold", RevealGold(project, 0, gold_answers(2, golds)))
    room.closed(project)
    labels = [row.label for number in range(2) if (row := room.curation.tasks.get_record(task_id(project, number)))]
    assert labels == [(1,), (0,)]


def test_a_batch_acts_once_on_a_state_and_anew_on_any_other() -> None:
    room, (ann,) = Room(), annotators(1)
    room.project(ONE, tasks=2)
    signed, before = (
        room.tx(PEER, "curation/statements", StatementBatch(enrolments=(room.enrolment(ann),), leases=(room.wish(ann),))),
        room.state,
    )
    first, second = (room.rules.apply_transaction(before, signed).module_state(CurationState) for _ in range(2))
    assert first is second and first.annotators_count == 1
    again = room.rules.apply_transaction(before.with_modules(curation=first), signed).module_state(CurationState)
    assert (again.annotators_count, again.passed_over) == (1, 1)
    peer = replace(before.members.members[PEER.public], roles=())
    members = replace(before.members, members={**before.members.members, PEER.public: peer})
    with pytest.raises(Refused, match="only members with the role"):
        room.rules.apply_transaction(before.with_modules(members=members), signed)
