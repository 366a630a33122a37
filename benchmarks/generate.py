"""Speed of text generation with and without a key-value cache: `python -m benchmarks.generate --json FILE`.

Three sizes of untrained models run in one thread, on a prompt of 16 tokens, up to the end of the context. Rates are tokens per
second of processor time, medians of all repeats.

- *cache*, *no cache*: greedy tokens, with cached keys and values, and with whole passes.
- *drawn*: temperature 0.8, top-k 40, top-p 0.9. *4 beams*: passes of a beam search per second, each of four rows.
- *logits*: largest difference between both ways over all positions. *anew*: the same between a cache and a prompt that is read
  again, as after a restart, at every seventh position.
- *waits*: the longest wait of a proposal for a text of 4,096 tokens, which is its longest slice. *whole*: all slices together.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.provenance import write
from benchmarks.verdicts import conclude, verdict
from protocol.sampling import TOKENS_MAX, SamplingOptions
from scenarios.trials import COUNT, Parser
from training import worker_protocol
from training.data.token_sequences import TokenizedText
from training.data.tokenizer import ByteTokenizer
from training.engines.pytorch import sampling
from training.engines.pytorch.engine import TorchEngine
from training.engines.pytorch.model import GPT
from training.job_spec import JobSpec
from training.replicated.tensor_layout import Float32Array, initial_parameters
from training.text_generation import SLICE_SECONDS, StopSequenceDecoder, TextGeneration, TextGenerations
from training.transformer import ModelSpec

MODELS = (
    ModelSpec(),
    ModelSpec(width=192, layers=4, heads=4, kv_heads=2, hidden=608, context=256),
    ModelSpec(width=512, layers=6, heads=8, kv_heads=4, hidden=1_376, context=512),
)
PROMPT_TOKENS, BEAMS = 16, 4
LOGITS_APART_MAX = 1e-5  # float32 has seven digits, and logits are below ten
SLICE_SECONDS_MAX = 2 * SLICE_SECONDS  # with its last token, and other load of the machine
SCALE = np.float32(1.5)  # of the first parameters: attention is far from uniform, as in a trained model
DRAWN = SamplingOptions(temperature=0.8, top_k=40, top_p=0.9)


@dataclass(frozen=True)
class Row:
    parameters: int
    seed: int
    context: int
    cached: float  # tokens per second
    uncached: float
    drawn: float
    beam_passes: float  # per second
    logits_apart: float
    anew_apart: float
    beam_gain: float  # nats per token by which the text of four beams is likelier than that of one
    waits: float  # wall-clock seconds
    whole: float


def measure(shape: ModelSpec, seed: int, repeats: int) -> Row:
    spec = JobSpec(name="generate", data=bytes(32), model=shape, seed=seed)
    engine = TorchEngine(spec, TokenizedText.without_text(ByteTokenizer().token_bytes), ByteTokenizer())
    parameters = initial_parameters(spec) * SCALE
    engine.load_parameters(parameters)
    model, draw = engine.model, np.random.default_rng(seed)
    prompt = draw.integers(0, 256, PROMPT_TOKENS).tolist()
    greedy = SamplingOptions(max_tokens=shape.context - PROMPT_TOKENS, temperature=0.0)
    drawing, beams = replace(DRAWN, max_tokens=greedy.max_tokens), replace(greedy, beams=BEAMS)

    def cached(how: SamplingOptions) -> list[int]:
        return list(chain.from_iterable(sampling.sample_tokens(model, prompt, how, (), _quietly)))

    def searched(how: SamplingOptions) -> list[int]:
        return list(sampling.beam_search(model, prompt, how, (), _quietly, lambda made: False))[-1]

    def rate(make: Callable[[], Sequence[int]]) -> float:
        make()  # the caches are empty
        return statistics.median(greedy.max_tokens / _seconds(make) for _ in range(repeats))

    waits, whole = _slices(engine, parameters)
    return Row(
        parameters=engine.spec.model.parameters,
        seed=seed,
        context=shape.context,
        cached=rate(lambda: cached(greedy)),
        uncached=rate(lambda: uncached(model, prompt, greedy.max_tokens)),
        drawn=rate(lambda: cached(drawing)),
        beam_passes=rate(lambda: searched(beams)),
        **apart(model, [*prompt, *cached(drawing)]),
        beam_gain=_mean(model, prompt, searched(beams)) - _mean(model, prompt, cached(greedy)),
        waits=waits,
        whole=whole,
    )


def _quietly() -> None: ...


def _seconds(make: Callable[[], Any]) -> float:
    started = time.process_time()
    make()
    return time.process_time() - started


@torch.no_grad()
def uncached(model: GPT, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        last_BC = model.features(torch.tensor([tokens]), last=1)[:, -1]
        tokens.append(int(model.logits(last_BC)[0].argmax()))
    return tokens[len(prompt) :]


@torch.no_grad()
def _logits(model: GPT, tokens: list[int]) -> torch.Tensor:
    return model.logits(model.features(torch.tensor([tokens])))[0]


def apart(model: GPT, tokens: list[int]) -> dict[str, float]:
    """Return the largest differences of a logit, by their fields."""
    whole_TV, course = _logits(model, tokens), sampling.DecodingState(model, tokens[:PROMPT_TOKENS])
    most = anew = 0.0
    for place in range(PROMPT_TOKENS, len(tokens)):
        logits_V = course.logits()[0]
        most = max(most, float((logits_V - whole_TV[place - 1]).abs().max()))
        if place % 7 == 0:
            anew = max(anew, float((logits_V - _anew(model, tokens[:place])).abs().max()))
        course.append([0], [tokens[place]])
    return {"logits_apart": most, "anew_apart": anew}


def _anew(model: GPT, prompt: list[int]) -> torch.Tensor:
    course = sampling.DecodingState(model, prompt)
    while course.prefill_step():
        pass
    return course.logits()[0]


def _mean(model: GPT, prompt: list[int], made: list[int]) -> float:
    """Return the mean nats per token."""
    logp_TV = torch.log_softmax(_logits(model, [*prompt, *made]).double(), dim=-1)
    places = range(len(prompt) - 1, len(prompt) + len(made) - 1)
    return statistics.mean(float(logp_TV[place, token]) for place, token in zip(places, made, strict=True))


def _slices(engine: TorchEngine, parameters: Float32Array) -> tuple[float, float]:
    """Return the seconds of the longest slice, and of all slices."""
    asked = worker_protocol.GenerateRequest(bytes(32), None, "The ", SamplingOptions(max_tokens=TOKENS_MAX, temperature=1.0))
    texts, seconds, is_over, told = TextGenerations(), list[float](), False, 0
    while not is_over:
        started = time.perf_counter()
        how = replace(asked, told_characters=told)
        done = texts.next_slice(
            how, lambda: TextGeneration(engine.generate_text(parameters, b"The ", asked.sampling), StopSequenceDecoder(()), 0)
        )
        seconds.append(time.perf_counter() - started)
        is_over, told = done.is_over, told + len(done.text)
    return max(seconds), sum(seconds)


# Tables -------------------------------------------------------------------------------------------------------------


def show(rows: list[Row]) -> None:
    table = Table(title="tokens a second")
    for heading in (
        "parameters",
        "context",
        "seed",
        "cache",
        "no cache",
        "drawn",
        "4 beams",
        "logits",
        "anew",
        "gain",
        "waits, ms",
        "whole, s",
    ):
        table.add_column(heading, justify="right")
    for row in rows:
        rates = (f"{rate:,.0f}" for rate in (row.cached, row.uncached, row.drawn, row.beam_passes))
        distances = f"{row.logits_apart:.1e}", f"{row.anew_apart:.0e}", f"{row.beam_gain:+.4f}"
        rest = (*distances, f"{1e3 * row.waits:.0f}", f"{row.whole:.1f}")
        table.add_row(f"{row.parameters / 1e6:.2f}M", str(row.context), str(row.seed), *rates, *rest)
    Console(width=130).print(table)


def verdicts(rows: list[Row]) -> Iterator[str]:
    apart, waits = max(row.logits_apart for row in rows), max(row.waits for row in rows)
    anew = max(row.anew_apart for row in rows)
    yield verdict(apart <= LOGITS_APART_MAX, f"logits with a cache within {LOGITS_APART_MAX:g} of those without: {apart:.1e}")
    yield verdict(anew == 0, f"they are those of a prompt that is read anew, bit for bit: {anew:.1e}")
    yield verdict(waits <= SLICE_SECONDS_MAX, f"a proposal waits at most {SLICE_SECONDS_MAX:g} s for a text: {waits:.2f} s")


def main() -> int:
    parser = Parser("generate", __doc__.splitlines()[0], package="benchmarks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=(0, 1, 2), metavar="S", help="seeds of models and prompts, with rows for each"
    )
    parser.add_argument("--repeats", type=COUNT, default=3, metavar="N", help="number of repetitions, whose median is shown")
    parser.add_argument("--only", type=COUNT, default=len(MODELS), metavar="N", help="measure only the N smallest models")
    options = parser.parse_args()
    torch.set_num_threads(1)
    started, rows = time.time(), list[Row]()
    for shape, seed in product(MODELS[: options.only], options.seeds):
        rows.append(measure(shape, seed, options.repeats))
        write(options.json, started, figures(options, rows))
    show(rows)
    return conclude(verdicts(rows))


def figures(options: argparse.Namespace, rows: list[Row]) -> dict[str, Any]:
    return {"seeds": list(options.seeds), "repeats": options.repeats, "rows": [asdict(row) for row in rows]}


if __name__ == "__main__":
    sys.exit(main())
