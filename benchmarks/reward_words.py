"""Reward models of a hidden rule, one weight per word, beside a word-count model: `python -m benchmarks.reward_words`.

The models learn from 600 pairs of responses of 6 to 16 words out of 30, a tenth of them swapped. All are measured on 990 other,
correct pairs. One process trains like a network: each trainer starts from the round's model, and the updates are averaged.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.provenance import write
from peer import features
from protocol import codec
from rlhf.data import preference_set_statistics, preference_sets, tokenized_records
from rlhf.data.preference_sets import PreferencePair
from rlhf.objectives import job_presets
from rlhf.objectives.supervised_objectives import REWARDS, TrainableParameters
from scenarios.trials import COUNT, Parser
from training import corpus
from training.data.default_text import default_text
from training.data.tokenizer import ByteTokenizer
from training.engines.pytorch.backend import BACKEND
from training.job_spec import JobSpec, complete_fields
from training.replicated.model_directory import PARAMETERS
from training.replicated.replicated_model import ReplicatedModel

JOB = bytes([1]) * 32
LEARNED, MEASURED = 600, 1_100  # pairs
MEASURED_PERMILLE = 900  # of the others; a set always keeps some pairs for training
WORDS, WORDS_MIN, WORDS_MAX = 30, 6, 16
LETTERS_MAX = 6  # per word; any response fits into the context of 128 bytes
NOISE = 0.1
EPOCHS = 3
# Settings of the reward model, as `rlhf start` takes them.
WAYS: dict[str, dict[str, Any]] = {
    "default": {"score": "mean", "inner_rate": job_presets.MEAN_REWARD_JOB["inner_rate"]},
    "last": {},
    "last, 10 epochs": {"epochs": 10},
    "mean": {"score": "mean"},
    "mean, 10 epochs": {"score": "mean", "epochs": 10},
    "default, 10 epochs": {"score": "mean", "inner_rate": job_presets.MEAN_REWARD_JOB["inner_rate"], "epochs": 10},
    "mean, all": {"score": "mean", "learns": "all"},
    "mean, all, 10 epochs": {"score": "mean", "learns": "all", "epochs": 10},
}


def build_parser() -> Parser:
    parser = Parser("reward_words", __doc__.splitlines()[0], package="benchmarks")
    parser.add_argument("--seeds", type=int, nargs="+", default=(0, 1, 2), metavar="S", help="seeds of rule, pairs and noise")
    parser.add_argument(
        "--trainers", type=COUNT, nargs="+", default=(1, 3), metavar="N", help="numbers of trainers that average their updates"
    )
    parser.add_argument("--base-rounds", type=COUNT, default=40, metavar="N", help="rounds of the base, on the built-in text")
    parser.add_argument(
        "--ways", nargs="+", choices=tuple(WAYS), default=tuple(WAYS), metavar="WAY", help="ways to pool words, by name"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    return parser


def main() -> int:
    options = build_parser().parse_args()
    features.register_features()
    torch.set_num_threads(1)
    started, rows = time.time(), list[dict[str, Any]]()
    base = base_model(options.base_rounds)
    for seed in options.seeds:
        learned, measured = made(seed)
        rows.append(
            {
                "seed": seed,
                "way": "word counts",
                "accuracy": preference_set_statistics.word_count_accuracy(
                    preference_set_statistics.fit_word_counts(learned),
                    preference_sets.split_held_out(measured, MEASURED_PERMILLE)[1],
                ),
            }
        )
        for way in options.ways:
            for trainers in options.trainers:
                begun = time.time()
                found = accuracy(base, learned, measured, trainers, **WAYS[way])
                rows.append({"seed": seed, "way": way, "trainers": trainers, "accuracy": found, "seconds": time.time() - begun})
                print(rows[-1], file=sys.stderr, flush=True)
        write(options.json, started, {"rows": rows})
    show(rows)
    return 0


def made(seed: int) -> tuple[list[PreferencePair], list[PreferencePair]]:
    draw = random.Random(seed)
    known = Counter(
        word
        for word in default_text().decode("ascii", errors="ignore").lower().split()
        if word.isalpha() and len(word) <= LETTERS_MAX
    )
    words = [word for word, _ in known.most_common(300)]
    weights = {word: draw.gauss(0, 1) for word in draw.sample(words, WORDS)}

    def pair(number: int, noise: float) -> PreferencePair:
        texts = [draw.choices(list(weights), k=draw.randint(WORDS_MIN, WORDS_MAX)) for _ in range(2)]
        is_better = sum(weights[word] for word in texts[0]) > sum(weights[word] for word in texts[1])
        p = preference_sets.PERMILLE * (is_better is not (draw.random() < noise))
        return PreferencePair(number.to_bytes(8, "big"), f"question {number}: ", *map(" ".join, texts), p)

    return [pair(number, NOISE) for number in range(LEARNED)], [pair(number, 0.0) for number in range(MEASURED)]


def base_model(rounds: int) -> ReplicatedModel:
    spec = replace(JobSpec(name="base", data=bytes(32)), **complete_fields({"rounds": rounds})).validated()
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text"
        text.write_bytes(default_text())
        tokens = corpus.open_tokens(spec, text, ByteTokenizer())
        return trained(ReplicatedModel.initial(JOB, spec), BACKEND.open_engine(spec, tokens, ByteTokenizer(), None), rounds, 1)


def accuracy(
    base: ReplicatedModel, learned: list[PreferencePair], measured: list[PreferencePair], trainers: int, **said: Any
) -> float:
    said = {"score": "last", "epochs": EPOCHS, "learns": "words"} | said
    kind, epochs, learns = REWARDS[said.pop("score")], said.pop("epochs"), said.pop("learns")
    own = b"" if kind.settings_type is None else codec.encode(kind.settings_type(learns=TrainableParameters(learns)))
    spec = JobSpec(name="reward", objective=kind.name, model=base.spec.model, data=bytes(32), objective_settings=own)
    spec = replace(spec, **complete_fields(job_presets.REWARD_JOB | said))
    both = tokenized_records.tokenize_pairs(spec, [*learned], ByteTokenizer())
    rounds = preference_sets.rounds_for_epochs(
        epochs, len(both.train_split), trainers=trainers, steps=spec.local_steps, batch=spec.batch
    )
    spec = replace(spec, rounds=rounds).validated()
    model = ReplicatedModel.initial(JOB, spec, base)
    found = trained(model, BACKEND.open_engine(spec, both, ByteTokenizer(), None), rounds, trainers)
    others = tokenized_records.tokenize_pairs(replace(spec, held_out_permille=MEASURED_PERMILLE), measured, ByteTokenizer())
    return float(BACKEND.open_engine(spec, others, ByteTokenizer(), None).compute_metrics(found.parameters)["held_out_accuracy"])


def trained(model: ReplicatedModel, engine: Any, rounds: int, trainers: int) -> ReplicatedModel:
    parameters = model.parameters.copy()
    for number in range(rounds):
        deltas = [engine.local_steps(parameters, JOB, number, bytes([trainer]) * 32)[0].copy() for trainer in range(trainers)]
        parameters = parameters - np.mean(deltas, axis=0, dtype=np.float32)
    return replace(model, vectors={**model.vectors, PARAMETERS: parameters})


def show(rows: list[dict[str, Any]]) -> None:
    table = Table("way", "trainers", "accuracy of each seed", "mean")
    for way, trainers in dict.fromkeys((row["way"], row.get("trainers")) for row in rows):
        found = [row["accuracy"] for row in rows if (row["way"], row.get("trainers")) == (way, trainers)]
        table.add_row(way, str(trainers or ""), ", ".join(f"{value:.3f}" for value in found), f"{np.mean(found):.3f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    sys.exit(main())
