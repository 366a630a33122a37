"""How far honest replays lie apart, and how far lies: `python -m benchmarks.replay --json FILE`.

An auditor accepts what its own replay confirms up to `replay_tolerance`. One process trains and keeps every state; others replay
each inner step from the state before it, and the whole round, with other instruction sets, thread counts and micro-batches; then
with wrong data, a wrong step, a wrong rate, and in bfloat16. All errors are relative L2 distances, as an audit computes them: of
what one step changes (parameters and moments, the largest), and of Δ over the round.

`--device cuda` also computes the gradients there, and prints the hashes of what must be bit-equal; it needs nothing but this
repository, numpy and a torch with that device.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import dispatch
from benchmarks.dispatch import Environment
from benchmarks.provenance import write
from training.default_text import default_text
from training.inner_state import InnerState
from training.replicated.init import initial_parameters
from training.replicated.layout import Float32Array
from training.spec import PRESETS, Inner, JobSpec
from training.trace import distance, ratio, step_error

JOB, TRAINER, OTHER = bytes(range(32)), b"\x01" * 32, b"\x02" * 32
JOBS = {
    "local": JobSpec(name="replay", data=bytes(32), **PRESETS["local"]),
    "muon": JobSpec(name="replay", data=bytes(32), **PRESETS["local"] | {"inner": Inner.MUON}),
    "per-step": JobSpec(name="replay", data=bytes(32), **PRESETS["per-step"]),
}
HONEST, FAST, SMALL_LIE, LIE = "honest", "another precision", "small lie", "lie"
TOLERANCE = JobSpec(name="default", data=bytes(32)).replay_tolerance


@dataclass(frozen=True)
class Row:
    job: str
    kind: str
    what: str
    seed: int
    steps: tuple[float, ...]  # relative error of each inner step, replayed alone
    round: float  # of Δ


@dataclass(frozen=True)
class Variant:
    """How a replay differs from the original, beside the process it runs in."""

    name: str
    kind: str
    trainer: bytes = TRAINER  # whose data
    shift: int = 0  # of the step whose data is taken
    rate: float = 1.0  # factor of the inner rate
    micro_batch: int | None = None
    half: bool = False  # bfloat16 where autocast uses it
    fast_float32: bool = False  # TF32, on a GPU


EVERYWHERE = Variant("", HONEST)
VARIANTS = (
    Variant("micro-batch 1", HONEST, micro_batch=1),
    Variant("bfloat16", FAST, half=True),
    Variant("another trainer's data", LIE, trainer=OTHER),
    Variant("the next step's data", LIE, shift=1),
    Variant("rate 1 % higher", SMALL_LIE, rate=1.01),
)
ON_A_GPU = (Variant("TF32", FAST, fast_float32=True), Variant("bfloat16", FAST, half=True))


# In a child ------------------------------------------------------------------------------------------------------------


def engine_of(spec: JobSpec, device: str, variant: Variant) -> Any:
    """An engine that does as `variant` says; torch is imported only here, where the environment is what it is to be."""
    import torch

    from training.compute.engine import Engine, windows
    from training.compute.model import GPT
    from training.data import Tokens
    from training.tokenizer import load_tokenizer

    class Differing(Engine):
        """Computes gradients on `device`, perhaps in another precision; everything else is where it always is."""

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            with torch.device(device):
                self.elsewhere = GPT(spec)

        def batch(self, job: bytes, round: int, trainer: bytes, step: int, size: int) -> npt.NDArray[np.int64]:
            return super().batch(job, round, variant.trainer, step + variant.shift, size)

        def _accumulate(self, offsets: npt.NDArray[np.int64], on_step: Any) -> float:
            if device == "cpu" and not variant.half:
                return super()._accumulate(offsets, on_step)
            model, total = self.elsewhere, 0.0
            with torch.no_grad():
                model.parameters.copy_(self._model.parameters)
                model.gradients.zero_()
            for start in range(0, len(offsets), self.micro_batch):
                part = offsets[start : start + self.micro_batch]
                x_BT, y_BT = (tokens.to(device) for tokens in windows(self.tokens.train, part, spec.model.context))
                with torch.autocast(device, torch.bfloat16, enabled=variant.half):
                    loss = model.loss(x_BT, y_BT) * (len(part) / len(offsets))
                loss.backward()
                total += float(loss.detach())
            self._model.gradients.copy_(model.gradients)
            return total

    if device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = variant.fast_float32
    text = np.frombuffer(default_text(), dtype=np.uint8)
    held_out = len(text) * (1000 - spec.held_out_permille) // 1000
    tokenizer = load_tokenizer(None)
    engine = Differing(spec, Tokens(text[:held_out], text[held_out:], tokenizer.token_bytes), tokenizer)
    engine.micro_batch = variant.micro_batch or engine.micro_batch
    return engine


def original(spec: JobSpec, rounds: int) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """The states of the inner steps of the round after `rounds`, and Δ."""
    engine = engine_of(spec, "cpu", EVERYWHERE)
    parameters = initial_parameters(spec)
    for number in range(rounds):
        delta, _ = engine.local_steps(parameters, JOB, number, TRAINER)
        parameters = parameters - np.float32(0.5) * delta
    fresh = InnerState.fresh(spec)
    states = [(parameters, fresh)]
    delta, _ = engine.local_steps(
        parameters, JOB, rounds, TRAINER, on_state=lambda now, inner: states.append((now.copy(), _copied(inner)))
    )
    yield "delta", delta
    for number, (now, inner) in enumerate(states):
        yield f"parameters {number}", now
        yield f"moments {number}", inner.moments


def _copied(inner: InnerState) -> InnerState:
    return InnerState(inner.steps, inner.moments.copy())


def replay(spec: JobSpec, rounds: int, kept: dict[str, Float32Array], device: str, variant: Variant) -> tuple[list[float], float]:
    """The errors of each step, and of Δ."""
    wrong = replace(spec, inner_rate=spec.inner_rate * variant.rate)
    engine = engine_of(wrong, device, variant)
    states = [(kept[f"parameters {number}"], InnerState(number, kept[f"moments {number}"])) for number in range(len(kept) // 2)]
    errors = []
    for step, (before, committed) in enumerate(itertools.pairwise(states)):
        replayed = engine.inner_step(*before, JOB, rounds, TRAINER, step)
        errors.append(step_error(before, committed, (replayed[0].copy(), replayed[1]), spec))
    delta, _ = engine.local_steps(kept["parameters 0"], JOB, rounds, TRAINER)
    return errors, ratio(distance(kept["delta"], delta), distance(delta, np.float32(0)))


def child(options: argparse.Namespace) -> None:
    """What one process of an environment does: replays every job in `--child`, and prints the rows."""
    rows = []
    for file in sorted(options.child.glob("*.npz")):
        name, _, seed = file.stem.rpartition("-")
        spec = replace(JOBS[name], seed=int(seed))
        if not options.replays:
            np.savez(file, **dict(original(spec, options.rounds)))
            continue
        kept = dict(np.load(file))
        variants = [variant for variant in (EVERYWHERE, *VARIANTS, *ON_A_GPU) if variant.name in options.replays]
        variants = [variant for variant in variants if variant.rate == 1 or not spec.sends_gradients]
        for variant in {variant.name: variant for variant in variants}.values():
            steps, whole = replay(spec, options.rounds, kept, options.device, variant)
            rows.append(asdict(Row(name, variant.kind, variant.name, spec.seed, tuple(steps), whole)))
    print(json.dumps({"seen": dispatch.seen(), "rows": rows}))


# The parent ------------------------------------------------------------------------------------------------------------


def environments() -> list[Environment]:
    """What differs between machines: instruction sets of torch, of MKL and of oneDNN, and the number of threads."""
    narrow = {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41"}
    middle = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    return [
        Environment("the same again", dispatch.threads(1)),
        Environment("2 threads", dispatch.threads(2)),
        Environment("torch without AVX-512", {**middle, **dispatch.threads(1)}),
        Environment("torch without AVX2", {**narrow, **dispatch.threads(1)}),
        Environment("torch without AVX2, 2 threads", {**narrow, **dispatch.threads(2)}),
        Environment("C library without AVX2", {**dispatch.c_library_without(*dispatch.WIDE), **dispatch.threads(1)}),
    ]


def measure(options: argparse.Namespace, folder: Path) -> Iterator[list[Row]]:
    """What each kind of process has found."""
    for name in JOBS:
        for seed in options.seeds:
            (folder / f"{name}-{seed}.npz").touch()
    here = Environment("", dispatch.threads(1))
    common = ["--child", str(folder), "--rounds", str(options.rounds)]
    here.run("benchmarks.replay", *common)
    for environment in environments():
        yield _replayed(environment, environment.name, [*common, "--replays", ""])
    yield _replayed(here, "", [*common, "--replays", *(variant.name for variant in VARIANTS)])
    if options.device != "cpu":
        on = f" on {options.device}"
        yield _replayed(here, on, [*common, "--device", options.device, "--replays", "", *(v.name for v in ON_A_GPU)])


def _replayed(environment: Environment, name: str, arguments: list[str]) -> list[Row]:
    printed = dispatch.last_json(environment.run("benchmarks.replay", *arguments))
    print(f"{name or 'variants'}: {printed['seen']}", file=sys.stderr, flush=True)
    return [Row(**{**row, "what": row["what"] + name, "steps": tuple(row["steps"])}) for row in printed["rows"]]


def hashes(device: str) -> dict[str, Any]:
    """What must be bit-equal everywhere, as this machine computes it, also with torch on `device`."""
    printed: dict[str, Any] = dispatch.last_json(Environment("").run("tests.training.golden", "--torch", device))
    return printed


def summary(rows: list[Row]) -> dict[str, float]:
    """Both sides of the gap that the tolerance lies in, and what lies nearest above it."""
    errors = {kind: [(*row.steps, row.round) for row in rows if row.kind == kind] for kind in (HONEST, FAST, SMALL_LIE, LIE)}
    least = {f"{kind} least": min(map(min, errors[kind])) for kind in (FAST, SMALL_LIE, LIE) if errors[kind]}
    return {"honest most": max(map(max, errors[HONEST])), "tolerance": TOLERANCE, **least}


def show(rows: list[Row]) -> None:
    print(f"{'job':10}{'':20}{'replay':34}{'one step: median':>18}{'most':>10}{'whole round':>13}")
    for row in rows:
        steps = f"{statistics.median(row.steps):18.2g}{max(row.steps):10.2g}" if row.steps else " " * 28
        print(f"{row.job:10}{row.kind:20}{row.what:34}{steps}{row.round:13.2g}")
    for what, error in summary(rows).items():
        print(f"{what:24}{error:10.2g}{error / TOLERANCE:12.3g} times the tolerance")


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.replay", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="S")
    parser.add_argument("--rounds", type=int, default=4, metavar="N", help="trained before the one that is replayed")
    parser.add_argument("--device", default="cpu", help="a device of torch's on which gradients are computed as well: cuda")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--replays", nargs="*", default=[], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options)
        return 0
    started, rows, found = time.time(), list[Row](), hashes(options.device)
    about = {"processor": dispatch.processor(), "seeds": options.seeds, "rounds_before": options.rounds}
    with tempfile.TemporaryDirectory(prefix="folkmoot-replay-") as folder:
        for more in measure(options, Path(folder)):
            rows += more
            write(options.json, started, {**about, **summary(rows), "rows": [asdict(row) for row in rows], **found})
    show(rows)
    differing = [name for name, hash in found["torch"].items() if hash != found["hashes"][name]]
    print(f"{len(found['hashes'])} hashes, {len(found['torch'])} of them with torch on {options.device}; differing: {differing}")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
