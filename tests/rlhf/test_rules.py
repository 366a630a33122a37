from __future__ import annotations

import math

import numpy as np
import pytest

from rlhf.objectives import rule_rewards, toy_policies

SEEDS = range(5)


@pytest.mark.parametrize(
    ("text", "share"), [(b"aei", 1.0), (b"Eat 3 figs!\n", 3 / 7), (b"xyz", 0.0), (b"", 0.0), (b"12 \xff\xc3\xa9", 0.0)]
)
def test_vowels_count_among_latin_letters_alone(text: bytes, share: float) -> None:
    assert rule_rewards.RULES["vowels"].make(0)([], text) == share


def test_the_table_of_the_toy_is_that_of_its_hash() -> None:
    """The first entry of seed 0 in full: SHA-256("folkmoot/bigram/1" ‖ sixteen zero bytes) begins with these four."""
    table = np.array(rule_rewards.bigram_table(0))
    assert table[0, 0] == 0xE87B5C28 / 2**31 - 1
    assert table.shape == (6, 6) and (np.abs(table) <= 1).all() and len(np.unique(table)) == 36
    assert all(float(x * 2**31).is_integer() for x in table.flat)


@pytest.mark.parametrize("seed", SEEDS)
def test_all_responses_are_rewarded_as_each_alone(seed: int) -> None:
    responses, rewards, reward = (
        toy_policies.toy_responses(),
        toy_policies.toy_rewards(seed),
        rule_rewards.RULES["bigram"].make(seed),
    )
    assert len(responses) == len(np.unique(responses, axis=0)) == rule_rewards.TOY_RESPONSES == 7776
    for number in range(0, 7776, 7):
        assert reward(responses[number].tolist(), b"") == rewards[number]


def some_reference(seed: int) -> toy_policies.Float64Array:
    logits = np.random.default_rng(seed).normal(size=rule_rewards.TOY_RESPONSES)
    return logits - np.logaddexp.reduce(logits)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_optimum_is_reached_by_the_best_policy_and_by_no_other(seed: int) -> None:
    reference, rewards = some_reference(seed), toy_policies.toy_rewards(seed)
    optimum = toy_policies.optimal_value(reference, rewards)
    best = reference + (rewards - optimum) / rule_rewards.TOY_BETA
    assert math.fsum(np.exp(best)) == pytest.approx(1, abs=1e-12)
    assert toy_policies.policy_value(best, reference, rewards) == pytest.approx(optimum, abs=1e-12)
    assert toy_policies.gap_closed(best, reference, rewards) == pytest.approx(1, abs=1e-12)
    assert toy_policies.gap_closed(reference, reference, rewards) == 0
    for other in range(5):
        moved = best + 0.3 * np.random.default_rng(other).normal(size=len(best))
        moved -= np.logaddexp.reduce(moved)
        assert toy_policies.policy_value(moved, reference, rewards) < optimum - 1e-4


def test_a_policy_that_ignores_what_leaving_the_reference_costs_is_worse_than_the_best() -> None:
    reference, rewards = some_reference(0), toy_policies.toy_rewards(0)
    assert toy_policies.gap_closed(np.where(rewards == rewards.max(), 0.0, -700.0), reference, rewards) < 0.9
