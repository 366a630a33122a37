"""Closed forms of the probability that the drawn auditors find a liar."""

from __future__ import annotations

import math

from consensus.voter_set import faults_tolerated, quorum

RATE = 0.4  # `audit_rate`
AUDITORS = 2
EFFECTIVE = 8  # of ten rounds: the first is foreseeable, and the last takes one more round to report and to judge


def found_by_one(n: int, rate: float = RATE) -> float:
    """Probability that a given honest re-executor is drawn for a liar's proposal in one round."""
    return min(1.0, rate * AUDITORS / (n - 1))


def escape(n: int, rate: float = RATE, missing: int = 0) -> float:
    """Probability that one round's audits of a liar's proposal find nothing.

    The f liars report no fault as auditors, and `missing` honest voters are not drawn.
    """
    return (1 - found_by_one(n, rate)) ** (n - faults_tolerated(n) - missing)


def escape_led(n: int) -> float:
    """Probability as in `escape`, if a liar closes the round, sees all reveals, and omits the n − q most dangerous ballots."""
    honest, found = n - faults_tolerated(n), found_by_one(n)
    return sum(math.comb(honest, k) * found**k * (1 - found) ** (honest - k) for k in range(n - quorum(n) + 1))
