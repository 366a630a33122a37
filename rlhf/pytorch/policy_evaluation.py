"""Evaluation of a tuned policy: exact for the toy model, and by samples and their reward model for other policies.

`python -m rlhf.pytorch.policy_evaluation BETA POLICY REFERENCE [REWARD TEXT PAIRS [TOKENIZER]]` prints JSON.

| argument | meaning |
|---|---|
| BETA | β of the next round; ignored for the toy model, which uses the β of its job |
| POLICY, REFERENCE, REWARD | models as files of `training.formats.checkpoint`; without REWARD the policy is a toy model |
| TEXT | file of a text, whose held-out part gives the prompts |
| PAIRS | file of the reward model's preference set, whose held-out part is used |
| TOKENIZER | file of the job's tokenizer, if the job has one |
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from rlhf.data import preference_set_statistics
from rlhf.data.preference_sets import PreferencePair, decode_records, split_held_out
from rlhf.data.tokenized_records import open_pairs
from rlhf.objectives import rollouts
from rlhf.objectives.policy_monitors import PolicyMetrics
from rlhf.objectives.ppo import PPO, PpoSettings
from rlhf.objectives.rollouts import RolloutId, TokenIds, is_finished
from rlhf.objectives.rule_rewards import TOY_BETA, TOY_LENGTH, TOY_PROMPT, TOY_VOCABULARY, bigram_table
from rlhf.objectives.supervised_objectives import OBJECTIVES
from rlhf.pair_accuracy import ACCURACY
from rlhf.pytorch import rollout_passes
from rlhf.pytorch.supervised_objectives import NormalizedRewardModel, reward_metrics
from training.corpus import open_tokens
from training.data.token_sequences import TokenArray
from training.data.tokenizer import Tokenizer, load_tokenizer
from training.engines.engine import RequiredModel
from training.engines.pytorch.log_probabilities import log_probabilities
from training.engines.pytorch.model import GPT
from training.formats import checkpoint
from training.job_spec import JobSpec
from training.objectives import registry
from training.replicated.tensor_layout import Float32Array

SAMPLES: Final = 256  # prompts, each with a response of policy and reference: the mean score has 1/16 of a score's deviation
TOY_SAMPLES: Final = 64  # responses of the toy policy and of its reference, for people to read
Float64Array = npt.NDArray[np.float64]


# The toy -----------------------------------------------------------------------------------------------------------------
#
# The toy model is so small that the value of any policy, and the largest value, can be computed exactly. Arrays have the shape
# (7776,), in the order of `toy_responses`.


def toy_responses() -> npt.NDArray[np.int64]:
    """Return all responses (7776, 5): the five-digit numbers in base six, ascending."""
    return np.array(list(itertools.product(range(TOY_VOCABULARY), repeat=TOY_LENGTH)), dtype=np.int64)


def toy_rewards(seed: int) -> Float64Array:
    responses, table = toy_responses(), np.array(bigram_table(seed), dtype=np.float64)
    rewards: Float64Array = table[responses[:, :-1], responses[:, 1:]].mean(axis=1)
    return rewards


def policy_value(logp: Float64Array, reference: Float64Array, rewards: Float64Array, beta: float = TOY_BETA) -> float:
    """Return J = E r − β·KL(policy ‖ reference).

    `logp` and `reference` are the log-probabilities of each response under the policy and under the reference.
    """
    return float(np.exp(logp) @ (rewards - beta * (logp - reference)))


def optimal_value(reference: Float64Array, rewards: Float64Array, beta: float = TOY_BETA) -> float:
    """Return J* = β·ln E_reference e^{r/β}, the largest J of any policy."""
    return float(beta * np.logaddexp.reduce(reference + rewards / beta))


def gap_closed(logp: Float64Array, reference: Float64Array, rewards: Float64Array, beta: float = TOY_BETA) -> float:
    """Return the closed part of the gap to the optimal policy: (J − J_ref) / (J* − J_ref).

    It is 0 for the reference, and 1 for the optimal policy.
    """
    start = policy_value(reference, reference, rewards, beta)
    return (policy_value(logp, reference, rewards, beta) - start) / (optimal_value(reference, rewards, beta) - start)


def toy_log_probabilities(spec: JobSpec, parameters: Float32Array) -> Float64Array:
    """Return the log-probability of each possible response under the toy model."""
    model, responses = _model(spec, parameters), torch.from_numpy(toy_responses())
    prompted = F.pad(responses[:, :-1], (1, 0), value=TOY_PROMPT)
    with torch.no_grad():
        logits = model.logits(model.features(prompted))
        logp: Float64Array = log_probabilities(logits, responses).double().sum(1).numpy()
    return logp


def toy_metrics(spec: JobSpec, parameters: Float32Array, first: Float32Array) -> PolicyMetrics:
    """Measure a policy of the toy over all responses, without sampling."""
    own: PpoSettings = spec.decoded_settings
    beta, rewards = own.beta, toy_rewards(spec.seed)
    logp, reference = toy_log_probabilities(spec, parameters), toy_log_probabilities(spec, first)
    return PolicyMetrics(
        reference_value=policy_value(reference, reference, rewards, beta),
        optimum=optimal_value(reference, rewards, beta),
        value=policy_value(logp, reference, rewards, beta),
        gap_closed=gap_closed(logp, reference, rewards, beta),
        kl=float(np.exp(logp) @ (logp - reference)),
        score=float(np.exp(logp) @ rewards),
    )


def evaluate_toy(files: Sequence[Path]) -> tuple[PolicyMetrics, list[dict[str, str]]]:
    (spec, policy, _), (_, reference, _) = map(checkpoint.read_checkpoint, files)
    prompts = [np.full(1, TOY_PROMPT)] * TOY_SAMPLES
    sampled = (_sampled(_model(spec, parameters), spec, prompts) for parameters in (policy, reference))
    texts = ([" ".join(map(str, response)) for response in responses] for responses in sampled)
    return toy_metrics(spec, policy, reference), _samples([str(TOY_PROMPT)] * TOY_SAMPLES, *texts)


# Other policies ----------------------------------------------------------------------------------------------------------


def evaluate_policy(
    beta: float, files: Sequence[Path], text: Path, pairs: Path, tokenizer: Path | None = None
) -> tuple[PolicyMetrics, list[dict[str, str]]]:
    (spec, policy, _), (_, reference, _), (of_reward, scores, _) = map(checkpoint.read_checkpoint, files)
    known = load_tokenizer(tokenizer.read_bytes() if tokenizer else None, spec.model.vocabulary)
    own: PpoSettings = spec.decoded_settings
    learned = open_pairs(of_reward, pairs, known)
    scorer = NormalizedRewardModel(RequiredModel(of_reward, scores, learned), _quietly)
    models = _model(spec, policy), _model(spec, reference)
    prompts_BP = _prompts(open_tokens(spec, text, known).held_out, own.prompt_tokens)
    ours, theirs = (_sampled(model, spec, list(prompts_BP.numpy())) for model in models)
    score, reference_score = (_score(scorer, prompts_BP, responses, own.stop_token) for responses in (ours, theirs))
    kl = sum(sign * _logp(model, prompts_BP, ours) for sign, model in zip((1, -1), models, strict=True))
    with pairs.open("rb") as stream:
        trained, held_out = split_held_out(decode_records(stream, PreferencePair), of_reward.held_out_permille)
    figures = PolicyMetrics(
        reference_value=reference_score,
        value=score - beta * kl,
        kl=kl,
        score=score,
        pair_accuracy=reward_metrics(_model(of_reward, scores), of_reward, learned, _quietly).get(ACCURACY),
        linear_accuracy=preference_set_statistics.word_count_accuracy(
            preference_set_statistics.fit_word_counts(trained), held_out
        ),
    )
    said = ([_text(known, row, own.stop_token) for row in rows] for rows in (prompts_BP.tolist(), ours, theirs))
    return figures, _samples(*said)


def _quietly() -> None: ...


def _model(spec: JobSpec, parameters: Float32Array) -> GPT:
    model = GPT(spec)
    model.load_parameters(parameters)
    return model


def _prompts(text: TokenArray, length: int) -> Tensor:
    """Return evenly spaced windows of a text (SAMPLES, length)."""
    starts = np.linspace(0, len(text) - length, SAMPLES).astype(np.int64)
    return torch.from_numpy(np.stack([text[start : start + length] for start in starts]).astype(np.int64))


def _sampled(model: GPT, spec: JobSpec, prompts: Sequence[TokenIds]) -> list[list[int]]:
    bounds, place = PPO.rollout_limits(spec, spec.decoded_settings), RolloutId(bytes(32), 0, bytes(32))
    noise = partial(rollouts.gumbel_noise, place, vocabulary=bounds.vocabulary)
    return rollout_passes.sample_responses(model, prompts, noise, bounds, _quietly)


def _padded(responses: Sequence[Sequence[int]], length: int) -> Tensor:
    return torch.tensor([[*response, *[0] * (length - len(response))] for response in responses])


def _score(scorer: NormalizedRewardModel, prompts_BP: Tensor, responses: list[list[int]], stop: int | None) -> float:
    whole_BS = torch.cat((prompts_BP, _padded(responses, max(map(len, responses)))), dim=1)
    ended = [stop is not None and is_finished(np.array(response), stop) for response in responses]
    last = [prompts_BP.shape[1] + len(response) - 1 - end for response, end in zip(responses, ended, strict=True)]
    return float(scorer.scores(whole_BS, torch.tensor(last), _quietly).double().mean())


def _logp(model: GPT, prompts_BP: Tensor, responses: list[list[int]]) -> float:
    """Return the mean log-probability of a response: the sum over its tokens, averaged over the responses."""
    lengths = list(map(len, responses))
    tokens_BT = _padded(responses, max(lengths))
    passed = rollout_passes.forward_pass(
        model, torch.cat((prompts_BP, tokens_BT[:, :-1]), dim=1), tokens_BT, lengths, "", _quietly
    )
    mask_BT = torch.arange(tokens_BT.shape[1]) < torch.tensor(lengths)[:, None]
    return float(passed.logp_BT[mask_BT].double().sum()) / len(responses)


def _text(tokenizer: Tokenizer, tokens: Sequence[int], stop: int | None) -> str:
    return tokenizer.decode([token for token in tokens if token != stop]).decode(errors="replace")


def _samples(*texts: Sequence[str]) -> list[dict[str, str]]:
    return [dict(zip(("prompt", "policy", "reference"), row, strict=True)) for row in zip(*texts, strict=True)]


def main() -> None:
    registry.register_objectives(OBJECTIVES)
    torch.set_num_threads(1)
    policy, reference, *others = map(Path, sys.argv[2:])
    if others:
        reward, *more = others
        figures, samples = evaluate_policy(float(sys.argv[1]), (policy, reference, reward), *more)
    else:
        figures, samples = evaluate_toy((policy, reference))
    print(json.dumps({"figures": asdict(figures), "samples": samples}))


if __name__ == "__main__":
    main()
