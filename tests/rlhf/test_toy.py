"""The toy, whose best policy is known, and preferences over a text: whole networks tune a policy on both."""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protocol.errors import UserError
from protocol.sampling import SamplingOptions
from rlhf import synthetic_preferences
from rlhf.api.tuning_plan_builder import build_toy_spec
from rlhf.data import preference_set_statistics
from rlhf.data.preference_sets import PreferencePair
from rlhf.objectives import rule_rewards
from rlhf.objectives.rule_rewards import vowel_share
from rlhf.pytorch import policy_evaluation
from tests.peer.processes import LATE, command, demo
from training.data import default_text
from training.data.token_sequences import TokenizedText
from training.data.tokenizer import ByteTokenizer
from training.engines.pytorch.backend import BACKEND
from training.engines.pytorch.layers import KVCache
from training.engines.pytorch.model import GPT
from training.formats import checkpoint
from training.job_spec import JobSpec
from training.replicated.tensor_layout import initial_parameters
from training.transformer import FIRST_TOKEN_VECTOR

FIGURES = {"algorithm", "beta", "rounds", "reference_value", "optimum", "value", "gap_closed", "kl", "score"}
FIGURES |= {"distinct_2", "response_tokens", "length_correlation"}  # of the last round


@pytest.fixture(scope="module")
def spec() -> JobSpec:
    return build_toy_spec("rule:bigram", 2, "toy", {"seed": "100"}, 0)


def test_a_first_model_is_its_own_reference(spec: JobSpec) -> None:
    first = initial_parameters(spec)
    found = policy_evaluation.toy_metrics(spec, first, first)
    assert (found.gap_closed, found.kl) == (0, 0) and found.value == found.reference_value == found.score < found.optimum
    assert np.exp(policy_evaluation.toy_log_probabilities(spec, first)).sum() == pytest.approx(1, abs=1e-5), (
        "of all responses together"
    )


def test_its_tokens_are_no_text(spec: JobSpec) -> None:
    engine = BACKEND.open_engine(spec, TokenizedText.without_text(ByteTokenizer().token_bytes), ByteTokenizer(), None)
    with pytest.raises(UserError, match="the model of 'toy' cannot generate text: its 6 tokens"):
        engine.generate_text(initial_parameters(spec), b"The ", SamplingOptions())


def test_the_prompt_is_told_from_the_same_token_in_a_response(spec: JobSpec) -> None:
    """Attention cannot count equal tokens: without the vector the model cannot tell `0 0` from `0`."""
    model, zeros = GPT(spec), torch.full((1, 3), rule_rewards.TOY_PROMPT)
    with torch.no_grad():
        model.parameters.copy_(torch.from_numpy(initial_parameters(spec)))
        last = model.features(zeros)[0]
        torch.testing.assert_close(last[0], last[2])
        model.heads[FIRST_TOKEN_VECTOR].fill_(0.5)
        last = model.features(zeros)[0]
        assert (last[0] - last[1]).norm() > 0.1 and (last[1] - last[2]).norm() > 0.1
        cache = KVCache(spec.model)
        again = torch.cat([model.features(zeros[:, t : t + 1], cache) for t in range(3)], dim=1)[0]
    torch.testing.assert_close(again, last)


def test_without_a_base_only_a_reward_with_a_vocabulary_of_its_own_will_do() -> None:
    with pytest.raises(UserError, match=r"'rule:vowels' needs --base JOB.*; without a base, use rule:bigram"):
        build_toy_spec("rule:vowels", 2, "toy", {}, 0)


@pytest.mark.real("processes")
@pytest.mark.long
def test_a_demo_tunes_and_names_who_trained_on_another_reward(tmp_path: Path) -> None:
    words = ("--rlhf", "toy", "--attack", "other-reward", "--rounds", "2", "--set", "batch=32")
    status, report, told = demo(tmp_path, *words)
    assert status == 0, told
    rejected: dict[str, Any] = report["rejected"]
    assert {name for name, reasons in rejected.items() if reasons.keys() - LATE} == {"liar-2"}
    assert rejected["liar-2"]["replay"] > 0 and report["accepted"].get("liar-2", 0) == 0
    found = report["rlhf"]
    assert found.keys() == FIGURES | {"pair_accuracy", "linear_accuracy"}
    assert (found["algorithm"], found["beta"], found["rounds"], found["pair_accuracy"]) == ("ppo", 0.1, 2, None)
    assert found["reference_value"] < found["value"] < found["optimum"] and 0 < found["gap_closed"] < 1

    (spec, policy, _), (_, reference, origin) = (
        checkpoint.read_checkpoint(tmp_path / "run" / f"{name}.safetensors") for name in ("policy", "reference")
    )
    assert origin.round == 0 and (reference == initial_parameters(spec)).all()
    again = asdict(policy_evaluation.toy_metrics(spec, policy, reference))
    assert all(found[name] == pytest.approx(value, abs=1e-6) for name, value in again.items())
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert len(samples) >= 64 and all(sample.keys() == {"prompt", "policy", "reference"} for sample in samples)
    assert all(len(sample["policy"].split()) == rule_rewards.TOY_LENGTH and sample["prompt"] == "0" for sample in samples)


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
        policy_evaluation.toy_responses(),
        policy_evaluation.toy_rewards(seed),
        rule_rewards.RULES["bigram"].make(seed),
    )
    assert len(responses) == len(np.unique(responses, axis=0)) == rule_rewards.TOY_RESPONSES == 7776
    for number in range(0, 7776, 7):
        assert reward(responses[number].tolist(), b"") == rewards[number]


def some_reference(seed: int) -> policy_evaluation.Float64Array:
    logits = np.random.default_rng(seed).normal(size=rule_rewards.TOY_RESPONSES)
    return logits - np.logaddexp.reduce(logits)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_optimum_is_reached_by_the_best_policy_and_by_no_other(seed: int) -> None:
    reference, rewards = some_reference(seed), policy_evaluation.toy_rewards(seed)
    optimum = policy_evaluation.optimal_value(reference, rewards)
    best = reference + (rewards - optimum) / rule_rewards.TOY_BETA
    assert math.fsum(np.exp(best)) == pytest.approx(1, abs=1e-12)
    assert policy_evaluation.policy_value(best, reference, rewards) == pytest.approx(optimum, abs=1e-12)
    assert policy_evaluation.gap_closed(best, reference, rewards) == pytest.approx(1, abs=1e-12)
    assert policy_evaluation.gap_closed(reference, reference, rewards) == 0
    for other in range(5):
        moved = best + 0.3 * np.random.default_rng(other).normal(size=len(best))
        moved -= np.logaddexp.reduce(moved)
        assert policy_evaluation.policy_value(moved, reference, rewards) < optimum - 1e-4


def test_a_policy_that_ignores_what_leaving_the_reference_costs_is_worse_than_the_best() -> None:
    reference, rewards = some_reference(0), policy_evaluation.toy_rewards(0)
    assert policy_evaluation.gap_closed(np.where(rewards == rewards.max(), 0.0, -700.0), reference, rewards) < 0.9


TINY = ("model.width=16", "model.layers=1", "model.hidden=16", "model.context=64", "local_steps=1", "batch=2", "rounds=1")
TERMS = ("prompt_tokens=8", "response_tokens=8", "epochs=1", "local_steps=2", "batch=8")


def said(count: int, wrong: float = 0.0) -> list[PreferencePair]:
    """Return pairs in which the response with `good` is preferred, and a share `wrong` is reversed. Other words are random."""
    draw, pairs = random.Random(0), list[PreferencePair]()
    for number in range(count):
        words = [draw.choices("abcdefgh", k=6) for _ in range(2)]
        words[0][draw.randrange(6)], words[1][draw.randrange(6)] = "good", "bad"
        first = 1000 if draw.random() >= wrong else 0
        pairs.append(PreferencePair(number.to_bytes(8, "big"), f"p{number}", *(" ".join(of) for of in words), first))
    return pairs


def test_a_linear_model_learns_words_in_spite_of_noise() -> None:
    weights = preference_set_statistics.fit_word_counts(said(400, wrong=0.25))
    assert preference_set_statistics.word_count_accuracy(weights, said(100)) == 1.0
    good, bad = preference_set_statistics.score_texts(weights, ("good", "bad"))
    assert good > 0 > bad


def test_the_weights_are_where_the_loss_is_least() -> None:
    """At the minimum the slope is zero: for each feature the gradients of the pairs and of the penalty cancel."""
    pairs, penalty = said(50, wrong=0.25), 0.1
    weights = preference_set_statistics._fit(preference_set_statistics._differences(pairs), penalty)
    pulls = np.zeros(preference_set_statistics.FEATURES)
    for pair in pairs:
        first, second = preference_set_statistics.score_texts(weights, (pair.first, pair.second))
        miss = pair.p / 1000 - 1 / (1 + np.exp(second - first))
        for sign, text in ((1, pair.first), (-1, pair.second)):
            for feature, count in preference_set_statistics.hash_features(text).items():
                pulls[feature] += sign * count * miss
    np.testing.assert_allclose(pulls, penalty * len(pairs) * weights, atol=1e-3)


def test_a_linear_model_learns_a_weight_for_each_word_by_how_often_it_stands_there() -> None:
    """The model learns the hidden rule from 600 pairs, a tenth of them reversed. The pairs for measuring are not reversed."""
    draw, pairs = random.Random(1), list[PreferencePair]()
    weights = {word: draw.gauss(0, 1) for word in "abcdefghijklmnopqrstuvwxyz"}
    for number in range(1600):
        texts = [draw.choices(list(weights), k=12) for _ in range(2)]
        is_better = sum(map(weights.get, texts[0])) > sum(map(weights.get, texts[1]))
        is_turned = number < 600 and draw.random() < 0.1
        pairs.append(
            PreferencePair(number.to_bytes(8, "big"), f"p{number}", *map(" ".join, texts), 1000 * (is_better is not is_turned))
        )
    assert (
        preference_set_statistics.word_count_accuracy(preference_set_statistics.fit_word_counts(pairs[:600]), pairs[600:]) or 0.0
    ) > 0.92, "0.84 by which words are there at all"


def test_ties_count_nowhere() -> None:
    assert (
        preference_set_statistics.word_count_accuracy(
            np.zeros(preference_set_statistics.FEATURES), [PreferencePair(b"1", "", "good", "bad", 500)]
        )
        is None
    )
    assert preference_set_statistics.word_count_accuracy(np.zeros(preference_set_statistics.FEATURES), said(4)) == 0.5, (
        "equal scores count half"
    )


def test_made_up_preferences_like_vowels_and_are_wrong_now_and_then() -> None:
    pairs = list(synthetic_preferences.synthetic_pairs(default_text.default_text(), 400))
    right = [vowel_share((), pair["chosen"].encode()) > vowel_share((), pair["rejected"].encode()) for pair in pairs]
    assert 0.85 < sum(right) / len(right) < 0.95
    text = default_text.default_text().decode("ascii", errors="ignore")
    continued = [pair["prompt"] + pair["chosen"] in text for pair in pairs]
    assert 0.4 < sum(continued) / len(continued) < 0.6, "that a response continues its prompt says nothing"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("demo --rlhf toy --preferences pairs.jsonl", "--preferences pairs.jsonl needs --rlhf text"),
        ("demo --rlhf text --preferences nothing.jsonl", "nothing.jsonl: No such file or directory"),
        ("demo --rlhf text --set reward.batches=2", "unknown job field 'batches'"),
        ("demo --rlhf text --set reward.score=first", "reward.score=first: must be one of last, mean"),
        ("demo --rlhf text --baseline", "--baseline cannot be combined with --rlhf text: leave one out"),
    ],
)
def test_what_no_demo_can_have_is_told_at_once(words: str, told: str, tmp_path: Path) -> None:
    status, _, errors = command(*words.split(), "--report", str(tmp_path / "run"))
    assert status and told in errors
    assert list(tmp_path.iterdir()) == []


@pytest.mark.real("processes")
@pytest.mark.long
def test_a_demo_goes_from_a_text_over_preferences_to_a_policy(tmp_path: Path) -> None:
    settings = [f"base.{field}" for field in (*TINY, "vocabulary=300")] + [
        "reward.local_steps=2",
        "reward.batch=4",
        "reward.rounds=1",
        "reward.score=mean",
        "stop_token=none",
        "kl_target=9",
        *TERMS,
    ]
    _, report, told = demo(tmp_path, "--rlhf", "text", "--rounds", "2", "--set", *settings)
    assert report["failures"] in ([], ["the tuned policy is no better than its reference"]), told  # after two rounds
    rejected = report["rejected"]
    assert {name for name, reasons in rejected.items() if reasons.keys() - LATE} == {"liar-2"}
    assert f"{rejected['liar-2']['replay']} × replay (re-execution gave a different update)" in told
    assert "│" not in told and "…" not in told, "a pipe gets whole lines, without a frame"
    found = report["rlhf"]
    assert found.keys() == FIGURES | {"pair_accuracy", "linear_accuracy"}
    assert found["optimum"] is None and found["gap_closed"] is None and found["linear_accuracy"] > 0.5 and found["kl"] > -1
    assert 0 < found["pair_accuracy"] < 1 and found["value"] == pytest.approx(found["score"] - found["beta"] * found["kl"])
    specs = [
        checkpoint.read_checkpoint(tmp_path / "run" / f"{name}.safetensors")[0] for name in ("policy", "reference", "reward")
    ]
    assert [spec.objective for spec in specs] == ["ppo", "ppo", "reward-mean"]
    assert 0 < found["beta"] < specs[0].decoded_settings.beta, "a policy that has hardly moved is held less"
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert len(samples) >= 64 and all(sample.keys() == {"prompt", "policy", "reference"} for sample in samples)
