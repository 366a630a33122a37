"""A client written from docs/protocol/curation.md computes the same labels, weights and points."""

from __future__ import annotations

from collections import Counter

import pytest

from curation.estimation.reputation import divide_points
from curation.ledger.curation_state import AssignmentState, ProjectSpec, TaskStage
from curation.ledger.transaction_types import RevealGold
from curation.tasks.answers import Answer, QuestionKind
from curation.tasks.task_pages import task_id
from tests.curation.room import AUTHOR, gold_answers
from tests.curation.second import Question, Vote, weight
from tests.curation.test_closing import CROWD, KINDS, PRICE, Room, says, truth_of
from tests.curation.test_labels import liars
from tests.curation.whole_estimates import run_dawid_skene


def asked_of(asked: ProjectSpec, answer: Answer) -> list[list[int]]:
    """Return, for each question, the classes of its tasks in one answer."""
    match asked.kind:
        case QuestionKind.RANKING:
            return [[int(answer.index(item) < answer.index((item + 1) % asked.items)) for item in range(asked.items)]]
        case QuestionKind.RATING:
            return [[answer[0] - 1]]
    return [[int(option in answer)] for option in range(len(asked.options))] if asked.many else [[answer[0]]]


@pytest.mark.parametrize("has_gold", [False, True], ids=["no gold", "gold"])
@pytest.mark.parametrize("kind", ["label", "many", "rating", "ranking"])
def test_a_second_client_closes_alike(kind: str, has_gold: bool) -> None:
    asked, tasks = KINDS[kind], 100
    golds = {number: truth_of(asked, number) for number in range(0, tasks, 7)} if has_gold else {}
    room = Room()
    project = room.project(asked, tasks, gold=golds)
    room.worked(CROWD[:6], says(asked, 1))
    if golds:
        room.say(AUTHOR, "curation/reveal-gold", RevealGold(project, 0, gold_answers(tasks, golds)))
    settled = {row.number: key for key, row in room.curation.tasks.items() if row.stage is TaskStage.SETTLED}
    numbers = sorted(settled)
    votes = [vote for _, vote in room.curation.assignments.items() if vote.state is AssignmentState.SETTLED]
    room.closed(project)

    people = sorted({vote.annotator for vote in votes})
    parts = asked.items if asked.kind is QuestionKind.RANKING else 1
    classes = 2 if asked.many or asked.kind is QuestionKind.RANKING else len(asked.options)
    questions = []
    for place in range(len(asked_of(asked, truth_of(asked, 0)))):
        rows = [
            Vote(numbers.index(vote.number) * parts + part, people.index(vote.annotator), said, vote.is_blind)
            for vote in votes
            for part, said in enumerate(asked_of(asked, vote.answer or ())[place])
        ]
        gold = {
            numbers.index(number) * parts + part: said
            for number, answer in golds.items()
            if number in settled
            for part, said in enumerate(asked_of(asked, answer)[place])
        }
        questions.append(Question(classes, rows, gold))

    weights = {key: weight([question.seen_and_right(who, parts) for question in questions]) for who, key in enumerate(people)}
    assert any(weights.values())
    for key, expected in weights.items():
        skill = room.curation.skills.get_record(project + key)
        assert skill is not None and skill.weight == expected
    given = Counter(vote.annotator for vote in votes)
    points = divide_points(PRICE * len(settled), {key: given[key] * share for key, share in weights.items()})
    assert {key: room.curation.annotators.get_record(key).points for key in people} == points  # type: ignore[union-attr]
    for place, number in enumerate(numbers):
        row = room.curation.tasks.get_record(settled[number])
        assert row is not None and row.label is not None and settled[number] == task_id(project, number)
        likeliest = [question.p[place * parts].index(max(question.p[place * parts])) for question in questions]
        if number in golds:
            assert row.label == golds[number]
        elif asked.many:
            assert row.label == tuple(option for option, on in enumerate(likeliest) if on)
        elif asked.kind is not QuestionKind.RANKING:
            assert row.label == (likeliest[0] + (asked.kind is QuestionKind.RATING),)


@pytest.mark.parametrize("classes", [2, 3])
def test_a_second_client_reviews_labels_alike(classes: int) -> None:
    """Eighteen of forty lie on all tasks but gold. The labels after the last iteration are those that they contradict."""
    votes, truth, gold = liars(18, 30, True, classes)
    second = Question(classes, [Vote(*row) for row in votes.tolist()], dict(gold.tolist()))
    labels = run_dawid_skene(classes, 500, 40, votes, gold).posterior()
    assert labels.tolist() == [second.p[task] for task in range(500)]
    assert (labels.argmax(axis=1) == truth).mean() > 0.93
