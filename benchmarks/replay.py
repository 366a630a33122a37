"""Errors of honest replays and of lies: `python -m benchmarks.replay --json FILE`.

An auditor accepts a proposal if its own replay agrees within `replay_tolerance`. One process trains. Others replay the round with
other instruction sets, thread counts and micro-batches, and then with wrong data, a wrong step, a wrong rate, and in bfloat16.
Jobs `sam` have SAM, and their liars also spare its second pass or take it elsewhere.
All errors are relative L2 distances of Δ over the round, as in an audit. A tolerance must lie between the largest honest error
and the smallest false one; both are printed for every precision.

The job `engines` is small, since a step of tinygrad takes many times that of torch; the other engines replay it, too. They must
be installed: `make engines`.

The responses of a PPO job are sampled once and committed to, and replays derive the rest from them. `ppo-jumps` is textbook PPO,
whose gradients jump where ratio or value reach the edge of their clip; it only runs if `--jobs` names it.
The jobs `per-step-bf16…` compute single gradients in bfloat16: of a new model, with a batch of 64, and of a model that was
trained for `LATE_ROUNDS`. Their audits compare payloads alone, within `BF16_TOLERANCE`. The least false error must be `MARGIN`
times as large. With sampled audits, mean losses may differ by `LOSS_DIFFERENCE_MAX`.

A control is a job that no network accepts, and its honest replays must differ by more than a tolerance: the benchmark would
notice such a job. `experts-textbook` weighs experts as the textbook does, and `ternary-int8` rounds activations in training.

Hashes of results that must be equal bit for bit are compared with `tests/training/golden.json`, and those of torch are printed.
`--device cuda` also computes them and all replays on a GPU, with the engine of a peer. It needs this repository, numpy, msgpack,
pynacl, and a torch with that device.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import dispatch
from benchmarks.dispatch import Environment
from benchmarks.provenance import write
from benchmarks.verdicts import conclude, verdict
from features.lazy_import import import_object
from ledger.audits.loss_commitments import LOSS_DIFFERENCE_MAX, MILLIONTHS
from peer import features
from protocol import codec
from rlhf.data.preference_sets import PreferencePair
from rlhf.data.tokenized_records import tokenize_pairs
from rlhf.objectives.job_presets import PPO_JOB, REWARD_JOB
from rlhf.objectives.ppo import PpoSettings, RolloutDeclaration
from rlhf.objectives.supervised_objectives import MEAN_REWARD, REWARD_NAMES, MeanRewardSettings, TrainableParameters
from training.data.default_text import default_text
from training.data.token_sequences import TokenizedText
from training.data.tokenizer import Tokenizer, load_tokenizer
from training.engine_implementations import USUAL_ENGINE
from training.engine_resources import EngineResources
from training.job_spec import BF16_TOLERANCE, PRESETS, InnerOptimizerKind, JobSpec, Precision, complete_fields
from training.objectives.objective import Declaration
from training.replay.inner_state import l2_distance, relative_error
from training.replicated import codec as payloads
from training.replicated import error_feedback
from training.replicated.tensor_layout import Float32Array, initial_parameters, layout_of
from training.transformer import ModelSpec, complete_model_fields


def _ppo(**terms: Any) -> JobSpec:
    own = codec.encode(PpoSettings(reward="rule:vowels", **terms))
    return JobSpec(name="replay", objective="ppo", data=bytes(32), objective_settings=own, **complete_fields(PPO_JOB))


def _mean(learns: TrainableParameters) -> JobSpec:
    own = codec.encode(MeanRewardSettings(learns=learns))
    return JobSpec(
        name="replay", objective=MEAN_REWARD.name, data=bytes(32), objective_settings=own, **complete_fields(REWARD_JOB)
    )


def _local(**model: Any) -> JobSpec:
    fields = complete_fields(PRESETS["local"] | {"model": ModelSpec(**complete_model_fields(model))})
    return JobSpec(name="replay", data=bytes(32), **fields)


ADAMW = JobSpec(name="replay", data=bytes(32), **complete_fields(PRESETS["local"] | {"inner": InnerOptimizerKind.ADAMW}))
HALF = complete_fields(PRESETS["per-step"] | {"precision": Precision.BF16})
GROKFAST = 0.5  # factor of the slow gradient, the better of two in `benchmarks.grokking`
SAM_RADIUS = 0.05  # the usual radius of SAM (Foret et al. 2021)
JOB, TRAINER, OTHER = bytes(range(32)), b"\x01" * 32, b"\x02" * 32
TEXTBOOK = "experts-textbook"  # name of a job whose engine weighs experts as the textbook does
TERNARY_INT8 = "ternary-int8"  # name of a job whose engine also rounds activations in training
# Experts with a quarter of a million choices in a replay of ten steps. The first step begins with nearly equal probabilities, so
# some choices differ between processors.
TIES = replace(_local(experts=16, layers=6, width=32, hidden=32), name="experts-ties", batch=32)
TIED_ROUTER = 1e-3  # factor of the router's weights
JOBS = {
    "local": JobSpec(name="replay", data=bytes(32), **complete_fields(PRESETS["local"])),
    "adamw": ADAMW,
    "engines": replace(ADAMW, batch=4),
    "experts": _local(experts=8),
    "window": _local(window=32),
    TIES.name: TIES,
    TEXTBOOK: replace(TIES, name=TEXTBOOK),
    "per-step": JobSpec(name="replay", data=bytes(32), **PRESETS["per-step"]),
    "per-step-bf16": JobSpec(name="replay", data=bytes(32), **HALF),
    "per-step-bf16-64": JobSpec(name="replay", data=bytes(32), batch=64, **HALF),
    "sam": JobSpec(name="replay", data=bytes(32), sam_radius=SAM_RADIUS, **complete_fields(PRESETS["local"])),
    "sam-experts": replace(_local(experts=8), sam_radius=SAM_RADIUS),
    "sam-per-step": JobSpec(name="replay", data=bytes(32), sam_radius=SAM_RADIUS, **PRESETS["per-step"]),
    "grokfast": replace(_local(), grokfast=GROKFAST),  # its replays are those of `local`: the filter works on aggregates
    "per-step-bf16-late": JobSpec(name="replay", data=bytes(32), **HALF),
    "reward": JobSpec(name="replay", objective="reward", data=bytes(32), **complete_fields(REWARD_JOB)),
    "reward-mean": _mean(TrainableParameters.WORDS),
    "reward-mean-all": _mean(TrainableParameters.ALL),
    "ppo": _ppo(),
    "ppo-jumps": _ppo(clip_ramp=0.0),
    "ternary": _local(linear="ternary"),
    TERNARY_INT8: replace(_local(linear="ternary"), name=TERNARY_INT8),
}
USUAL = [name for name in JOBS if name not in ("ppo-jumps", "grokfast")]
LATE_ROUNDS = 300  # gradients of a trained model are smaller, so the same rounding is a larger part of them
ROUNDS = {"per-step-bf16-late": LATE_ROUNDS}  # rounds before the replayed one, if `--rounds` names fewer
AUDITED_HALF = "audited bf16"
MARGIN = 3  # least ratio of a false error and the tolerance, in jobs whose tolerance is not far from honest errors
HONEST, FAST, SMALL_LIE, LIE = "honest", "another precision", "small lie", "lie"
GOLDEN = dispatch.REPOSITORY / "tests" / "training" / "golden.json"
TOLERANCE = JobSpec(name="default", data=bytes(32)).replay_tolerance
# Bounds of errors of jobs with options: a tenth of the tolerance, and five times the tolerance.
OPTIONS = ("experts", "experts-ties", "window", "ternary", "sam", "sam-per-step", "sam-experts", "engines")
OPTION_HONEST_MAX, OPTION_LIE_MIN = 1e-4, 5e-3
CONTROLS = (TEXTBOOK, TERNARY_INT8)  # jobs whose honest replays must differ by more than the tolerance


@dataclass(frozen=True)
class Row:
    job: str
    kind: str
    precision: str  # with the device, such as "bf16 on cuda"
    what: str
    seed: int
    round: float  # relative error of Δ
    payload: float  # distance of an encoded Δ by `feedback.payload_distances`, over ‖Δ‖
    loss: float = 0.0  # difference of the last step's mean losses, in nats

    @property
    def error(self) -> float:
        """The error that an auditor compares with the tolerance."""
        return self.payload if self.precision.startswith(AUDITED_HALF) else self.round


@dataclass(frozen=True)
class Variant:
    """The differences between a replay and the original, besides the process's environment."""

    name: str
    kind: str
    trainer: bytes = TRAINER  # owner of the data
    shift: int = 0  # offset of the step whose data is used
    rate: float = 1.0  # factor of the inner rate
    radius: float = 1.0  # factor of the radius of SAM
    steps: float = 1.0  # factor of the number of local steps
    micro_batch: int | None = None
    repeated: int = 1  # parts of a batch, of which all are the first one: its gradient takes a part of the work
    half: bool = False  # the job's `precision=bf16`
    fast_float32: bool = False  # TF32, on a GPU

    def precision(self, spec: JobSpec) -> str:
        if spec.precision is Precision.BF16:
            return AUDITED_HALF
        return "bf16" if self.half else "TF32" if self.fast_float32 else "fp32"


EVERYWHERE = Variant("", HONEST)
LIES = (
    Variant("another trainer's data", LIE, trainer=OTHER),
    Variant("the next step's data", LIE, shift=1),
    Variant("half of the batch, twice", LIE, repeated=2),
    Variant("rate 1 % higher", SMALL_LIE, rate=1.01),
    Variant("half of the steps", LIE, steps=0.5),
    Variant("one pass of SAM", LIE, radius=0.0),
    Variant("half of SAM's radius", LIE, radius=0.5),
)
BOTH = (Variant("bfloat16", FAST, half=True), *LIES, *(replace(lie, name=f"bfloat16, {lie.name}", half=True) for lie in LIES))
VARIANTS = (Variant("micro-batch 1", HONEST, micro_batch=1), *BOTH)
ON_A_GPU = (Variant("TF32", FAST, fast_float32=True), *BOTH)


# In a child ------------------------------------------------------------------------------------------------------------


def tokens_of(spec: JobSpec) -> tuple[Any, Tokenizer]:
    text = np.frombuffer(default_text(), dtype=np.uint8)
    held_out = len(text) * (1000 - spec.held_out_permille) // 1000
    tokenizer = load_tokenizer(None, spec.model.vocabulary)
    if spec.objective in REWARD_NAMES:
        return tokenize_pairs(spec, some_pairs(), tokenizer), tokenizer
    return TokenizedText(text[:held_out], text[held_out:], tokenizer.token_bytes), tokenizer


def engine_named(name: str, spec: JobSpec, *, cache: Path) -> Any:
    """Return an engine other than torch, as a peer's worker opens it."""
    backend = import_object(features.engines()[name].backend)
    backend.start_backend(EngineResources(threads=1, cache_folder=str(cache)), [])
    return backend.open_engine(spec, *tokens_of(spec), None)


def engine_of(spec: JobSpec, device: str, variant: Variant) -> Any:
    """Return an engine for a variant. Torch is only imported here, in a process with the right environment."""
    import torch

    from training.engines.pytorch.backend import TorchDeclaringEngine
    from training.engines.pytorch.device import configure_device
    from training.engines.pytorch.engine import TorchEngine

    declares = spec.resolved_objective.declaration_type is not None
    kind: Any = TorchDeclaringEngine if declares else TorchEngine

    class Differing(kind):  # type: ignore[misc]
        """An engine with other data if the variant requests it."""

        def draw_batch(
            self, job: bytes, round: int, trainer: bytes, step: int, size: int, declaration: Any = None
        ) -> npt.NDArray[np.int64]:
            shifted = (step + variant.shift) % spec.local_steps if declares else step + variant.shift
            found: npt.NDArray[np.int64] = super().draw_batch(job, round, variant.trainer, shifted, size, declaration)
            return np.concatenate([found[: size // variant.repeated]] * variant.repeated)

    where = torch.device(device)
    configure_device(torch.device(where.type, where.index or 0))  # as in a peer's worker; it disables TF32
    if device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = variant.fast_float32
    tokens, tokenizer = tokens_of(spec)
    computed = replace(spec, precision=Precision.BF16) if variant.half else spec
    first = initial_parameters(spec) if declares else None
    engine = Differing(computed, tokens, tokenizer, first, torch.device(device))
    engine.micro_batch = variant.micro_batch or engine.micro_batch
    if spec.name == TEXTBOOK:
        use_textbook_experts(engine)
    if spec.name == TERNARY_INT8:
        for block in engine.model.blocks:
            block.linear = rounding_linear
    return engine


def use_textbook_experts(engine: Any) -> None:
    """Let the engine's model weigh the chosen experts by their share of the sum of their probabilities."""
    import torch

    def choose_experts(p_BTE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        best = p_BTE.topk(engine.spec.model.experts_per_token)
        return best.indices, 1 / best.values.sum(dim=-1, keepdim=True).expand_as(best.values)

    engine.model.blocks[-1].choose_experts = choose_experts


def rounding_linear(x: Any, weights: Any) -> Any:
    """Return the outputs for activations of eight bits, whose gradient counts as that of the exact activations."""
    from torch.nn import functional as F

    from training.engines.pytorch.ternary import round_activations

    return F.linear(x + (round_activations(x) - x).detach(), weights)


def some_pairs() -> list[PreferencePair]:
    """Return preferences between a prompt's own continuation and another one.

    One pair in four is swapped, so that no preference is certain.
    """
    text, pairs = default_text().decode(), list[PreferencePair]()
    for number, place in enumerate(range(0, len(text) - 500, 500)):
        parts = (text[place + start : place + stop] for start, stop in ((0, 40), (40, 80), (240, 300)))
        pairs.append(PreferencePair(place.to_bytes(8, "big"), *parts, 1000 * (number % 4 > 0)))
    return pairs


def original(spec: JobSpec, rounds: int) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Yield the parameters before the round after `rounds`, and Δ."""
    engine = engine_of(spec, "cpu", EVERYWHERE)
    parameters = initial_parameters(spec)
    for number in range(rounds):
        delta, _ = engine.local_steps(parameters, JOB, number, TRAINER, declaration=declared(engine, parameters, number)[0])
        parameters = parameters - np.float32(0.5) * delta
    declaration, blob = declared(engine, parameters, rounds)
    if spec.name in (TIES.name, TEXTBOOK):
        for router in (view for name, view in layout_of(spec).tensor_views(parameters).items() if "router" in name):
            router *= np.float32(TIED_ROUTER)
    delta, losses = engine.local_steps(parameters, JOB, rounds, TRAINER, declaration=declaration)
    yield "parameters", parameters
    yield "delta", delta
    yield "loss", np.array(losses[-1])
    yield "blob", np.frombuffer(blob, dtype=np.uint8)


def declared(
    engine: Any, parameters: Float32Array, number: int, blob: bytes | None = None, trainer: bytes = TRAINER
) -> tuple[Declaration | None, bytes]:
    """Return the declaration of a round and its committed responses, which are sampled unless `blob` has them."""
    if engine.spec.resolved_objective.declaration_type is None:
        return None, b""
    place = JOB, number, trainer
    with tempfile.TemporaryDirectory(prefix="folkmoot-replay-") as folder:
        if blob is None:
            made = engine.make_declaration(parameters, *place, Path(folder))
        else:
            digest, path = bytes(32), Path(folder) / "blob"
            path.write_bytes(blob)
            made = Declaration(RolloutDeclaration(digest, *[0] * 6), {digest: path})
        (file,) = made.files.values()
        return engine.derive_step_data(parameters, *place, made), file.read_bytes()


def replay(
    spec: JobSpec, rounds: int, kept: dict[str, Float32Array], variant: Variant, open_engine: Callable[[JobSpec], Any]
) -> tuple[float, float, float]:
    """Return the errors of Δ and of its payload, and the difference of the last losses."""
    wrong = replace(
        spec,
        inner_rate=spec.inner_rate * variant.rate,
        sam_radius=spec.sam_radius * variant.radius,
        local_steps=int(spec.local_steps * variant.steps),
    )
    engine = open_engine(wrong)
    blob = None if variant.trainer != TRAINER else kept["blob"].tobytes()
    by, _ = declared(engine, kept["parameters"], rounds, blob, variant.trainer)
    delta, losses = engine.local_steps(kept["parameters"], JOB, rounds, TRAINER, declaration=by)
    layout, header = (
        layout_of(spec),
        payloads.PayloadHeader(JOB, rounds, TRAINER, bytes(32), spec.local_steps, spec.batch, spec.payload_bits(rounds)),
    )
    said = payloads.read_payload(payloads.encode_payload(header, kept["delta"], layout), layout)
    of_payload = relative_error(*error_feedback.payload_distances(said, delta))
    of_round = relative_error(l2_distance(kept["delta"], delta), l2_distance(delta, np.float32(0)))
    return of_round, of_payload, abs(losses[-1] - float(kept["loss"]))


def child(options: argparse.Namespace) -> None:
    """Replay the rounds in the folder `--child` in this process's environment, and print the rows."""
    rows = []
    for file in sorted(options.child.glob("*.npz")):
        name, _, seed = file.stem.rpartition("-")
        spec, rounds = replace(JOBS[name], seed=int(seed)), max(options.rounds, ROUNDS.get(name, 0))
        if not options.replays:
            np.savez(file, **dict(original(spec, rounds)))
            continue
        kept = dict(np.load(file))
        variants = [variant for variant in (EVERYWHERE, *VARIANTS, *ON_A_GPU) if variant.name in options.replays]
        variants = [variant for variant in variants if variant.rate == 1 or not spec.sends_gradients]
        variants = [variant for variant in variants if variant.shift == 0 or not _sees_the_same(spec)]
        variants = [variant for variant in variants if variant.repeated == 1 or spec.objective == "language"]
        variants = [variant for variant in variants if not variant.half or spec.precision is not Precision.BF16]
        variants = [variant for variant in variants if variant.radius == 1 or spec.sam_radius]
        declares = spec.resolved_objective.declaration_type is not None  # The data of its steps follow from their number.
        variants = [variant for variant in variants if variant.steps == 1 or (spec.local_steps > 1 and not declares)]
        for variant in {variant.name: variant for variant in variants}.values():
            if options.engine == "torch":
                open_engine = partial(engine_of, device=options.device, variant=variant)
            else:
                open_engine = partial(engine_named, options.engine, cache=options.child)
            errors = replay(spec, rounds, kept, variant, open_engine)
            precision = f"{variant.precision(spec)} on {options.device}"
            rows.append(asdict(Row(name, variant.kind, precision, variant.name, spec.seed, *errors)))
    print(json.dumps({"seen": dispatch.seen(), "rows": rows}))


def _sees_the_same(spec: JobSpec) -> bool:
    """Return whether every inner step uses all responses, so that the data of the next step are no lie."""
    return isinstance(spec.decoded_settings, PpoSettings) and spec.decoded_settings.epochs == spec.local_steps


# The parent ------------------------------------------------------------------------------------------------------------


def environments() -> list[Environment]:
    """Return the differences between machines: instruction sets of torch, MKL and oneDNN, and the number of threads."""
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


def measure(options: argparse.Namespace, job: str, folder: Path) -> Iterator[list[Row]]:
    """Yield the rows of one job from each kind of process.

    A child does no more than this, so that none takes too long on a slow machine.
    """
    for seed in options.seeds:
        (folder / f"{job}-{seed}.npz").touch()
    here = Environment("", dispatch.threads(1))
    common = ["--child", str(folder), "--rounds", str(options.rounds)]
    here.run("benchmarks.replay", *common)
    for environment in environments():
        yield _replayed(job, environment, environment.name, [*common, "--replays", ""])
    yield _replayed(job, here, "", [*common, "--replays", *(variant.name for variant in VARIANTS)])
    if job == "engines":
        for engine in sorted(features.engines().keys() - {USUAL_ENGINE}):
            yield _replayed(job, here, engine, [*common, "--engine", engine, "--replays", ""])
    if options.device != "cpu":
        on = f" on {options.device}"
        yield _replayed(job, here, on, [*common, "--device", options.device, "--replays", "", *(v.name for v in ON_A_GPU)])


def _replayed(job: str, environment: Environment, name: str, arguments: list[str]) -> list[Row]:
    printed = dispatch.last_json(environment.run("benchmarks.replay", *arguments))
    print(f"{job}, {name or 'variants'}: {printed['seen']}", file=sys.stderr, flush=True)
    return [Row(**{**row, "what": row["what"] + name}) for row in printed["rows"]]


def hashes(device: str) -> dict[str, Any]:
    """Return the hashes that must be equal everywhere, as computed here and by torch on `device`, and the names that differ."""
    printed: dict[str, Any] = dispatch.last_json(Environment("").run("tests.training.golden", "--torch", device))
    golden, by_torch = json.loads(GOLDEN.read_text()), printed["torch"]
    differing = [name for name in golden if printed["hashes"].get(name) != golden[name]]
    return {**printed, "differing": differing + [f"torch: {name}" for name in by_torch if by_torch[name] != golden[name]]}


def gaps(rows: list[Row]) -> dict[str, dict[str, float]]:
    """Return the largest honest error and the smallest of each kind of lie, by precision and device, without controls."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.job in CONTROLS:
            continue
        gap = found.setdefault(row.precision, {})
        if row.kind in (HONEST, FAST):
            gap[HONEST] = max(gap.get(HONEST, 0.0), row.error)
        else:
            gap[row.kind] = min(gap.get(row.kind, math.inf), row.error)
    return found


def option_verdicts(rows: list[Row]) -> Iterator[str]:
    """Check the errors of jobs with options of the model, and of controls, in float32."""
    for job in (*OPTIONS, *CONTROLS):
        for precision, gap in gaps([replace(row, job="") for row in rows if row.job == job]).items():
            if not precision.startswith("fp32") or not {HONEST, LIE} <= gap.keys():
                continue
            honest, lie = gap[HONEST], min(gap[LIE], gap.get(SMALL_LIE, math.inf))
            if job in CONTROLS:
                yield verdict(honest > TOLERANCE, f"{job}, {precision}: honest replays > {TOLERANCE:g}: {honest:.2g}")
                continue
            text = (
                f"{job}, {precision}: honest replays ≤ {OPTION_HONEST_MAX:g}, lies ≥ {OPTION_LIE_MIN:g}: {honest:.2g}, {lie:.2g}"
            )
            yield verdict(honest <= OPTION_HONEST_MAX and lie >= OPTION_LIE_MIN, text)


def verdicts(rows: list[Row], found: dict[str, Any]) -> Iterator[str]:
    """Check the errors in the precisions of audited jobs, the losses in bfloat16, and the hashes."""
    for precision, gap in gaps(rows).items():
        if precision.startswith(AUDITED_HALF) and {HONEST, LIE} <= gap.keys():
            figures = f"{gap[HONEST]:.2g}, {gap[LIE]:.2g}"
            text = f"{precision}: honest replays ≤ the tolerance {BF16_TOLERANCE:g} ≤ lies / {MARGIN}: {figures}"
            yield verdict(gap[HONEST] <= BF16_TOLERANCE <= gap[LIE] / MARGIN, text)
            most = max(row.loss for row in rows if row.precision == precision and row.kind == HONEST)
            allowed = LOSS_DIFFERENCE_MAX / MILLIONTHS
            yield verdict(most <= allowed, f"{precision}: losses of honest replays differ by ≤ {allowed:g}: {most:.2g}")
        if precision.startswith("fp32") and {HONEST, LIE} <= gap.keys():
            text = f"{precision}: honest replays ≤ the tolerance {TOLERANCE:g} < lies: {gap[HONEST]:.2g}, {gap[LIE]:.2g}"
            yield verdict(gap[HONEST] <= TOLERANCE < gap[LIE], text)
    yield from option_verdicts(rows)
    text = f"{len(found['hashes'])} hashes, {len(found['torch'])} of them also by torch, are those of {GOLDEN.name}"
    yield verdict(not found["differing"], "; ".join([text, *found["differing"]]))


def show(rows: list[Row]) -> None:
    print(f"{'job':20}{'':18}{'replay':40}{'whole round':>13}{'payload':>13}{'loss':>10}")
    for row in rows:
        print(f"{row.job:20}{row.kind:18}{row.what:40}{row.round:13.2g}{row.payload:13.2g}{row.loss:10.1g}")
    print(f"\n{'a tolerance has to be above':40}{'and below: ' + LIE:>18}{SMALL_LIE:>14}")
    for precision, gap in gaps(rows).items():
        figures = (f"{gap[kind]:.2g}" if kind in gap else "" for kind in (HONEST, LIE, SMALL_LIE))
        print("{:26}{:>14}{:>18}{:>14}".format(precision, *figures))


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.replay", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="S")
    parser.add_argument("--jobs", nargs="+", default=USUAL, choices=JOBS, metavar="JOB", help=f"jobs: {', '.join(JOBS)}")
    parser.add_argument("--rounds", type=int, default=4, metavar="N", help="rounds before the round that is replayed")
    parser.add_argument("--device", default="cpu", help="device of torch that also computes gradients, such as cuda")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--engine", default="torch", help=argparse.SUPPRESS)
    parser.add_argument("--replays", nargs="*", default=[], help=argparse.SUPPRESS)
    options = parser.parse_args()
    features.register_features()
    if options.child:
        child(options)
        return 0
    if "engines" in options.jobs:
        for engine in features.engines():
            if missing := features.why_engine_missing(engine):
                raise SystemExit(f"the job 'engines' needs all engines, but {missing[0]}: {missing[1]}")
    started, rows, found = time.time(), list[Row](), hashes(options.device)
    about = {"processor": dispatch.processor(), "seeds": options.seeds, "rounds_before": options.rounds, "tolerance": TOLERANCE}
    about["bf16_tolerance"] = BF16_TOLERANCE
    for job in options.jobs:
        with tempfile.TemporaryDirectory(prefix="folkmoot-replay-") as folder:
            for more in measure(options, job, Path(folder)):
                rows += more
                write(options.json, started, {**about, "gaps": gaps(rows), "rows": [asdict(row) for row in rows], **found})
    show(rows)
    for name, digest in found["torch"].items():
        print(f"{digest}  {name}, torch on {options.device}")
    return conclude(verdicts(rows, found))


if __name__ == "__main__":
    sys.exit(main())
