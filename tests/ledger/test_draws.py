"""The draw of auditors: shares, independence, and attacks by liars."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from itertools import combinations

import pytest

from consensus.voter_set import faults_tolerated, quorum
from ledger.audits.sortition import (
    NonceCommitment,
    commit_nonce,
    draw_auditors,
    lottery_tickets,
    matching_reveals,
    sortition_ticket,
)
from tests.ledger.chances import AUDITORS, EFFECTIVE, RATE, escape, escape_led

JOB = bytes(32)
KEYS = [bytes([i]) * 32 for i in range(10)]


def tickets(number: int, trainer: bytes, auditors: list[bytes], seed: int = 0) -> dict[bytes, bytes]:
    chance = random.Random(seed * 1_000_003 + number)
    return lottery_tickets(JOB, number, {key: chance.randbytes(16) for key in KEYS}, trainer, auditors)


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 1.0])
def test_as_many_are_drawn_on_average_as_the_job_says(rate: float) -> None:
    drawn = [draw_auditors(tickets(number, KEYS[0], KEYS[1:7]), 6, AUDITORS, rate) for number in range(4_000)]
    assert sum(map(len, drawn)) / len(drawn) == pytest.approx(rate * AUDITORS, abs=0.06)
    share = rate * AUDITORS / 6
    for first, second in combinations(KEYS[1:7], 2):
        assert sum({first, second} <= set(keys) for keys in drawn) / len(drawn) == pytest.approx(share**2, abs=0.03)


def test_where_fewer_can_reexecute_than_are_wanted_all_of_them_do() -> None:
    assert draw_auditors(tickets(0, KEYS[0], KEYS[1:3]), 2, 8, 1.0) == tuple(KEYS[1:3])
    assert draw_auditors({}, 0, 8, 1.0) == ()


def test_the_probability_is_the_product_divided_by_the_reexecutors_in_that_order() -> None:
    """In doubles, 0.9 × 7 / 9 differs from 0.9 × (7 / 9). A peer that computes it otherwise has another state."""
    bound = int(0.9 * 7 / 9 * 2.0**64)
    assert bound != int(0.9 * (7 / 9) * 2.0**64)
    lots = {KEYS[1]: bound - 1, KEYS[2]: bound}
    assert draw_auditors({key: lot.to_bytes(8, "big") + bytes(24) for key, lot in lots.items()}, 9, 7, 0.9) == (KEYS[1],)


def test_only_a_nonce_that_its_voter_had_committed_to_counts() -> None:
    nonces = {key: key[:16] for key in KEYS[:4]}
    commitments = {key: NonceCommitment(3, commit_nonce(nonces[key])) for key in KEYS[:3]}
    assert matching_reveals(nonces, commitments) == {key: nonces[key] for key in KEYS[:3]}
    assert matching_reveals({**nonces, KEYS[1]: bytes(16)}, commitments).keys() == {KEYS[0], KEYS[2]}
    assert matching_reveals({KEYS[0]: nonces[KEYS[1]]}, commitments) == {}


def test_who_withholds_or_chooses_its_nonce_changes_its_own_draws_alone() -> None:
    """2,000 tries per round let liars choose their own draws. With places for the lowest tickets, they would choose all draws."""
    liars, honest = KEYS[1:3], KEYS[3:]
    for number in range(20):
        fair = tickets(number, KEYS[0], KEYS[1:])
        tries = [tickets(number, KEYS[0], liars, seed) for seed in range(1, 2_001)]
        ground = {**fair, **{key: min(tried[key] for tried in tries) for key in liars}}
        silent = {key: fair[key] for key in honest}
        alone, *others = (draw_auditors(there, 9, AUDITORS, 1.0) for there in (silent, fair, ground))
        for drawn in others:
            assert tuple(key for key in drawn if key in honest) == alone
        assert set(liars) <= set(drawn)


def test_a_copied_commitment_gives_another_ticket() -> None:
    assert sortition_ticket(JOB, 1, bytes(16), KEYS[1], KEYS[0]) != sortition_ticket(JOB, 1, bytes(16), KEYS[2], KEYS[0])


def test_tickets_differ_by_job_round_auditor_trainer_and_nonce() -> None:
    places = [
        (JOB, 1, bytes(16), KEYS[1], KEYS[0]),
        (KEYS[9], 1, bytes(16), KEYS[1], KEYS[0]),
        (JOB, 2, bytes(16), KEYS[1], KEYS[0]),
        (JOB, 1, KEYS[1][:16], KEYS[1], KEYS[0]),
        (JOB, 1, bytes(16), KEYS[2], KEYS[0]),
        (JOB, 1, bytes(16), KEYS[1], KEYS[3]),
    ]
    assert len({sortition_ticket(*place) for place in places}) == len(places)


# Probability of an audit of a liar ---------------------------------------------------------------------------------------


class Round:
    """A liar's proposal in one round of n voters. The first f voters are liars."""

    def __init__(self, n: int, chance: random.Random, rate: float) -> None:
        self.n, self.rate = n, rate
        self.liars, self.honest = KEYS[: faults_tolerated(n)], KEYS[faults_tolerated(n) : n]
        self.tickets = lottery_tickets(JOB, 5, {key: chance.randbytes(16) for key in KEYS[:n]}, self.liars[0], KEYS[1:n])

    def escapes(self, left_out: tuple[bytes, ...] = ()) -> bool:
        here = {key: data for key, data in self.tickets.items() if key not in left_out}
        return set(draw_auditors(here, self.n - 1, AUDITORS, self.rate)).isdisjoint(self.honest)

    def choices(self, leader: bool) -> Iterator[tuple[bytes, ...]]:
        """Yield the nonces that liars can omit: their own, and as leader those of ballots that a closing does not need."""
        for count in range(self.n - quorum(self.n) + 1 if leader else 1):
            for left_out in combinations(self.honest, count):
                for withheld in range(len(self.liars)):
                    yield from ((*left_out, *own) for own in combinations(self.liars[1:], withheld))

    def escapes_by_choice(self, leader: bool) -> bool:
        return any(self.escapes(left_out) for left_out in self.choices(leader))


def share(n: int, count: int, leader: bool | None, rate: float = RATE) -> float:
    """Return the share of rounds in which a liar is not found. It makes no choice if `leader` is None."""
    chance = random.Random(n)
    rounds = [Round(n, chance, rate) for _ in range(count)]
    return sum(it.escapes() if leader is None else it.escapes_by_choice(leader) for it in rounds) / count


@pytest.mark.parametrize("n", [4, 7, 10])
def test_the_drawing_finds_a_liar_as_often_as_the_closed_form_says(n: int) -> None:
    assert share(n, 4_000, None) == pytest.approx(escape(n), abs=0.02)


@pytest.mark.parametrize(("n", "expected"), [(4, 0.394), (7, 0.489), (10, 0.521)])
def test_a_liar_survives_ten_rounds_at_a_rate_of_two_fifths_in_less_than_one_of_a_hundred_cases(n: int, expected: float) -> None:
    assert escape(n) == pytest.approx(expected, abs=0.001)
    assert escape(n) ** EFFECTIVE < 0.01


@pytest.mark.parametrize("n", [4, 7, 10])
def test_a_tenth_of_the_audits_finds_it_too_only_later(n: int) -> None:
    assert 50 < math.ceil(math.log(0.01) / math.log(escape(n, rate=RATE / 10))) < 100
    assert share(n, 4_000, None, rate=RATE / 10) == pytest.approx(escape(n, rate=RATE / 10), abs=0.02)


@pytest.mark.parametrize("n", [4, 7, 10])
def test_liars_that_withhold_their_nonces_gain_nothing(n: int) -> None:
    """With one seed of all nonces each liar would double its choice of draws: 0.394 → 0.633, 0.489 → 0.932, 0.521 → 0.997."""
    assert share(n, 500, False) == share(n, 500, None)
    one_seed = 1 - (1 - escape(n)) ** 2 ** faults_tolerated(n)
    assert one_seed == pytest.approx({4: 0.633, 7: 0.932, 10: 0.997}[n], abs=0.001)


@pytest.mark.parametrize(("n", "expected"), [(4, 0.825), (7, 0.980), (10, 0.998)])
def test_a_lying_leader_leaves_out_the_ballots_that_would_find_its_like(n: int, expected: float) -> None:
    """This is the chance of the first draw. Omitted nonces are drawn with the next ballots, see `test_audits`."""
    assert escape_led(n) == pytest.approx(expected, abs=0.001)
    assert share(n, 300 if n == 10 else 800, True) == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize(("n", "expected"), [(4, 0.538), (7, 0.651), (10, 0.689)])
def test_who_was_left_out_is_foreseen_in_the_next_round_which_is_all_that_a_leader_gains(n: int, expected: float) -> None:
    """If liars lead in their share of the rounds, a liar escapes eight rounds with probability 0.001, 0.007 and 0.011."""
    known = escape(n, missing=n - quorum(n))
    assert known == pytest.approx(expected, abs=0.001)
    of_leaders = faults_tolerated(n) / n
    assert (of_leaders * known + (1 - of_leaders) * escape(n)) ** EFFECTIVE < 0.012
