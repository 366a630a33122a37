"""Who is drawn to audit what: shares, independence, and what liars can do about it."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator
from itertools import combinations

import pytest

from consensus.quorum import faults_tolerated, quorum
from ledger.draws import Commitment, commitment_to, draw, matching, ticket, tickets_for

JOB = bytes(32)
KEYS = [bytes([i]) * 32 for i in range(10)]
STEPS = 30
CHEATED = 0.4  # share of a liar's steps that are not honest
AUDITORS = 2
EFFECTIVE = 8  # of ten rounds: the first is foreseeable, and reporting and judging the last takes another


def tickets(number: int, trainer: bytes, auditors: list[bytes], seed: int = 0) -> dict[bytes, bytes]:
    chance = random.Random(seed * 1_000_003 + number)
    return tickets_for(JOB, number, {key: chance.randbytes(16) for key in KEYS}, trainer, auditors)


def test_as_many_distinct_reexecutors_are_drawn_as_are_wanted_each_with_a_step_of_its_own() -> None:
    drawn = [draw(tickets(number, KEYS[0], KEYS[1:7]), 3, 1.0, STEPS) for number in range(2_000)]
    assert {len(steps) for steps in drawn} == {3}
    counts = Counter(key for steps in drawn for key in steps)
    assert counts.keys() == set(KEYS[1:7]) and max(counts.values()) < 1.15 * min(counts.values())
    steps_drawn = Counter(step for steps in drawn for step in steps.values())
    assert steps_drawn.keys() == set(range(STEPS)) and max(steps_drawn.values()) < 1.5 * min(steps_drawn.values())
    same = sum(len(set(steps.values())) < 3 for steps in drawn) / len(drawn)
    assert abs(same - (1 - (1 - 1 / STEPS) * (1 - 2 / STEPS))) < 0.03  # as often as independent steps coincide


def test_where_fewer_can_reexecute_than_are_wanted_all_of_them_do() -> None:
    assert draw(tickets(0, KEYS[0], KEYS[1:3]), 8, 1.0, STEPS).keys() == set(KEYS[1:3])
    assert draw({}, 8, 1.0, STEPS) == {}


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5])
def test_each_of_the_drawn_replays_with_the_probability_that_the_job_says(rate: float) -> None:
    drawn = [draw(tickets(number, KEYS[0], KEYS[1:]), AUDITORS, rate, STEPS) for number in range(3_000)]
    assert abs(sum(map(len, drawn)) / (AUDITORS * len(drawn)) - rate) < 0.02
    both = sum(len(steps) == AUDITORS for steps in drawn) / len(drawn)
    assert abs(both - rate**2) < 0.03


def test_only_a_nonce_that_its_voter_had_committed_to_counts() -> None:
    nonces = {key: key[:16] for key in KEYS[:4]}
    commitments = {key: Commitment(3, commitment_to(nonces[key])) for key in KEYS[:3]}
    assert matching(nonces, commitments) == {key: nonces[key] for key in KEYS[:3]}
    assert matching({**nonces, KEYS[1]: bytes(16)}, commitments).keys() == {KEYS[0], KEYS[2]}
    assert matching({KEYS[0]: nonces[KEYS[1]]}, commitments) == {}


def test_who_withholds_its_nonce_changes_nobody_elses_ticket() -> None:
    everybody = tickets(7, KEYS[0], KEYS[1:])
    without = {key: data for key, data in everybody.items() if key != KEYS[4]}
    before, after = draw(everybody, 4, 1.0, STEPS), draw(without, 4, 1.0, STEPS)
    assert all(after[key] == before[key] for key in before.keys() - {KEYS[4]})


def test_a_copied_commitment_gives_another_ticket() -> None:
    assert ticket(JOB, 1, bytes(16), KEYS[1], KEYS[0]) != ticket(JOB, 1, bytes(16), KEYS[2], KEYS[0])


def test_tickets_differ_by_job_round_auditor_trainer_and_nonce() -> None:
    places = [
        (JOB, 1, bytes(16), KEYS[1], KEYS[0]),
        (KEYS[9], 1, bytes(16), KEYS[1], KEYS[0]),
        (JOB, 2, bytes(16), KEYS[1], KEYS[0]),
        (JOB, 1, KEYS[1][:16], KEYS[1], KEYS[0]),
        (JOB, 1, bytes(16), KEYS[2], KEYS[0]),
        (JOB, 1, bytes(16), KEYS[1], KEYS[3]),
    ]
    assert len({ticket(*place) for place in places}) == len(places)


# How probable it is that a liar is found out -----------------------------------------------------------------------------


def escape(n: int, auditors: int = AUDITORS, rate: float = 1.0) -> float:
    """Probability that one round's audits of a liar's proposal find nothing: f liars, who as auditors say that all is well."""
    others, colluders = n - 1, faults_tolerated(n) - 1
    return sum(
        math.comb(others - colluders, honest)
        * math.comb(colluders, auditors - honest)
        / math.comb(others, auditors)
        * (1 - rate * CHEATED) ** honest
        for honest in range(auditors + 1)
    )


class Round:
    """A liar's proposal in one round of n voters, the first f of whom are liars."""

    def __init__(self, n: int, chance: random.Random, rate: float = 1.0) -> None:
        self.n, self.rate = n, rate
        self.liars, self.honest = KEYS[: faults_tolerated(n)], KEYS[faults_tolerated(n) : n]
        nonces = {key: chance.randbytes(16) for key in KEYS[:n]}
        self.tickets = tickets_for(JOB, 5, nonces, self.liars[0], KEYS[1:n])
        self.cheated = frozenset(step for step in range(STEPS) if chance.random() < CHEATED)

    def escapes(self, left_out: tuple[bytes, ...] = ()) -> bool:
        here = {key: data for key, data in self.tickets.items() if key not in left_out}
        steps = draw(here, AUDITORS, self.rate, STEPS)
        return not any(key in self.honest and step in self.cheated for key, step in steps.items())

    def choices(self, leader: bool) -> Iterator[tuple[bytes, ...]]:
        """Whose nonces liars can keep out: their own, and as leader those of the ballots that a closing does not need."""
        for count in range(self.n - quorum(self.n) + 1 if leader else 1):
            for left_out in combinations(self.honest, count):
                for withheld in range(len(self.liars)):
                    yield from ((*left_out, *own) for own in combinations(self.liars[1:], withheld))

    def escapes_by_choice(self, leader: bool) -> bool:
        return any(self.escapes(left_out) for left_out in self.choices(leader))


def share(n: int, count: int, leader: bool | None, rate: float = 1.0) -> float:
    """Of rounds that a liar survives; `leader` None: it makes no choice."""
    chance = random.Random(n)
    rounds = [Round(n, chance, rate) for _ in range(count)]
    return sum(it.escapes() if leader is None else it.escapes_by_choice(leader) for it in rounds) / count


@pytest.mark.parametrize("n", [4, 7, 10])
def test_the_drawing_finds_a_liar_as_often_as_the_closed_form_says(n: int) -> None:
    assert abs(share(n, 2_000, None) - escape(n)) < 0.04


@pytest.mark.parametrize(("n", "expected"), [(4, 0.36), (7, 0.44), (10, 0.471)])
def test_who_cheats_in_four_of_ten_steps_survives_ten_rounds_with_less_than_one_in_a_hundred(n: int, expected: float) -> None:
    assert escape(n) == pytest.approx(expected, abs=0.001)
    assert escape(n) ** EFFECTIVE < 0.01


@pytest.mark.parametrize("n", [4, 7, 10])
def test_a_tenth_of_the_audits_finds_it_too_only_later(n: int) -> None:
    rounds = math.ceil(math.log(0.01) / math.log(escape(n, rate=0.1)))
    assert 50 < rounds < 100
    assert abs(share(n, 2_000, None, rate=0.1) - escape(n, rate=0.1)) < 0.02


@pytest.mark.parametrize("n", [4, 7, 10])
def test_liars_that_withhold_their_nonces_gain_next_to_nothing(n: int) -> None:
    """With one seed of all nonces each liar would double the draws to choose from: .36 → .59, .44 → .90, .471 → .994."""
    assert share(n, 1_000, False) < escape(n) + 0.06
    one_seed = 1 - (1 - escape(n)) ** 2 ** faults_tolerated(n)
    assert one_seed == pytest.approx({4: 0.590, 7: 0.902, 10: 0.994}[n], abs=0.001)


@pytest.mark.parametrize(("n", "expected"), [(4, 0.64), (7, 0.89), (10, 0.97)])
def test_a_lying_leader_leaves_out_the_ballots_that_would_find_it_and_still_cannot_for_long(n: int, expected: float) -> None:
    led = share(n, 300 if n == 10 else 800, True)
    assert abs(led - expected) < 0.05
    of_leaders = faults_tolerated(n) / n
    assert (of_leaders * led + (1 - of_leaders) * escape(n)) ** 10 < 0.015
