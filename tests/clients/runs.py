"""A small base model and request bodies for tests of client runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from clients.objective import OBJECTIVES
from clients.records import LOSS_INPUTS, RATIO_MASK, AdapterSettings, ClientLoss, Example, RequestBody
from ledger.jobs import ModelReference
from protocol import codec
from training.data.token_sequences import TokenizedText
from training.engines.engine import RequiredModel
from training.job_spec import AggregationRule, JobSpec, OuterOptimizerKind
from training.objectives.registry import register_objectives
from training.replicated.replicated_model import ReplicatedModel
from training.transformer import ModelSpec

register_objectives(OBJECTIVES)
MODEL = ModelSpec(vocabulary=257, context=24, width=16, layers=2, heads=2, kv_heads=1, hidden=24)
BASE_JOB = b"b" * 32
BASE = JobSpec(name="base", model=MODEL, data=bytes(32), seed=3)


def base_model(spec: JobSpec = BASE) -> RequiredModel:
    """Return the base, whose embedding and matrices are random."""
    return RequiredModel(
        spec, ReplicatedModel.initial(BASE_JOB, spec).parameters, TokenizedText.without_text(np.ones(257, np.int64))
    )


def client_spec(base: JobSpec = BASE, **settings: object) -> JobSpec:
    own = AdapterSettings(**{"rank": 4, "base": ModelReference(BASE_JOB, 10, bytes(32))} | settings)  # type: ignore[arg-type]
    return JobSpec(
        name="run",
        objective="client",
        model=base.model,
        rounds=1_000,
        local_steps=1,
        bits=16,
        feedback_decay=0.0,
        outer=OuterOptimizerKind.ADAMW,
        rule=AggregationRule.MEAN,
        byzantine_max=0,
        warmup_rounds=0,
        seed=7,
        objective_settings=codec.encode(own),
    )


def floats(values: npt.NDArray[np.float64] | list[float]) -> bytes:
    return np.asarray(values, dtype="<f4").tobytes()


def tokens(values: npt.NDArray[np.int64] | list[int]) -> bytes:
    return np.asarray(values, dtype="<u2").tobytes()


def body(loss: ClientLoss = ClientLoss.CROSS_ENTROPY, examples: int = 5, seed: int = 0, **config: float) -> RequestBody:
    """Return a request with examples of different lengths, whose inputs are typical of the loss."""
    draw, made = np.random.default_rng(seed), []
    for _ in range(examples):
        length = int(draw.integers(1, MODEL.context + 1))
        text = draw.integers(0, MODEL.vocabulary, length + 1)
        inputs: Mapping[str, npt.NDArray[np.float64]] = {
            "weights": draw.integers(0, 3, length) - 0.5,
            "logprobs": draw.normal(-5.5, 0.3, length),
            "advantages": draw.normal(0, 1, length) * (draw.random(length) < 0.7),
            RATIO_MASK: draw.integers(0, 2, length).astype(float),
        }
        made.append(Example(tokens(text[:-1]), tokens(text[1:]), {name: floats(inputs[name]) for name in LOSS_INPUTS[loss]}))
    return RequestBody(loss, dict(sorted(config.items())), tuple(made))


def with_example(request: RequestBody, **changes: object) -> RequestBody:
    """Return the request with other fields in its first example."""
    first, *others = request.examples
    return replace(request, examples=(replace(first, **changes), *others))  # type: ignore[arg-type]
