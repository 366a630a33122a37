"""From reviews to preferences, and what a judge says of responses."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np

from benchmarks import reviews, rlhf_text
from rlhf.data import word_count_baseline
from training.data.tokenizer import ByteTokenizer

COUNT = 40
LONGEST = 1_000  # tokens: no pair is left out
SAID = {1: "What a good film this is! I liked every minute of it", 0: "What a bad film this was! I hated every minute of it"}


def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "reviews.csv"
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(("text", "label", "source"))
        for number in range(COUNT):
            label = number % 2
            table.writerow((f"Number {number}.<br />" + f"{SAID[label]}, and {number} more. " * 8, label, "imdb"))
        table.writerow(("short and elsewhere", 1, "rotten_tomatoes"))
    return path


def test_preferences_of_reviews(tmp_path: Path) -> None:
    ours, others = reviews.halves(corpus(tmp_path))
    assert len(ours) + len(others) == COUNT and len(ours) > 5 < len(others), "only those that are long"
    assert not {review.text for review in ours} & {review.text for review in others}
    assert all(review.likes == ("good" in review.text) and "<br" not in review.text for review in ours)
    made = [list(reviews.pairs(ours, 200, wrong, ByteTokenizer(), LONGEST)) for wrong in (0, 250)]
    assert all("bad" not in pair.first and "good" not in pair.second for pair in made[0])
    turned = [(a.first, a.second) == (b.second, b.first) for a, b in zip(*made, strict=True)]
    assert 30 < sum(turned) < 70, "a quarter of 200"
    kind = [not {"bad", "hated", "was!"} & set(pair.prompt.split()) for pair in made[0]]
    assert 60 < sum(kind) < 140, "prompts come from either side alike"
    longest = max(len(pair.prompt + response) for pair in made[0] for response in (pair.first, pair.second))
    assert len(list(reviews.pairs(ours, 20, 0, ByteTokenizer(), longest - 1))) == 20, "too long ones are passed over"


def test_a_judge_prefers_what_reads_kinder(tmp_path: Path) -> None:
    samples = [("good good", "bad bad"), ("good film", "good film"), ("bad", "good")]
    file = tmp_path / "samples.jsonl"
    lines = [json.dumps({"prompt": "", "policy": ours, "reference": theirs}) for ours, theirs in samples]
    file.write_text("\n".join(lines))
    judge = np.zeros(word_count_baseline.FEATURES)
    judge[list(word_count_baseline.hash_features("good"))] = 1.0
    assert rlhf_text.judged(judge, file) == {"preferred": 0.5, "distinct_2": 1.0, "reference_distinct_2": 1.0}
    assert rlhf_text.distinct(["a b a b"]) == 2 / 3 and rlhf_text.distinct(["a"]) == 0.0


def test_what_is_set_of_the_jobs_counts() -> None:
    usual, said = rlhf_text.settings([]), rlhf_text.settings(["beta=0.3", "reward.rounds=7"])
    assert "base.vocabulary=8192" in usual and "reward.rounds=168" in usual and "stop_token=none" in usual
    assert "beta=0.3" in said and "reward.rounds=7" in said and "reward.rounds=168" not in said
