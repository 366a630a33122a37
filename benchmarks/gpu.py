"""A worker's engine on a GPU, beside a plain training loop: `python -m benchmarks.gpu --json FILE`.

The table has samples per second, their share of the device's speed of matrix products, and memory, for models of three sizes,
with and without `compile`, in float32 and bfloat16. The plain loop is torch alone: modules, autograd, its AdamW. In float32 an
update is compared with a processor's. Without CUDA the output is one line; `--device cpu` runs all of it on the processor as a
check.
"""

from __future__ import annotations

import gc
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.provenance import write
from benchmarks.verdicts import conclude, verdict
from protocol.errors import UserError
from scenarios.trials import COUNT, Parser, duration
from training.data.token_sequences import TokenizedText, batch_offsets, sequence_batch
from training.data.tokenizer import ByteTokenizer
from training.engine_resources import AUTO, EngineResources
from training.engines.pytorch import device as devices
from training.engines.pytorch.engine import TorchEngine, autocast_context
from training.engines.pytorch.layers import rotary_tables
from training.job_spec import AuditMode, JobSpec, Precision
from training.replicated.tensor_layout import Float32Array, initial_parameters
from training.transformer import ModelSpec

SHARE_MIN = 0.95  # of the plain loop's samples per second
REPLAY_MAX = 1e-4  # relative to ‖Δ‖, between GPU and processor
MATRIX = {"cuda": 8_192, "cpu": 1_024}  # rows of the product that measures the device's speed
TURNS = 2  # of each loop in turn; the best counts, since other load only slows them
REPLAY_STEPS = 10
PROBE_STEPS = 2  # of a round that compiles, finds its memory, and measures the time of a step
DRAWN_FROM = 10_000_000  # parameters; the usual initial ones take half a minute for 124M
JOB, TRAINER = bytes(32), bytes(32)


@dataclass(frozen=True)
class Size:
    model: ModelSpec
    batch: int
    micro_batch: int
    seconds: float  # of a round of the plain loop


GPT2 = ModelSpec(vocabulary=50_304, context=1_024, width=768, layers=12, heads=12, kv_heads=12, hidden=2_048)
SIZES = {
    "0.8M": Size(ModelSpec(width=128, layers=4, hidden=384, context=256), 32, 32, 3),
    "124M": Size(GPT2, 32, 8, 6),
    "1.3B": Size(replace(GPT2, width=2_048, layers=24, heads=16, kv_heads=16, hidden=5_504), 32, 4, 15),
}


@dataclass
class Row:
    size: str
    parameters: int
    precision: str
    compile: bool
    steps: int | None = None  # per round
    samples_per_second: float | None = None
    plain_samples_per_second: float | None = None
    share_of_peak: float | None = None  # of the device's matrix products in the same precision
    memory_mb: float | None = None  # peak of the engine, or of the whole process on a processor
    replay_error: float | None = None  # float32 without compile: ‖Δ − Δ of a processor‖ / ‖Δ of a processor‖
    reason: str = ""  # reason if it was not measured

    @property
    def share_of_plain(self) -> float | None:
        ours, plain = self.samples_per_second, self.plain_samples_per_second
        return None if ours is None or plain is None else ours / plain


class PlainLayer(nn.Module):
    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.model, head = model, model.width // model.heads
        self.norms = nn.ModuleList(nn.RMSNorm(model.width, eps=1e-6) for _ in range(2))
        self.query_key_value = nn.Linear(model.width, (model.heads + 2 * model.kv_heads) * head, bias=False)
        self.output = nn.Linear(model.width, model.width, bias=False)
        self.gate_up = nn.Linear(model.width, 2 * model.hidden, bias=False)
        self.down = nn.Linear(model.hidden, model.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads, kv_heads = self.model.heads, self.model.kv_heads
        packed = self.query_key_value(self.norms[0](x)).view(batch, length, heads + 2 * kv_heads, width // heads).transpose(1, 2)
        query_key, value = packed.split((heads + kv_heads, kv_heads), dim=1)
        half = query_key.shape[-1] // 2
        cos, sin = cos[:length], sin[:length]
        query, key = (query_key * cos + query_key.roll(half, -1) * sin).type_as(value).split((heads, kv_heads), dim=1)
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=heads != kv_heads)
        x = x + self.output(found.transpose(1, 2).reshape(batch, length, width))
        gate, up = self.gate_up(self.norms[1](x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Plain(nn.Module):
    """The same transformer, made of torch's own modules."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.embedding = nn.Embedding(model.vocabulary, model.width)
        nn.init.normal_(self.embedding.weight, std=0.8 / model.width**0.5)
        self.layers = nn.ModuleList(PlainLayer(model) for _ in range(model.layers))
        self.norm = nn.RMSNorm(model.width, eps=1e-6)
        for name, table in zip(("cos", "sin"), rotary_tables(model), strict=True):
            self.register_buffer(name, table)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        found = self.embedding(x)
        for layer in self.layers:
            found = layer(found, self.cos, self.sin)
        logits = F.linear(self.norm(found), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), y.flatten())


def spec_of(size: Size, precision: Precision, steps: int) -> JobSpec:
    batches = {"batch": size.batch, "micro_batch": size.micro_batch}
    return JobSpec(
        name="gpu", data=bytes(32), model=size.model, local_steps=steps, audit=AuditMode.OFF, precision=precision, **batches
    )


def tokens_of(model: ModelSpec) -> TokenizedText:
    drawn = np.random.default_rng(0).integers(0, model.vocabulary, 64 * model.context + 1)
    return TokenizedText(drawn.astype(np.uint16), np.empty(0, dtype=np.uint16), np.ones(model.vocabulary, dtype=np.int64))


def ours(spec: JobSpec, device: torch.device, compile: bool) -> TorchEngine:
    return TorchEngine(spec, tokens_of(spec.model), ByteTokenizer(), None, device, EngineResources(compile=compile))


def plain(spec: JobSpec, device: torch.device, compile: bool) -> Callable[[int], None]:
    """Return a plain training loop, as a function of the number of steps."""
    tokens, model = tokens_of(spec.model), Plain(spec.model).to(device)
    net: Any = torch.compile(model) if compile else model
    optimizer = torch.optim.AdamW(
        model.parameters(), spec.inner_rate, (spec.beta1, spec.beta2), weight_decay=spec.weight_decay, fused=device.type == "cuda"
    )

    def steps(count: int) -> None:
        for step in range(count):
            places = {"batch": spec.batch, "tokens": len(tokens.train), "context": spec.model.context, "seed": 0}
            starts = batch_offsets(JOB, 0, TRAINER, step, **places)
            optimizer.zero_grad(set_to_none=True)
            for first in range(0, spec.batch, spec.micro_batch):
                part = starts[first : first + spec.micro_batch]
                examples = [devices.to_device(array, device) for array in sequence_batch(tokens.train, part, spec.model.context)]
                with autocast_context(spec, device):
                    loss = net(*examples) * (len(part) / spec.batch)
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), spec.gradient_clip)
            optimizer.step()

    return steps


def waited(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    waited(device)
    started = time.perf_counter()
    work()
    waited(device)
    return time.perf_counter() - started


def peak_flops(device: torch.device, precision: Precision) -> float:
    """Return the floating-point operations per second of a large matrix product, as the device's own speed."""
    rows = MATRIX[device.type]
    kind = torch.bfloat16 if precision is Precision.BF16 else torch.float32
    a, b = (torch.randn(rows, rows, device=device).to(kind) for _ in range(2))
    best = min(seconds_of(lambda: a @ b, device) for _ in range(10))
    return 2 * rows**3 / best


def flops_of(model: ModelSpec) -> int:
    """Return the operations of one sequence, forward and backward.

    They are six per parameter and token, and the products of attention (PaLM, appendix B).
    """
    return model.context * (6 * model.parameters + 12 * model.layers * model.width * model.context)


def first_parameters(spec: JobSpec) -> Float32Array:
    if spec.model.parameters < DRAWN_FROM:
        return initial_parameters(spec)
    return (np.random.default_rng(0).random(spec.model.parameters, dtype=np.float32) - np.float32(0.5)) * np.float32(0.04)


def measured(
    name: str, precision: Precision, compile: bool, steps: int | None, seconds: float | None, device: torch.device
) -> Row:
    """Measure rounds with this number of steps, or with the number that the plain loop runs in `seconds`.

    Like a peer's, a round begins with a vector in the processor's memory, and ends with Δ there.
    """
    size = SIZES[name]
    row, spec = Row(name, size.model.parameters, precision.value, compile), spec_of(size, precision, PROBE_STEPS)
    if problem := size.model.problem():
        row.reason = problem
        return row
    start = first_parameters(spec)
    try:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        engine = ours(spec, device, compile)

        def own() -> None:
            engine.local_steps(start, JOB, 0, TRAINER)

        own()
        row.memory_mb = memory_mb(device)
        other = plain(spec, device, compile)
        other(PROBE_STEPS)
        probed = seconds_of(lambda: other(PROBE_STEPS), device)
        row.steps = taken = steps or max(PROBE_STEPS, round(PROBE_STEPS * (seconds or size.seconds) / probed))
        engine.spec = spec_of(size, precision, taken)
        turns = [(seconds_of(own, device), seconds_of(lambda: other(taken), device)) for _ in range(TURNS)]
    except (MemoryError, RuntimeError) as error:
        row.reason = str(error).partition("\n")[0]
        return row
    samples = taken * size.batch
    best, best_plain = (min(times) for times in zip(*turns, strict=True))
    row.samples_per_second, row.plain_samples_per_second = samples / best, samples / best_plain
    row.share_of_peak = samples * flops_of(size.model) / best / peak_flops(device, precision)
    if precision is Precision.FP32 and not compile and name == "0.8M":
        spec = spec_of(size, precision, REPLAY_STEPS)
        deltas = [ours(spec, where, False).local_steps(start, JOB, 0, TRAINER)[0] for where in (device, devices.CPU)]
        row.replay_error = float(np.linalg.norm(deltas[0] - deltas[1]) / np.linalg.norm(deltas[1]))
    return row


def memory_mb(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1_024 / 1e6


def verdicts(rows: Sequence[Row], device: torch.device) -> Iterator[str]:
    for row in rows:
        how = f"{row.size}, {row.precision}{', compiled' if row.compile else ''}"
        if row.replay_error is not None:
            yield verdict(
                row.replay_error <= REPLAY_MAX, f"{how}: an update within {REPLAY_MAX:g} of a processor's: {row.replay_error:.1e}"
            )
        share = row.share_of_plain
        if device.type == "cuda" and share is not None:
            yield verdict(share >= SHARE_MIN, f"{how}: {SHARE_MIN} of the plain loop's samples a second: {share:.2f}")


def show(rows: Sequence[Row]) -> None:
    table = Table("model", "precision", "compiled", "steps", "samples/s", "plain loop", "of it", "of peak", "memory MB", "replay")
    for row in rows:
        figures = [
            *(f"{value:.1f}" if value is not None else "–" for value in (row.samples_per_second, row.plain_samples_per_second)),
            *(f"{value:.2f}" if value is not None else "–" for value in (row.share_of_plain, row.share_of_peak)),
            f"{row.memory_mb:.0f}" if row.memory_mb is not None else "–",
            f"{row.replay_error:.1e}" if row.replay_error is not None else row.reason or "–",
        ]
        table.add_row(row.size, row.precision, "yes" if row.compile else "no", str(row.steps or "–"), *figures)
    Console().print(table)


def main() -> int:
    parser = Parser("gpu", __doc__, package="benchmarks")
    parser.add_argument("--device", default=AUTO, help="value of the setting `device` (default: the first GPU)")
    parser.add_argument(
        "--only", nargs="+", choices=SIZES, default=list(SIZES), metavar="SIZE", help=f"sizes of models: {', '.join(SIZES)}"
    )
    parser.add_argument("--steps", type=COUNT, help="steps of a round (default: those of the plain loop in --seconds)")
    parser.add_argument("--seconds", type=duration, help="seconds of a round of the plain loop (default: 3, 6 and 15, by size)")
    parser.add_argument("--no-compile", action="store_true", help="skip compiled rows")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    try:
        device = devices.select_device(options.device)
    except UserError as error:
        parser.error(str(error))
    if device == devices.CPU and options.device != "cpu":
        print("nothing was measured, because this machine has no GPU: --device cpu --only 0.8M measures the processor")
        return 0
    torch.set_num_threads(1 if device == devices.CPU else torch.get_num_threads())
    devices.configure_device(device)
    about = torch.cuda.get_device_name(device) if device.type == "cuda" else "processor, 1 thread"
    started, rows = time.time(), list[Row]()
    for compile in (False,) if options.no_compile else (False, True):  # compiled rows, the longest, come last
        for size in options.only:
            for precision in Precision:
                rows.append(measured(size, precision, compile, options.steps, options.seconds, device))
                write(
                    options.json,
                    started,
                    {"device": about, "rows": [{**asdict(row), "share_of_plain": row.share_of_plain} for row in rows]},
                )
                gc.collect()
                torch.compiler.reset()
                if device.type == "cuda":
                    torch.cuda.empty_cache()
    show(rows)
    return conclude(verdicts(rows, device))


if __name__ == "__main__":
    sys.exit(main())
