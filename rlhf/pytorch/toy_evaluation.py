"""The toy, measured: how good a policy is, exactly, and what one process without a network makes of it.

`python -m rlhf.pytorch.toy_evaluation POLICY REFERENCE` reads two files of `training.formats.checkpoint` and prints the figures
as JSON.
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

from rlhf.objectives import rollouts, rule_rewards, toy_policies
from rlhf.objectives.ppo import PPO, PpoSettings
from rlhf.objectives.rollouts import RolloutId
from rlhf.pytorch import losses, rollout_passes
from training.data.token_sequences import TokenizedText
from training.data.tokenizer import ByteTokenizer
from training.engines.engine import DeclaringEngine
from training.engines.pytorch.backend import BACKEND
from training.engines.pytorch.model import GPT
from training.formats import checkpoint
from training.job_spec import JobSpec
from training.objectives import registry
from training.replicated.parameter_init import initial_parameters
from training.replicated.tensor_layout import Float32Array

SAMPLES = 64  # responses of each of the two that people can read


@dataclass(frozen=True, slots=True)
class ToyMetrics:
    """Of a policy over all responses; no sampling takes part."""

    reference_value: float
    optimum: float
    value: float
    gap_closed: float
    kl: float  # nats
    score: float


def log_probabilities(spec: JobSpec, parameters: Float32Array) -> toy_policies.Float64Array:
    """Of all responses, in the order of `toy_policies.toy_responses`."""
    model, responses = _model(spec, parameters), torch.from_numpy(toy_policies.toy_responses())
    prompted = F.pad(responses[:, :-1], (1, 0), value=rule_rewards.TOY_PROMPT)
    with torch.no_grad():
        logits = model.logits(model.features(prompted))
        logp: toy_policies.Float64Array = losses.log_probabilities(logits, responses).double().sum(1).numpy()
    return logp


def toy_metrics(spec: JobSpec, parameters: Float32Array, first: Float32Array) -> ToyMetrics:
    own: PpoSettings = spec.decoded_settings
    logp, reference, rewards = (
        log_probabilities(spec, parameters),
        log_probabilities(spec, first),
        toy_policies.toy_rewards(spec.seed),
    )
    return ToyMetrics(
        reference_value=toy_policies.policy_value(reference, reference, rewards, own.beta),
        optimum=toy_policies.optimal_value(reference, rewards, own.beta),
        value=toy_policies.policy_value(logp, reference, rewards, own.beta),
        gap_closed=toy_policies.gap_closed(logp, reference, rewards, own.beta),
        kl=float(np.exp(logp) @ (logp - reference)),
        score=float(np.exp(logp) @ rewards),
    )


def train_single_process(spec: JobSpec) -> ToyMetrics:
    """One process: the update of each round is taken as it is. Nothing is encoded, aggregated, or agreed on."""
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


def sample_texts(spec: JobSpec, parameters: Float32Array, count: int = SAMPLES) -> list[str]:
    """Responses as people read them."""
    place, bounds = RolloutId(bytes(32), 0, bytes(32)), PPO.rollout_limits(spec, spec.decoded_settings)
    prompts = [np.full(1, rule_rewards.TOY_PROMPT)] * count
    noise = partial(rollouts.gumbel_noise, place, vocabulary=bounds.vocabulary)
    responses = rollout_passes.sample_responses(_model(spec, parameters), prompts, noise, bounds, lambda: None)
    return [" ".join(map(str, response)) for response in responses]


def _model(spec: JobSpec, parameters: Float32Array) -> GPT:
    model = GPT(spec)
    with torch.no_grad():
        model.parameters.copy_(torch.from_numpy(np.array(parameters)))
    return model


def main() -> None:
    registry.register_objectives((PPO,))
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(prog="rlhf.pytorch.toy_evaluation", description=__doc__)
    parser.add_argument("policy", type=Path)
    parser.add_argument("reference", type=Path)
    options = parser.parse_args()
    spec, policy, _ = checkpoint.read_checkpoint(options.policy)
    reference = checkpoint.read_checkpoint(options.reference)[1]
    pairs = zip(sample_texts(spec, policy), sample_texts(spec, reference), strict=True)
    said = [{"prompt": str(rule_rewards.TOY_PROMPT), "policy": ours, "reference": theirs} for ours, theirs in pairs]
    print(json.dumps({"figures": asdict(toy_metrics(spec, policy, reference)), "samples": said}))


if __name__ == "__main__":
    main()
