"""A policy that a reward model has tuned, measured.

`python -m rlhf.pytorch.policy_evaluation BETA POLICY REFERENCE REWARD TEXT PAIRS [TOKENIZER]` is a process of its own.

BETA is what the next round would have. Three files of `training.formats.checkpoint` follow; TEXT is what the prompts come from,
PAIRS the set that the reward model learned from, and TOKENIZER the job's, if it has one. It prints figures and responses as JSON.
Prompts and pairs are held out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from rlhf.data import preference_set_statistics
from rlhf.data.preference_sets import PreferencePair, decode_records, split_held_out
from rlhf.data.tokenized_records import open_pairs
from rlhf.objectives import rollouts
from rlhf.objectives.ppo import PPO, PpoSettings
from rlhf.objectives.rollouts import RolloutId, is_finished
from rlhf.objectives.supervised_objectives import OBJECTIVES
from rlhf.pair_accuracy import ACCURACY
from rlhf.pytorch import rollout_passes
from rlhf.pytorch.reward_model import NormalizedRewardModel
from rlhf.pytorch.reward_model import reward_metrics as figures_of_reward
from training.corpus import open_tokens
from training.data.token_sequences import TokenArray
from training.data.tokenizer import Tokenizer, load_tokenizer
from training.engines.engine import RequiredModel
from training.engines.pytorch.model import GPT
from training.formats import checkpoint
from training.job_spec import JobSpec
from training.objectives import registry
from training.replicated.tensor_layout import Float32Array

SAMPLES: Final = 256  # prompts, each with a response of both: their mean has a sixteenth of one's deviation


@dataclass(frozen=True, slots=True)
class PolicyMetrics:
    """Estimates from as many responses; a value is J = E r − β·KL, and the reward model's scores are normalised."""

    reference_value: float
    value: float
    kl: float  # nats
    score: float
    pair_accuracy: float | None  # of the held-out pairs, in which the better response scores higher
    linear_accuracy: float | None  # the same of `rlhf.data.preference_set_statistics`, which learned from the same pairs


def evaluate_policy(
    beta: float, files: tuple[Path, Path, Path], text: Path, pairs: Path, tokenizer: Tokenizer
) -> tuple[PolicyMetrics, list[dict[str, str]]]:
    (spec, policy, _), (_, reference, _), (of_reward, scores, _) = map(checkpoint.read_checkpoint, files)
    own: PpoSettings = spec.decoded_settings
    learned = open_pairs(of_reward, pairs, tokenizer)
    scorer = NormalizedRewardModel(RequiredModel(of_reward, scores, learned), _quietly)
    models = _model(spec, policy), _model(spec, reference)
    prompts_BP = _prompts(open_tokens(spec, text, tokenizer).held_out, own.prompt_tokens)
    ours, theirs = (_sampled(model, spec, prompts_BP) for model in models)
    score, reference_score = (_score(scorer, prompts_BP, responses, own.stop_token) for responses in (ours, theirs))
    kl = sum(sign * _logp(model, spec, prompts_BP, ours) for sign, model in zip((1, -1), models, strict=True))
    with pairs.open("rb") as stream:
        trained, held_out = split_held_out(decode_records(stream, PreferencePair), of_reward.held_out_permille)
    figures = PolicyMetrics(
        reference_value=reference_score,
        value=score - beta * kl,
        kl=kl,
        score=score,
        pair_accuracy=figures_of_reward(_model(of_reward, scores), of_reward, learned, _quietly).get(ACCURACY),
        linear_accuracy=preference_set_statistics.word_count_accuracy(
            preference_set_statistics.fit_word_counts(trained), held_out
        ),
    )
    said = [[_text(tokenizer, row, own.stop_token) for row in rows] for rows in (prompts_BP.tolist(), ours, theirs)]
    return figures, [dict(zip(("prompt", "policy", "reference"), row, strict=True)) for row in zip(*said, strict=True)]


def _quietly() -> None: ...


def _model(spec: JobSpec, parameters: Float32Array) -> GPT:
    model = GPT(spec)
    np.copyto(model.parameters.numpy(), parameters)
    return model


def _prompts(text: TokenArray, length: int) -> Tensor:
    """Evenly spaced."""
    starts = np.linspace(0, len(text) - length, SAMPLES).astype(np.int64)
    return torch.from_numpy(np.stack([text[start : start + length] for start in starts]).astype(np.int64))


def _sampled(model: GPT, spec: JobSpec, prompts_BP: Tensor) -> list[list[int]]:
    bounds, place = PPO.rollout_limits(spec, spec.decoded_settings), RolloutId(bytes(32), 0, bytes(32))
    return rollout_passes.sample_responses(
        model, list(prompts_BP.numpy()), partial(rollouts.gumbel_noise, place, vocabulary=bounds.vocabulary), bounds, _quietly
    )


def _padded(responses: Sequence[Sequence[int]], length: int) -> Tensor:
    return torch.tensor([[*response, *[0] * (length - len(response))] for response in responses])


def _score(scorer: NormalizedRewardModel, prompts_BP: Tensor, responses: list[list[int]], stop: int | None) -> float:
    whole_BS = torch.cat((prompts_BP, _padded(responses, max(map(len, responses)))), dim=1)
    ended = [stop is not None and is_finished(np.array(response), stop) for response in responses]
    last = [prompts_BP.shape[1] + len(response) - 1 - end for response, end in zip(responses, ended, strict=True)]
    return float(scorer.scores(whole_BS, torch.tensor(last), _quietly).double().mean())


def _logp(model: GPT, spec: JobSpec, prompts_BP: Tensor, responses: list[list[int]]) -> float:
    """The mean over the responses of what all tokens of one have together."""
    lengths = list(map(len, responses))
    tokens_BT = _padded(responses, max(lengths))
    passed = rollout_passes.forward_pass(
        model, torch.cat((prompts_BP, tokens_BT[:, :-1]), dim=1), tokens_BT, lengths, "", _quietly
    )
    mask_BT = torch.arange(tokens_BT.shape[1]) < torch.tensor(lengths)[:, None]
    return float(passed.logp_BT[mask_BT].double().sum()) / len(responses)


def _text(tokenizer: Tokenizer, tokens: Sequence[int], stop: int | None) -> str:
    return tokenizer.decode([token for token in tokens if token != stop]).decode(errors="replace")


def main() -> None:
    registry.register_objectives(OBJECTIVES)
    torch.set_num_threads(1)
    policy, reference, reward, text, pairs, *tokenizer = map(Path, sys.argv[2:])
    spec, *_ = checkpoint.read_checkpoint(policy)
    known = load_tokenizer(tokenizer[0].read_bytes() if tokenizer else None, spec.model.vocabulary)
    figures, samples = evaluate_policy(float(sys.argv[1]), (policy, reference, reward), text, pairs, known)
    print(json.dumps({"figures": asdict(figures), "samples": samples}))


if __name__ == "__main__":
    main()
