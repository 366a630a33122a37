from __future__ import annotations

from dataclasses import replace

import pytest

from training.job_spec import INNER_RATE_MIN, JobSpec
from training.replicated.outer_optimizer import inner_rate

JOB = JobSpec(name="j", data=bytes(32), inner_rate=1.0, inner_rate_floor=0.25)


def rates(**fields: object) -> list[float]:
    spec = replace(JOB, **fields).validated()  # type: ignore[arg-type]
    return [inner_rate(spec, round) for round in range(spec.rounds)]


def test_without_a_number_of_decay_rounds_the_rate_falls_from_the_end_of_the_warm_up_to_the_last_round() -> None:
    assert rates(warmup_rounds=3, rounds=8) == [0.25, 0.5, 0.75, 1.0, 0.8125, 0.625, 0.4375, 0.25]


def test_warm_up_then_constant_then_decay_over_the_last_rounds() -> None:
    assert rates(warmup_rounds=1, decay_rounds=4, rounds=9) == [0.5, 1, 1, 1, 1, 0.8125, 0.625, 0.4375, 0.25]


def test_no_decay_rounds_keep_the_peak_to_the_end() -> None:
    assert rates(warmup_rounds=1, decay_rounds=0, rounds=5) == [0.5, 1, 1, 1, 1]


def test_warm_up_may_meet_the_decay() -> None:
    assert rates(warmup_rounds=3, decay_rounds=3, rounds=6) == [0.25, 0.5, 0.75, 0.75, 0.5, 0.25]
    assert rates(warmup_rounds=0, decay_rounds=6, rounds=6) == [0.875, 0.75, 0.625, 0.5, 0.375, 0.25]


def test_the_rate_is_exactly_the_rounded_operations_that_are_written() -> None:
    spec = replace(JOB, inner_rate=3e-3, inner_rate_floor=0.1, warmup_rounds=2, rounds=60)
    exact = [inner_rate(spec, round).hex() for round in (0, 1, 2, 30, 59)]
    assert exact == GOLDEN


GOLDEN = [
    "0x1.0624dd2f1a9fcp-10",
    "0x1.0624dd2f1a9fcp-9",
    "0x1.89374bc6a7efap-9",
    "0x1.b6bf0bcacb8ccp-10",
    "0x1.3a92a30553262p-12",
]


@pytest.mark.parametrize("rounds, warmup", [(1, 0), (1, 2), (2, 2), (3, 2), (1, 1)])
def test_short_jobs_have_a_positive_rate_in_every_round(rounds: int, warmup: int) -> None:
    spec = replace(JOB, rounds=rounds, warmup_rounds=warmup)
    assert all(0 < inner_rate(spec, round) <= spec.inner_rate for round in range(rounds + 1))


def test_no_round_but_the_last_has_a_rate_below_what_float32_steps_are_told_apart_at() -> None:
    long = rates(inner_rate=3e-4, inner_rate_floor=0.0, warmup_rounds=0, rounds=2000)
    assert long[-2] == long[-3] == INNER_RATE_MIN < long[0] and long[-1] == 0
    assert rates(inner_rate=INNER_RATE_MIN, warmup_rounds=5, rounds=5) == [INNER_RATE_MIN] * 5


@pytest.mark.parametrize("decay", [None, 3])
def test_a_floor_of_zero_is_reached_in_the_last_round(decay: int | None) -> None:
    *before, last = rates(inner_rate_floor=0.0, decay_rounds=decay, rounds=8)
    assert last == 0 < min(before)
