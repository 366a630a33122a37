"""Preferences over a text: the linear model of them, made-up ones, and a whole network that tunes a policy by them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from peer import features
from rlhf import synthetic_preferences
from rlhf.data import preference_set_statistics
from rlhf.data.preference_sets import PreferencePair
from rlhf.objectives.rule_rewards import vowel_share
from tests.peer.processes import LATE, command, demo
from training.data import default_text
from training.formats import checkpoint

TINY = ("model.width=16", "model.layers=1", "model.hidden=16", "model.context=64", "local_steps=1", "batch=2", "rounds=1")
TERMS = ("prompt_tokens=8", "response_tokens=8", "epochs=1", "local_steps=2", "batch=8")
FIGURES = {"algorithm", "beta", "rounds", "reference_value", "optimum", "value", "gap_closed", "kl", "score", "distinct_2"}


def said(count: int, wrong: float = 0.0) -> list[PreferencePair]:
    """Of two responses the one with `good` is the better one; the others' words say nothing. Some are turned around."""
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
    """At the least the slope is zero: for each feature, what the pairs pull is what the penalty holds."""
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
    """The hidden rule of 600 pairs; a tenth of them are turned around, and the pairs that are measured are not."""
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
    tie = [PreferencePair(b"1", "", "good", "bad", 500)]
    assert preference_set_statistics.word_count_accuracy(np.zeros(preference_set_statistics.FEATURES), tie) is None
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
        ("demo --rlhf toy --preferences pairs.jsonl", "--preferences pairs.jsonl: say --rlhf text with it"),
        ("demo --rlhf text --preferences nothing.jsonl", "nothing.jsonl: No such file or directory"),
        ("demo --rlhf text --set reward.batches=2", "'batches' is not a field of a job"),
        ("demo --rlhf text --set reward.score=first", "a score is read at one of last, mean"),
        ("demo --rlhf text --baseline", "--baseline is about training on text: leave it out with --rlhf text"),
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
    assert f"replay {rejected['liar-2']['replay']} × (re-executing it gave another update)" in told
    assert "│" not in told and "…" not in told, "a pipe gets whole lines, without a frame"
    found = report["rlhf"]
    assert found.keys() == FIGURES | {"response_tokens", "length_correlation", "pair_accuracy", "linear_accuracy"}
    assert found["optimum"] is None and found["gap_closed"] is None and found["linear_accuracy"] > 0.5 and found["kl"] > -1
    assert 0 < found["pair_accuracy"] < 1 and found["value"] == pytest.approx(found["score"] - found["beta"] * found["kl"])
    features.register_features()
    specs = [
        checkpoint.read_checkpoint(tmp_path / "run" / f"{name}.safetensors")[0] for name in ("policy", "reference", "reward")
    ]
    assert [spec.objective for spec in specs] == ["ppo", "ppo", "reward-mean"]
    assert 0 < found["beta"] < specs[0].decoded_settings.beta, "a policy that has hardly moved is held less"
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert len(samples) >= 64 and all(sample.keys() == {"prompt", "policy", "reference"} for sample in samples)
