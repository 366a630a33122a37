"""The toy, measured: how good a policy is, exactly, and what one process without a network makes of it.

`python -m rlhf.pytorch.toy POLICY REFERENCE` reads two files of `training.checkpoint` and prints the figures as JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from rlhf import losses, rollouts, rules
from rlhf.objective import PPO, PpoTerms
from rlhf.pytorch import passes
from rlhf.rollouts import Place
from training import checkpoint
from training.data.tokenizer import ByteTokenizer
from training.engines.engine import DeclaringEngine
from training.engines.pytorch.kind import KIND
from training.engines.pytorch.model import GPT
from training.objectives import registry
from training.replicated.init import initial_parameters
from training.replicated.layout import Float32Array
from training.sequences import Tokens
from training.spec import JobSpec

SAMPLES = 64  # responses of each of the two that people can read


@dataclass(frozen=True, slots=True)
class Figures:
    """Of a policy over all responses; no sampling takes part."""

    reference_value: float
    optimum: float
    value: float
    gap_closed: float
    kl: float  # nats
    score: float


def log_probabilities(spec: JobSpec, parameters: Float32Array) -> rules.Float64Array:
    """Of all responses, in the order of `rules.toy_responses`."""
    model, responses = _model(spec, parameters), torch.from_numpy(rules.toy_responses())
    prompted = F.pad(responses[:, :-1], (1, 0), value=rules.TOY_PROMPT)
    with torch.no_grad():
        logits = model.logits(model.features(prompted))
        logp: rules.Float64Array = losses.log_probabilities(logits, responses).double().sum(1).numpy()
    return logp


def figures(spec: JobSpec, parameters: Float32Array, first: Float32Array) -> Figures:
    own: PpoTerms = spec.own
    logp, reference, rewards = log_probabilities(spec, parameters), log_probabilities(spec, first), rules.toy_rewards(spec.seed)
    return Figures(
        reference_value=rules.value(reference, reference, rewards, own.beta),
        optimum=rules.optimum(reference, rewards, own.beta),
        value=rules.value(logp, reference, rewards, own.beta),
        gap_closed=rules.gap_closed(logp, reference, rewards, own.beta),
        kl=float(np.exp(logp) @ (logp - reference)),
        score=float(np.exp(logp) @ rewards),
    )


def alone(spec: JobSpec) -> Figures:
    """One process: the update of each round is taken as it is. Nothing is encoded, aggregated, or agreed on."""
    first = initial_parameters(spec)
    engine = KIND.open(spec, Tokens.none(ByteTokenizer().token_bytes), ByteTokenizer(), first)
    assert isinstance(engine, DeclaringEngine)
    parameters, (job, trainer) = first, (bytes(32), bytes(32))
    with tempfile.TemporaryDirectory() as folder:
        for number in range(spec.rounds):
            made = engine.declare(parameters, job, number, trainer, Path(folder))
            by = engine.derived(parameters, job, number, trainer, made)
            delta, _ = engine.local_steps(parameters, job, number, trainer, declaration=by)
            parameters = parameters - delta
    return figures(spec, parameters, first)


def sampled(spec: JobSpec, parameters: Float32Array, count: int = SAMPLES) -> list[str]:
    """Responses as people read them."""
    place, bounds = Place(bytes(32), 0, bytes(32)), PPO.bounds(spec, spec.own)
    prompts = [np.full(1, rules.TOY_PROMPT)] * count
    noise = partial(rollouts.gumbel, place, vocabulary=bounds.vocabulary)
    responses = passes.sample(_model(spec, parameters), prompts, noise, bounds, lambda: None)
    return [" ".join(map(str, response)) for response in responses]


def _model(spec: JobSpec, parameters: Float32Array) -> GPT:
    model = GPT(spec)
    with torch.no_grad():
        model.parameters.copy_(torch.from_numpy(np.array(parameters)))
    return model


def main() -> None:
    registry.add((PPO,))
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(prog="rlhf.pytorch.toy", description=__doc__)
    parser.add_argument("policy", type=Path)
    parser.add_argument("reference", type=Path)
    options = parser.parse_args()
    spec, policy, _ = checkpoint.read(options.policy)
    reference = checkpoint.read(options.reference)[1]
    pairs = zip(sampled(spec, policy), sampled(spec, reference), strict=True)
    said = [{"prompt": str(rules.TOY_PROMPT), "policy": ours, "reference": theirs} for ours, theirs in pairs]
    print(json.dumps({"figures": asdict(figures(spec, policy, reference)), "samples": said}))


if __name__ == "__main__":
    main()
