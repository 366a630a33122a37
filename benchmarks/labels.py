"""Accuracy of labels and shares of points, with people who guess, lie or copy: `python -m benchmarks.labels --json FILE`.

The labels of a close are measured on the crowds of `benchmarks.crowds`, beside a plain majority. Their accuracy and their
balanced accuracy (the mean over classes) may be at most 0.02 below the majority's. Tasks with gold do not count.

In a running project two votes are requested first, and then one more at a time until the running estimate is sure, as in
`curation`. Points are also divided in projects with five votes per task, none of which sees another one. A fifth of the
annotators is of one kind:

| kind     | answers |
|----------|--------------|
| lazy     | always the first option |
| random   | either option |
| copying  | the majority of the opened votes, or either option if there is none |
| fresh    | either option, with a new key after every ten answers; its points are those of all its keys |
| colluding| the same for all of them, drawn for each task |
"""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table as Screen

from benchmarks.crowds import CROWDS, HALF, HIGH, LOW, LYING, MIXED, PEOPLE, TASKS, VOTES
from benchmarks.provenance import write
from benchmarks.verdicts import conclude, verdict
from curation.estimation.dawid_skene import likeliest_classes
from curation.estimation.online_dawid_skene import LABEL_CONFIDENCE_MIN, estimate_label, updated_counts
from curation.estimation.reputation import WEIGHT_ONE, annotator_weight, divide_points
from curation.limits import VOTES_MAX
from curation.tasks.answers import Answer, QuestionKind
from scenarios.trials import COUNT, Parser
from tests.curation.whole_estimates import final_confusions, run_dawid_skene

OPTIONS = 2
AS_IT_RUNS = 2, VOTES_MAX  # requested votes of a task before any is opened, and its maximum
FIVE_BLIND = VOTES, VOTES
FRESH_ANSWERS = 10  # of one key
PRICE = 1_000  # points of a task
KINDS = ("lazy", "random", "copying", "fresh", "colluding")
ANSWERS = 150  # per annotator, when reputations are compared with accuracies
RIGHT_MIXED, RIGHT_LYING, BELOW_MAJORITY = 0.92, 0.94, 0.02
STOP_VOTES, STOP_RIGHT, STOP_ACCURACY = 3.1, 0.93, 0.8
SHARE_MAX, CORRELATION_MIN = 0.05, 0.8


# Whole estimates ---------------------------------------------------------------------------------------------------------


@dataclass
class Crowd:
    """Accuracies of one crowd: the estimate, and a plain majority that resolves ties to the lowest class."""

    name: str
    seed: int
    right: float
    majority: float
    balanced: float
    majority_balanced: float


def crowd(name: str, seed: int) -> Crowd:
    answers = CROWDS[name](np.random.default_rng(seed))
    votes, tasks = answers.votes, len(answers.truth)
    counts = np.zeros((tasks, answers.classes), dtype=np.int64)
    np.add.at(counts, (votes[:, 0], votes[:, 2]), 1)
    whole = run_dawid_skene(answers.classes, tasks, answers.annotators, votes, answers.gold_rows)
    rest = np.setdiff1d(np.arange(tasks), answers.gold)
    right, most = ((likeliest_classes(of) == answers.truth)[rest] for of in (whole.posterior(), counts))
    classes = [answers.truth[rest] == which for which in np.unique(answers.truth[rest])]
    return Crowd(
        name,
        seed,
        float(right.mean()),
        float(most.mean()),
        *(float(np.mean([found[of].mean() for of in classes])) for found in (right, most)),
    )


# A project as it runs ----------------------------------------------------------------------------------------------------


@dataclass
class Person:
    kind: str
    chance: float  # of an own answer that is right
    keys: list[int] = field(default_factory=list)
    answers: int = 0


@dataclass
class Project:
    """All votes of a project, in the order of its tasks."""

    truth: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    votes: list[tuple[int, int, int]] = field(default_factory=list)  # task, key, class
    blind: list[int] = field(default_factory=list)
    keys: int = 0


def run(
    people: Sequence[Person], draw: np.random.Generator, tasks: int | None, answers: int, votes: tuple[int, int] = AS_IT_RUNS
) -> Project:
    """Run tasks one after another: `tasks` of them, or until the mean number of answers per person is `answers`.

    `votes` are the requested votes of a task before any is opened, and its maximum.
    """
    project, counts = Project(), defaultdict[int, tuple[int, ...]](tuple)
    while len(project.truth) < tasks if tasks else len(project.votes) < answers * len(people):
        _task(project, people, counts, draw, votes)
    return project


def _task(
    project: Project,
    people: Sequence[Person],
    counts: dict[int, tuple[int, ...]],
    draw: np.random.Generator,
    votes: tuple[int, int],
) -> None:
    first, most = votes
    task, truth, agreed = len(project.truth), int(draw.integers(OPTIONS)), int(draw.integers(OPTIONS))
    told: list[tuple[int, Answer]] = []
    opened = 0
    for person in (people[number] for number in draw.permutation(len(people))[:most]):
        said = _said(person, truth, agreed, [answer[0] for _, answer in told[:opened]], draw)
        key = _key(project, person)
        told.append((key, (said,)))
        project.votes.append((task, key, said))
        project.blind.append(int(opened == 0))
        if len(told) < first:
            continue
        opened = len(told)
        label, sure = estimate_label(QuestionKind.LABEL, OPTIONS, False, [(counts[key], answer) for key, answer in told])
        if sure >= LABEL_CONFIDENCE_MIN:
            break
    for key, answer in told:
        counts[key] = updated_counts(QuestionKind.LABEL, OPTIONS, False, counts[key], label, answer)
    project.truth.append(truth)
    project.labels.append(label[0])


def _key(project: Project, person: Person) -> int:
    if not person.keys or (person.kind == "fresh" and person.answers % FRESH_ANSWERS == 0):
        person.keys.append(project.keys)
        project.keys += 1
    person.answers += 1
    return person.keys[-1]


def _said(person: Person, truth: int, agreed: int, opened: Sequence[int], draw: np.random.Generator) -> int:
    match person.kind:
        case "lazy":
            return 0
        case "colluding":
            return agreed
        case "copying" if opened:
            return Counter(opened).most_common(1)[0][0]
    return truth if draw.random() < person.chance else 1 - truth


@dataclass
class Stopped:
    """Early stopping with equally accurate annotators."""

    seed: int
    right: float
    votes: float  # per task


def stopped(seed: int) -> Stopped:
    project = run([Person("honest", STOP_ACCURACY) for _ in range(PEOPLE)], np.random.default_rng(seed), TASKS, 0)
    return Stopped(seed, right(project), len(project.votes) / TASKS)


def right(project: Project) -> float:
    return sum(map(int.__eq__, project.labels, project.truth)) / len(project.truth)


# Points ------------------------------------------------------------------------------------------------------------------


@dataclass
class Points:
    """A project in which a fifth of the annotators is of one kind."""

    kind: str
    seed: int
    answers: float  # mean per person
    right: float  # share of the labels while it ran
    right_whole: float  # and at its close
    honest: float  # mean points of an honest annotator
    most: float  # of a person of the kind, relative to an honest one
    mean: float
    unpaid: float  # share of the honest without any points
    correlation: float  # rank correlation between weights and accuracies


def paid(kind: str, seed: int, tasks: int | None, answers: int = 0, votes: tuple[int, int] = AS_IT_RUNS) -> Points:
    draw = np.random.default_rng(seed)
    few = PEOPLE // 5
    people = [Person(kind, 1 / OPTIONS) for _ in range(few)]
    people += [Person("honest", float(draw.uniform(LOW, HIGH))) for _ in range(PEOPLE - few)]
    project = run(people, draw, tasks, answers, votes)
    whole = run_dawid_skene(OPTIONS, len(project.truth), project.keys, np.array(project.votes, dtype=np.int64))
    # The votes of a task have another order there.
    blind = {(task, key): mark for (task, key, _), mark in zip(project.votes, project.blind, strict=True)}
    marks = np.array([blind[int(task), int(key)] for task, key, _ in whole.votes], dtype=np.int64)
    weights = [annotator_weight([[(int(seen), int(good)) for seen, good in rows]]) for rows in final_confusions(whole, marks)]
    given = Counter(key for _, key, _ in project.votes)
    shares = {key.to_bytes(32, "big"): given[key] * weights[key] for key in range(project.keys)}
    points = divide_points(PRICE * len(project.truth), shares)
    of = [sum(points[key.to_bytes(32, "big")] for key in person.keys) for person in people]
    honest = float(np.mean(of[few:])) or 1.0
    # The reputation of a person with several keys is the mean over the keys that it used.
    found = [float(np.mean([weights[key] for key in person.keys])) / WEIGHT_ONE for person in people]
    labels = likeliest_classes(whole.posterior())
    return Points(
        kind=kind,
        seed=seed,
        answers=len(project.votes) / PEOPLE,
        right=right(project),
        right_whole=float((labels == np.array(project.truth)).mean()),
        honest=honest,
        most=max(of[:few]) / honest,
        mean=float(np.mean(of[:few])) / honest,
        unpaid=float(np.mean([points == 0 for points in of[few:]])),
        correlation=correlation(found, [person.chance for person in people]),
    )


def correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Spearman's rank correlation; ties share their rank. It is 0 if all values of `first` are equal."""
    if len(set(first)) == 1:
        return 0.0
    return float(np.corrcoef(_ranks(first), _ranks(second))[0, 1])


def _ranks(values: Sequence[float]) -> list[float]:
    return [sum(other < value for other in values) + sum(other == value for other in values) / 2 for value in values]


# Bounds --------------------------------------------------------------------------------------------------------------


@dataclass
class Figures:
    crowds: list[Crowd] = field(default_factory=list)
    stops: list[Stopped] = field(default_factory=list)
    points: list[Points] = field(default_factory=list)
    five: list[Points] = field(default_factory=list)  # with five votes on each task, none of which saw another
    long: list[Points] = field(default_factory=list)  # with enough answers for a reputation


def measure(seed: int, figures: Figures) -> None:
    figures.crowds += [crowd(name, seed) for name in CROWDS]
    figures.stops.append(stopped(seed))
    figures.points += [paid(kind, seed, TASKS) for kind in KINDS]
    figures.five += [paid(kind, seed, TASKS, votes=FIVE_BLIND) for kind in KINDS]
    figures.long += [paid(kind, seed, None, ANSWERS) for kind in KINDS]


def below_majority(rows: Sequence[Crowd]) -> tuple[float, float]:
    """Return the difference of mean accuracy, and of mean balanced accuracy, below the majority's."""
    return mean([of.majority - of.right for of in rows]), mean([of.majority_balanced - of.balanced for of in rows])


def verdicts(figures: Figures) -> Iterator[str]:
    for name in CROWDS:
        found = [of for of in figures.crowds if of.name == name]
        below = max(below_majority(found))
        if name != HALF:  # no bound: `show` prints it
            text = f"{name}: at most {BELOW_MAJORITY} below the majority in accuracy and balanced accuracy"
            yield verdict(below <= BELOW_MAJORITY, f"{text}: {below:.3f}")
    for name, least in ((MIXED, RIGHT_MIXED), (LYING, RIGHT_LYING)):
        share = mean([of.right for of in figures.crowds if of.name == name])
        yield verdict(share >= least, f"{name}: right ≥ {least}: {share:.3f}")
    asked, share = mean([of.votes for of in figures.stops]), mean([of.right for of in figures.stops])
    text = f"early stop, all right {STOP_ACCURACY} of the time: ≤ {STOP_VOTES} votes for ≥ {STOP_RIGHT} right"
    yield verdict(asked <= STOP_VOTES and share >= STOP_RIGHT, f"{text}: {asked:.2f} for {share:.3f}")
    for kind in KINDS:
        found_short, found_long = ([of for of in rows if of.kind == kind] for rows in (figures.points, figures.long))
        most = max(of.most for of in found_short + found_long)
        ranked = mean([of.correlation for of in found_long])
        if kind == "colluding":
            continue  # without a promise: `show` prints it
        yield verdict(
            most <= SHARE_MAX, f"a fifth {kind}: ≤ {SHARE_MAX:.0%} of an honest one's points, the most of all: {most:.1%}"
        )
        five = [of for of in figures.five if of.kind == kind]
        text = f"a fifth {kind}, five votes each: ≤ {SHARE_MAX:.0%} in the mean"
        share, most = mean([of.mean for of in five]), max(of.most for of in five)
        yield verdict(share <= SHARE_MAX, f"{text}: {share:.1%}; the luckiest of {PEOPLE // 5 * len(five)}: {most:.1%}")
        text = f"a fifth {kind}: rank correlation of weights with truth ≥ {CORRELATION_MIN} at {ANSWERS} answers"
        yield verdict(ranked >= CORRELATION_MIN, f"{text}: {ranked:.3f}")


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def show(figures: Figures) -> None:
    console = Console(width=130)
    screen = Screen(title="labels of each crowd: means over all seeds, without tasks that have gold")
    for heading in ("crowd", "accuracy", "majority", "balanced", "majority"):
        screen.add_column(heading, justify="left" if heading == "crowd" else "right")
    for name in CROWDS:
        rows = [of for of in figures.crowds if of.name == name]
        each = ("right", "majority", "balanced", "majority_balanced")
        screen.add_row(name, *(f"{mean([getattr(of, field) for of in rows]):.3f}" for field in each))
    console.print(screen)
    screen = Screen(title=f"a fifth of {PEOPLE} of one kind: means over all seeds", caption="points over those of an honest one")
    for heading in (
        "kind",
        "answers each",
        "right",
        "at the close",
        "points, mean",
        "points, most",
        "honest unpaid",
        "rank correlation",
    ):
        screen.add_column(heading, justify="right")
    for rows in (figures.points, figures.five, figures.long):
        for kind in KINDS:
            found = [of for of in rows if of.kind == kind]
            cells = [
                mean([getattr(of, name) for of in found])
                for name in ("answers", "right", "right_whole", "mean", "unpaid", "correlation")
            ]
            most = max(of.most for of in found)
            screen.add_row(
                kind,
                f"{cells[0]:.0f}",
                f"{cells[1]:.3f}",
                f"{cells[2]:.3f}",
                f"{cells[3]:.1%}",
                f"{most:.1%}",
                f"{cells[4]:.0%}",
                f"{cells[5]:.3f}",
            )
    console.print(screen)


def main() -> int:
    parser = Parser("labels", __doc__.splitlines()[0], package="benchmarks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--seeds", type=COUNT, default=10, metavar="N", help="number of seeds of people and tasks, from 0 on")
    options = parser.parse_args()
    started, figures = time.time(), Figures()
    for seed in range(options.seeds):
        measure(seed, figures)
        print(f"seed {seed}: done", file=sys.stderr)
        write(options.json, started, {"seeds": options.seeds, **asdict(figures)})
    show(figures)
    return conclude(verdicts(figures))


if __name__ == "__main__":
    sys.exit(main())
