"""Accuracy of a model on held-out pairs: the count, its interval, and the test whether the model is better than chance."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Final

from consensus.voter_set import VoterSet
from protocol.codec import Between

# Names of the metrics of a model that was trained on pairs, and of the statistics of its preference set.
ACCURACY: Final = "held_out_accuracy"
CALIBRATION: Final = "calibration_error"
IDENTICAL: Final = "identical_pairs"
CONTRADICTORY: Final = "contradictory_pairs"
WORD_COUNT: Final = "word_count_accuracy"
PAIRS: Final = "held_out_pairs"  # number of held-out pairs without ties

MEASURED_PAIRS_MAX: Final = 1_024  # held-out pairs that are measured: they are evenly spaced among all held-out pairs
Z: Final = Fraction(196, 100)  # half the width of the 95 % interval of a normal distribution, in deviations


@dataclass(frozen=True, slots=True)
class PairAccuracy:
    """Accuracy of a model as integers: number of held-out pairs, and number of pairs that the model ranks as people do.

    Ties are left out.
    """

    # correct ranks in half pairs: two for each pair that is ranked as by people, one for equal scores
    halves: Annotated[int, Between(0, 2 * MEASURED_PAIRS_MAX)]
    pairs: Annotated[int, Between(0, MEASURED_PAIRS_MAX)]

    @classmethod
    def from_share(cls, share: float, pairs: int) -> PairAccuracy:
        return cls(round(2 * share * pairs), pairs)

    @property
    def share(self) -> float:
        return self.halves / (2 * self.pairs) if self.pairs else 0.5

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % score interval of the accuracy (Wilson 1927), or 0 to 1 without pairs."""
        if not self.pairs:
            return 0.0, 1.0
        z, n, p = float(Z), self.pairs, self.share
        centre, scale = p + z * z / (2 * n), 1 + z * z / n
        margin = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return max(0.0, (centre - margin) / scale), min(1.0, (centre + margin) / scale)

    @property
    def is_better_than_chance(self) -> bool:
        """True if the 95 % interval lies above 1/2. The arithmetic is exact, so all peers get the same result."""
        return self.halves > self.pairs and (self.halves - self.pairs) ** 2 > Z * Z * self.pairs

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.share:.2f} of {self.pairs} pairs, interval {low:.2f}–{high:.2f}"


def can_beat_chance(pairs: int) -> bool:
    """Return True if a perfect model would be better than chance on this number of pairs."""
    return PairAccuracy(2 * min(pairs, MEASURED_PAIRS_MAX), min(pairs, MEASURED_PAIRS_MAX)).is_better_than_chance


def agreed_accuracy(reports: Mapping[bytes, PairAccuracy], voters: Iterable[bytes]) -> PairAccuracy | None:
    """Return the accuracy of a model if f + 1 voters agree that it is, or is not, better than chance. Return None otherwise.

    At least one of f + 1 voters is honest. The result is the median of the agreeing reports, or the lower of two middle ones.
    """
    known = VoterSet.from_keys(voters)
    reported = [reports[voter] for voter in known.keys if voter in reports]
    for is_better in (False, True):
        alike = sorted((found for found in reported if found.is_better_than_chance is is_better), key=lambda found: found.share)
        if len(alike) > known.faults_tolerated:
            return alike[(len(alike) - 1) // 2]
    return None
