"""Speed of sampling responses, cost of checking them, start of tuning: `python -m benchmarks.rollouts --json FILE`.

One model of 1.9 million parameters runs in one thread. All figures but the starts are processor time, medians of all repeats.

- *sampling*: the responses alone.
- *making*: sampling, and the figures of a proposal: one pass of the policy and one of the reference over the responses.
- *one pass*: the policy's pass of an auditor, with the noise of each token.
- *checking*: all work of an auditor before a replay: that pass, the reference's, the rewards.
- *audit*: all checks and the replay of the round; *the proposal*: all work of its trainer.

A replay uses the passes of the check. The check alone only adds the noise and the comparison.

A start is measured in a network of daemons that has just trained the base, from the request to the first closed round.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import trio
from rich.console import Console
from rich.table import Table

from benchmarks.provenance import write
from benchmarks.verdicts import conclude, verdict
from demo.demo_peers import DemoPeer
from demo.shutdown_signals import map_signals_to_interrupt
from features.command_arguments import parse_integer_in
from peer import features
from protocol import codec
from protocol.errors import UserError
from rlhf.objectives.job_presets import PPO_JOB as PRESET
from rlhf.objectives.ppo import PPO, PpoSettings
from rlhf.pytorch import rollout_passes
from scenarios import network
from scenarios.rlhf import calls, tunes
from scenarios.trials import COUNT, Parser
from training.data.default_text import default_text
from training.data.token_sequences import TokenArray, TokenizedText
from training.data.tokenizer import BpeTokenizer, ByteTokenizer, Tokenizer, train_bpe
from training.engines.pytorch.backend import TorchDeclaringEngine
from training.job_spec import JobSpec, complete_fields
from training.replicated.tensor_layout import Float32Array, initial_parameters
from training.transformer import ModelSpec

BYTES = ModelSpec(width=192, layers=4, heads=4, kv_heads=2, hidden=608)
BPE = replace(BYTES, vocabulary=2_048, hidden=460)  # as many parameters, a fifth of them for tokens
FEW = replace(BYTES, vocabulary=8)  # an untrained model that ends a response at every eighth token
SAMPLED_PER_SECOND_MIN, CHECK_SHARE_MAX, START_SECONDS_MAX = 4_000, 0.25, 5.0
JOB_SECONDS_MAX = 300.0  # for one round, on a busy machine
DRIFT = 0.02  # deviation of the policy's parameters from the reference's, as after some rounds
JOB, TRAINER, ROUND = bytes(32), bytes([1]) * 32, 1


@dataclass(frozen=True)
class Case:
    what: str
    model: ModelSpec = BYTES
    response_tokens: int = 32
    stop: int | None = None


CASES = (
    Case("a preset's job"),
    Case("2,048 tokens", model=BPE),
    Case("long responses", response_tokens=112),
    Case("short responses", model=FEW, stop=0),
)


@dataclass(frozen=True)
class Row:
    what: str
    seed: int
    parameters: int
    responses: int
    tokens: int
    sampling: float  # processor seconds, like the next fields
    making: float
    one_pass: float
    checking: float
    audit: float
    proposal: float

    @property
    def sampled_per_second(self) -> float:
        return self.tokens / self.sampling

    @property
    def made_per_second(self) -> float:
        return self.tokens / self.making

    @property
    def pass_share(self) -> float:
        return self.one_pass / self.making

    @property
    def audit_share(self) -> float:
        return self.audit / self.proposal


class Clock:
    """Processor seconds by kind of work."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        started = time.process_time()
        yield
        self.seconds[what] += time.process_time() - started

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Also count sampling and the passes that check tokens."""
        sample, over = rollout_passes.sample_responses, rollout_passes.forward_pass

        def timed_sample(*arguments: Any) -> Any:
            with self("sampling"):
                return sample(*arguments)

        def timed_over(*arguments: Any, noise: rollout_passes.Noise | None = None, **named: Any) -> Any:
            with self("one pass" if noise else "other passes"):
                return over(*arguments, noise=noise, **named)

        with (
            patch.object(rollout_passes, "sample_responses", timed_sample),
            patch.object(rollout_passes, "forward_pass", timed_over),
        ):
            yield


@lru_cache(maxsize=1)  # a tokenizer takes a second
def material(case: Case, seed: int) -> tuple[JobSpec, TokenizedText, Tokenizer, Float32Array]:
    own = PpoSettings(reward="rule:vowels", response_tokens=case.response_tokens, stop_token=case.stop)
    settings = {"objective_settings": codec.encode(own), "model": case.model, "seed": seed}
    spec = JobSpec(name="rollouts", objective=PPO.name, data=bytes(32), **complete_fields(PRESET), **settings)
    text: TokenArray = np.frombuffer(default_text(), dtype=np.uint8)
    tokenizer: Tokenizer = ByteTokenizer()
    if case.model.vocabulary > BYTES.vocabulary:
        tokenizer = BpeTokenizer(train_bpe(iter([default_text()]), case.model.vocabulary))
        text = tokenizer.encode(default_text())
    tokens = TokenizedText(text.astype(np.uint16) % case.model.vocabulary, text[:0], tokenizer.token_bytes)
    return spec, tokens, tokenizer, initial_parameters(spec)


def measure(case: Case, seed: int, repeats: int) -> Row:
    runs = [run(case, seed) for _ in range(1 + repeats)][1:]  # the caches of the first run are empty
    seconds = {what: statistics.median(spent[what] for _, spent in runs) for what in runs[0][1]}
    spec, *_, first = material(case, seed)
    return Row(case.what, seed, len(first), PPO.responses_per_round(spec, spec.decoded_settings), runs[0][0], **seconds)


def run(case: Case, seed: int) -> tuple[int, dict[str, float]]:
    """Return the number of tokens and the seconds. Trainer and auditor are two engines, which share no results."""
    trainer, auditor = (TorchDeclaringEngine(*material(case, seed)) for _ in range(2))
    assert trainer.first_parameters is not None
    drift = np.random.default_rng(seed).normal(0, DRIFT, trainer.parameters).astype(np.float32)
    parameters, place, clock = trainer.first_parameters + drift, (JOB, ROUND, TRAINER), Clock()
    with tempfile.TemporaryDirectory(prefix="folkmoot-rollouts-") as folder, clock.inside():
        with clock("making"):
            made = trainer.make_declaration(parameters, *place, Path(folder))
        with clock("training"):
            trainer.local_steps(parameters, *place, declaration=trainer.derive_step_data(parameters, *place, made))
        with clock("checking"):
            refuted = auditor.why_declaration_refused(parameters, *place, made)
        assert refuted is None, refuted
        with clock("replaying"):
            by = auditor.derive_step_data(parameters, *place, made)
            auditor.local_steps(parameters, *place, declaration=by)
    spent = clock.seconds
    return made.record.tokens, {
        "sampling": spent["sampling"],
        "making": spent["making"],
        "one_pass": spent["one pass"],
        "checking": spent["checking"],
        "audit": spent["checking"] + spent["replaying"],
        "proposal": spent["making"] + spent["training"],
    }


# Starts --------------------------------------------------------------------------------------------------------------


async def starts(count: int, seed: int) -> list[float]:
    """Return the seconds from the request to the first closed round of successive jobs. Every worker has trained the base."""
    found = list[float]()
    async with network.running(4, seed=seed, dress=tunes) as peers:
        watched, base = peers.demo.watched, await peers.train({}, rounds=1)
        await finished(watched, base)
        for _ in range(count):
            started = trio.current_time()
            await finished(watched, await calls(watched).start_rlhf_training(base, "rule:vowels", 1))
            found.append(trio.current_time() - started)
            print(f"a start: {found[-1]:.1f} s", file=sys.stderr)
    return found


async def finished(asked: DemoPeer, job: str) -> None:
    """Wait until the job is finished in this peer's view."""

    async def is_finished() -> bool:
        return any(view.job == job and view.state == "finished" for view in await asked.client.jobs())

    if not await network.holds(is_finished, JOB_SECONDS_MAX):
        raise UserError(f"a job of one round was not finished in {JOB_SECONDS_MAX:.0f} s")


# Tables -------------------------------------------------------------------------------------------------------------


def show(rows: list[Row]) -> None:
    console, table = Console(width=130), Table(title="milliseconds of a processor")
    timed = ("sampling", "making", "one_pass", "checking", "audit", "proposal")
    for heading in ("", "seed", "tokens", *(name.replace("_", " ") for name in timed), "sampled/s", "made/s"):
        table.add_column(heading, justify="right")
    for row in rows:
        spent = (f"{1e3 * getattr(row, name):.0f}" for name in timed)
        rates = (f"{rate:,.0f}" for rate in (row.sampled_per_second, row.made_per_second))
        table.add_row(row.what, str(row.seed), str(row.tokens), *spent, *rates)
    console.print(table)


def verdicts(rows: list[Row], started: list[float]) -> Iterator[str]:
    for case in CASES:
        of_case = [row for row in rows if row.what == case.what]
        sampled, shares, audits = (
            [getattr(row, name) for row in of_case] for name in ("sampled_per_second", "pass_share", "audit_share")
        )
        least = min(sampled)
        text = f"{case.what}: ≥ {SAMPLED_PER_SECOND_MIN:,} tokens sampled a second: {least:,.0f}"
        yield verdict(least >= SAMPLED_PER_SECOND_MIN, text)
        for what, most in (
            ("an auditor's one pass ≤ {} of making", max(shares)),
            ("a sampled audit ≤ {} of the proposal", max(audits)),
        ):
            yield verdict(most <= CHECK_SHARE_MAX, f"{case.what}: {what.format(CHECK_SHARE_MAX)}: {most:.2f}")
    if started:
        median = statistics.median(started)
        yield verdict(median < START_SECONDS_MAX, f"a start to its first closed round: < {START_SECONDS_MAX:g} s: {median:.1f} s")


def main() -> int:
    parser = Parser("rollouts", __doc__.splitlines()[0], package="benchmarks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=(0, 1, 2), metavar="S", help="seeds of models and noise, with rows for each"
    )
    parser.add_argument("--repeats", type=COUNT, default=3, metavar="N", help="number of repetitions, whose median is shown")
    parser.add_argument(
        "--starts", type=parse_integer_in(0), default=5, metavar="N", help="number of starts of tuning among daemons"
    )
    options = parser.parse_args()
    features.register_features()
    map_signals_to_interrupt()
    torch.set_num_threads(1)
    started, rows, seconds = time.time(), list[Row](), list[float]()
    for seed, case in product(options.seeds, CASES):
        rows.append(measure(case, seed, options.repeats))
        write(options.json, started, figures(options, rows, seconds))
    if options.starts:
        seconds = trio.run(starts, options.starts, options.seeds[0])
        write(options.json, started, figures(options, rows, seconds))
    show(rows)
    return conclude(verdicts(rows, seconds))


def figures(options: argparse.Namespace, rows: list[Row], seconds: list[float]) -> dict[str, Any]:
    return {"seeds": list(options.seeds), "repeats": options.repeats, "rows": [asdict(row) for row in rows], "starts": seconds}


if __name__ == "__main__":
    sys.exit(main())
