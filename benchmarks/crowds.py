"""Crowds of annotators on tasks with known labels, for `benchmarks.labels`.

Forty annotators answer 500 tasks, with five votes each. An honest annotator is right with its own probability, uniform between
0.8 and 0.95, and its wrong answers are uniform. A crowd consists of honest annotators, some of which are replaced by others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from curation.estimation.fixed_point import Ints

PEOPLE, TASKS, VOTES = 40, 500, 5
LOW, HIGH = 0.8, 0.95  # probabilities of honest annotators
GOLD = 50  # tasks with gold, in crowds that have some
RARE = (0.95, 0.05)
LAZY = 0.3
THIRD = round(PEOPLE / 3)

Draw = np.random.Generator


@dataclass(frozen=True)
class Answers:
    """Votes of a crowd. `who` and `said` have a row for each task and a column for each vote."""

    classes: int
    annotators: int
    truth: Ints
    who: Ints
    said: Ints
    gold: Ints  # tasks with a known label

    @property
    def votes(self) -> Ints:
        """Rows of task, annotator, class."""
        task = np.repeat(np.arange(len(self.truth)), self.who.shape[1])
        return np.column_stack([task, self.who.ravel(), self.said.ravel()])

    @property
    def gold_rows(self) -> Ints:
        return np.column_stack([self.gold, self.truth[self.gold]])

    def but(self, chosen: NDArray[np.bool_], said: Ints) -> Answers:
        """Return the same votes with other answers where `chosen` is true."""
        return replace(self, said=np.where(chosen, said, self.said))


# Parts -------------------------------------------------------------------------------------------------------------------


def _seats(draw: Draw, people: int, tasks: int = TASKS) -> Ints:
    return np.array([draw.choice(people, VOTES, replace=False) for _ in range(tasks)])


def _wrong(draw: Draw, classes: int, truth: Ints, shape: tuple[int, int]) -> Ints:
    found: Ints = (truth[:, None] + draw.integers(1, classes, shape)) % classes
    return found


def _right_with(draw: Draw, answers: Answers, chance: NDArray[np.float64]) -> Ints:
    """Draw answers that are right with these probabilities, one for each vote."""
    wrong = _wrong(draw, answers.classes, answers.truth, answers.who.shape)
    return np.where(draw.random(answers.who.shape) < chance, answers.truth[:, None], wrong)


def _crowd(
    draw: Draw,
    chance: Sequence[float] | None = None,
    classes: int = 2,
    shares: Sequence[float] | None = None,
    people: int = PEOPLE,
) -> Answers:
    """Make annotators that are right with these probabilities, by default honest ones. `shares` are those of the classes."""
    truth, who = draw.choice(classes, TASKS, p=shares), _seats(draw, people)
    answers = Answers(classes, people, truth, who, np.zeros_like(who), np.zeros(0, dtype=np.int64))
    each = draw.uniform(LOW, HIGH, people) if chance is None else np.array(chance)
    return replace(answers, said=_right_with(draw, answers, each[who]))


def _with_tables(draw: Draw, rows: Sequence[Sequence[float]]) -> Answers:
    """Make annotators with one confusion table: for each label a row with the probabilities of each answer."""
    answers, limits = _crowd(draw, classes=len(rows)), np.cumsum(rows, axis=1)
    drawn = draw.random(answers.who.shape)[:, :, None]
    return replace(answers, said=(drawn > limits[answers.truth][:, None, :-1]).sum(axis=2))


# Crowds ------------------------------------------------------------------------------------------------------------------


def _mixed(draw: Draw, guess: float, lie: float) -> Answers:
    chance = draw.uniform(LOW, HIGH, PEOPLE)
    liars, guessers = round(PEOPLE * lie), round(PEOPLE * guess)
    chance[:liars] = 1 - chance[:liars]
    chance[liars : liars + guessers] = 0.5
    return _crowd(draw, chance)


def _with_gold(draw: Draw, answers: Answers, informed: int = 0) -> Answers:
    """Give some tasks gold. Annotators below number `informed` know these tasks, and answer them correctly."""
    gold = np.sort(draw.choice(TASKS, GOLD, replace=False))
    known = np.isin(np.arange(TASKS), gold)[:, None] & (answers.who < informed)
    return replace(answers.but(known, answers.truth[:, None]), gold=gold)


def _right_on_gold_alone(draw: Draw, lie: float) -> Answers:
    return _with_gold(draw, _mixed(draw, 0.0, lie), round(PEOPLE * lie))


def _wrong_on_gold_too(draw: Draw, lie: float) -> Answers:
    return _with_gold(draw, _mixed(draw, 0.0, lie))


def _always_wrong(draw: Draw, lie: float) -> Answers:
    answers = _crowd(draw)
    return answers.but(answers.who < round(PEOPLE * lie), 1 - answers.truth[:, None])


def _night_shift(draw: Draw) -> Answers:
    """Let a third of the annotators answer a third of the tasks alone, by guessing."""
    answers = _crowd(draw)
    day, night = _seats(draw, PEOPLE - THIRD, TASKS * 2 // 3) + THIRD, _seats(draw, THIRD, TASKS - TASKS * 2 // 3)
    answers = replace(answers, who=np.concatenate([day, night]))
    chance = draw.uniform(LOW, HIGH, PEOPLE)
    chance[:THIRD] = 0.5
    return replace(answers, said=_right_with(draw, answers, chance[answers.who]))


def _turning(draw: Draw) -> Answers:
    """Let a third of the annotators give opposite answers in the second half."""
    answers = _crowd(draw)
    return answers.but((answers.who < THIRD) & (np.arange(TASKS) >= TASKS // 2)[:, None], 1 - answers.said)


def _groups(draw: Draw, keys: int, groups: int) -> Answers:
    """Split some keys into groups. All keys of a group give the same guess for a task."""
    answers = _crowd(draw)
    agreed = draw.integers(0, 2, (TASKS, groups))
    return answers.but(answers.who < keys, np.take_along_axis(agreed, answers.who % groups, axis=1))


def _lazy(draw: Draw, shares: Sequence[float] | None) -> Answers:
    answers = _crowd(draw, shares=shares)
    return answers.but(answers.who < round(PEOPLE * LAZY), np.zeros_like(answers.said))


def _pairs(draw: Draw) -> Answers:
    """Confuse options 2 i and 2 i + 1: a wrong answer is the other one of the pair."""
    answers = _crowd(draw, classes=16)
    return answers.but(answers.said != answers.truth[:, None], (answers.truth ^ 1)[:, None])


def _hard(draw: Draw) -> Answers:
    """Let all annotators guess in every fifth task."""
    answers = _crowd(draw)
    return answers.but((np.arange(TASKS) % 5 == 0)[:, None], draw.integers(0, 2, answers.said.shape))


def _near(draw: Draw) -> Answers:
    """Make ratings from 1 to 5 by annotators that are right with 0.6 to 0.85. A wrong rating is too high or too low by one."""
    answers = _crowd(draw, draw.uniform(0.6, 0.85, PEOPLE).tolist(), classes=5)
    truth = answers.truth[:, None]
    step = np.where(draw.random(answers.said.shape) < 0.5, 1, -1)
    step = np.where((truth + step < 0) | (truth + step > 4), -step, step)
    return answers.but(answers.said != truth, truth + step)


def _lying(share: float) -> dict[str, Callable[[Draw], Answers]]:
    return {
        f"{share:.0%} are right on gold alone": partial(_right_on_gold_alone, lie=share),
        f"{share:.0%} lie, no gold": partial(_mixed, guess=0.0, lie=share),
    }


MIXED, LYING, HALF = "a fifth guesses, a tenth lies", "a third lies", "twenty of forty keys are one person"
BY_CLASS_2 = ((0.95, 0.05), (0.35, 0.65))
BY_CLASS_3 = ((0.9, 0.05, 0.05), (0.25, 0.7, 0.05), (0.05, 0.35, 0.6))
CROWDS: Final[dict[str, Callable[[Draw], Answers]]] = {
    "all honest": _crowd,
    MIXED: partial(_mixed, guess=0.2, lie=0.1),
    LYING: partial(_mixed, guess=0.0, lie=1 / 3),
    **_lying(0.3),
    **_lying(0.4),
    **_lying(0.45),
    "45% are always wrong, no gold": partial(_always_wrong, lie=0.45),
    "60% lie, on gold too": partial(_wrong_on_gold_too, lie=0.6),
    "a night shift guesses": _night_shift,
    "a third turns": _turning,
    "a third colludes, in two groups": partial(_groups, keys=THIRD, groups=2),
    "ten of forty keys are one person": partial(_groups, keys=10, groups=1),
    HALF: partial(_groups, keys=20, groups=1),
    "noise by class, 2 classes": partial(_with_tables, rows=BY_CLASS_2),
    "noise by class, 3 classes": partial(_with_tables, rows=BY_CLASS_3),
    "classes of 95 and 5 %": partial(_crowd, shares=RARE),
    "classes of 95 and 5 %, 30 % lazy": partial(_lazy, shares=RARE),
    "16 options": partial(_crowd, classes=16),
    "16 options in pairs": _pairs,
    "a hard fifth": _hard,
    "four experts, others right in .6": partial(_crowd, chance=(HIGH,) * 4 + (0.6,) * (PEOPLE - 4)),
    "250 people, ten answers each": partial(_crowd, people=250),
    "ratings with near misses": _near,
    "30 % always say the first": partial(_lazy, shares=None),
}
