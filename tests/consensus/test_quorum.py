from __future__ import annotations

import pytest

from consensus.voter_set import faults_tolerated, quorum
from protocol.limits import VOTERS_MAX

SIZES = range(1, VOTERS_MAX + 1)


@pytest.mark.parametrize(
    ("n", "f", "q"), [(1, 0, 1), (2, 0, 2), (3, 0, 2), (4, 1, 3), (5, 1, 4), (6, 1, 4), (7, 2, 5), (10, 3, 7)]
)
def test_small_networks(n: int, f: int, q: int) -> None:
    assert (faults_tolerated(n), quorum(n)) == (f, q)


def test_two_quorums_share_an_honest_voter() -> None:
    assert all(2 * quorum(n) - n >= faults_tolerated(n) + 1 for n in SIZES)


def test_no_smaller_quorum_would_do() -> None:
    assert all(2 * (quorum(n) - 1) - n < faults_tolerated(n) + 1 for n in SIZES)


def test_the_honest_voters_alone_are_a_quorum() -> None:
    assert all(quorum(n) <= n - faults_tolerated(n) for n in SIZES)


def test_f_is_the_largest_number_below_a_third() -> None:
    assert all(3 * faults_tolerated(n) < n <= 3 * faults_tolerated(n) + 3 for n in SIZES)
