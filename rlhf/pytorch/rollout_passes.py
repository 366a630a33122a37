"""Sampling of responses from a model, and a forward pass over given responses.

Axes: B all responses, R the responses of a part, T tokens of a response, S inputs (longest prompt and T − 1 tokens), V
vocabulary, C features. Prompts may differ in length. A row is a prompt, its response, and padding at the end, which has no effect
on causal attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rlhf.objectives.ppo import RolloutLimits
from rlhf.objectives.rollouts import TokenIds
from training.engines.engine import OnProgress
from training.engines.pytorch.layers import KVCache
from training.engines.pytorch.log_probabilities import log_probabilities
from training.engines.pytorch.model import GPT
from training.replicated.tensor_layout import Float32Array

SAMPLED_AT_ONCE = 64  # responses sampled together, which share each pass over the weights
NUMBERS_AT_ONCE = 1 << 20  # elements of the largest tensor in a forward pass: 4 MB

Noise = Callable[[Iterable[tuple[int, int]]], Float32Array]  # tokens as (response, position) -> noise (tokens, V)


def sample_responses(
    model: GPT, prompts: Sequence[TokenIds], noise: Noise, bounds: RolloutLimits, on_token: OnProgress
) -> list[list[int]]:
    """Sample a response to each prompt. Each token is the argmax of logits plus noise."""
    responses: list[list[int]] = [[] for _ in prompts]
    rows = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
    with torch.no_grad():
        for start in range(0, len(rows), SAMPLED_AT_ONCE):
            part = rows[start : start + SAMPLED_AT_ONCE]
            sampled = _sample_part(model, [prompts[row] for row in part], part, noise, bounds, on_token)
            for row, response in zip(part, sampled, strict=True):
                responses[row] = response
    return responses


def _sample_part(
    model: GPT, prompts: Sequence[TokenIds], rows: Sequence[int], noise: Noise, bounds: RolloutLimits, on_token: OnProgress
) -> list[list[int]]:
    """Sample responses to prompts in ascending order of their lengths.

    All rows are at the same position: at positions where short prompts already have tokens of their responses, longer prompts
    still feed their own tokens.
    """
    responses: list[list[int]] = [[] for _ in prompts]
    at, longest = len(prompts[0]), len(prompts[-1])
    spec = replace(model.spec, context=longest + bounds.tokens_max)  # context that is large enough for the cache
    # Numbers of the prompts that are in the cache.
    going, cache = list(range(len(prompts))), KVCache(spec, len(prompts), model.device)
    pending = torch.from_numpy(np.stack([prompt[:at] for prompt in prompts]))
    while going:
        logits_BV = model.logits(model.features(pending.to(model.device), cache, last=1)[:, -1]).cpu()
        next_B = torch.tensor([int(prompts[row][at]) if at < len(prompts[row]) else 0 for row in going])
        answered = [place for place, row in enumerate(going) if at >= len(prompts[row])]
        if answered:
            noise_GV = torch.from_numpy(noise((rows[row], at - len(prompts[row])) for row in map(going.__getitem__, answered)))
            next_B[answered] = (logits_BV[answered] + noise_GV).argmax(1)
        for place in answered:
            responses[going[place]].append(int(next_B[place]))
        ended = {row for row in going if len(responses[row]) == bounds.tokens_max or responses[row][-1:] == [bounds.stop]}
        if ended:
            kept = [place for place, row in enumerate(going) if row not in ended]
            cache.keep_sequences(kept)
            going, next_B = [going[place] for place in kept], next_B[kept]
        pending, at = next_B[:, None], at + 1
        on_token()
    return responses


def response_features(model: GPT, x_BS: Tensor, begin_B: Tensor, tokens: int) -> Tensor:
    """Return the features (B, T, C) that predict each of T tokens of the responses, which start at `begin_B`.

    Features after the last input are arbitrary.
    """
    unseen = int(begin_B.min()) - 1  # number of first positions, which predict no token of a response
    features_BSC = model.features(x_BS, last=x_BS.shape[1] - unseen)
    at_BT = (begin_B[:, None] - 1 - unseen + torch.arange(tokens, device=x_BS.device)).clamp(max=features_BSC.shape[1] - 1)
    return features_BSC.gather(1, at_BT[:, :, None].expand(-1, -1, features_BSC.shape[2]))


@dataclass(frozen=True, slots=True)
class ForwardPassResult:
    logp_BT: Tensor  # log-probability of each token of the responses; on padding, all three tensors are arbitrary
    value_BT: Tensor  # value before each token; zero if the model has no value head
    excess_BT: Tensor | None  # maximum of logit plus noise, minus logit plus noise of the response's token; None: without noise


def forward_pass(
    model: GPT,
    x_BS: Tensor,
    tokens_BT: Tensor,
    lengths: Sequence[int],
    head: str,
    on_part: OnProgress,
    noise: Noise | None = None,
    begin_B: Tensor | None = None,  # length of each prompt; None: all prompts have the same length
) -> ForwardPassResult:
    """Return log-probabilities, values and excesses of all responses, computed in parts with responses of similar length.

    Equal inputs are divided into equal parts, so the bits are reproducible on one machine.
    """
    logp_BT, value_BT = torch.zeros(tokens_BT.shape), torch.zeros(tokens_BT.shape)
    excess_BT = None if noise is None else torch.zeros(tokens_BT.shape)
    begin_B = torch.full((len(x_BS),), x_BS.shape[1] - tokens_BT.shape[1] + 1) if begin_B is None else begin_B
    end_B = (begin_B - 1 + torch.tensor(lengths)).tolist()  # number of inputs of each row
    by_end, done = sorted(range(len(end_B)), key=end_B.__getitem__, reverse=True), 0
    with torch.no_grad():
        while done < len(by_end):
            end = end_B[by_end[done]]
            count = max(1, NUMBERS_AT_ONCE // max(tokens_BT.shape[1] * model.spec.vocabulary, end * 2 * model.spec.hidden))
            rows = by_end[done : done + count]
            longest = max(lengths[row] for row in rows)
            of_rows = (x_BS[rows, :end], begin_B[rows], tokens_BT[rows, :longest])
            x_RS, begin_R, tokens_RT = (tensor.to(model.device) for tensor in of_rows)
            features_RTC = response_features(model, x_RS, begin_R, longest)
            logits_RTV = model.logits(features_RTC)
            logp_BT[rows, :longest] = log_probabilities(logits_RTV, tokens_RT).cpu()
            if head in model.heads:
                value_BT[rows, :longest] = (features_RTC @ model.heads[head]).cpu()
            if noise is not None and excess_BT is not None:
                excess_BT[rows, :longest] = _excess(logits_RTV, tokens_RT, [(row, lengths[row]) for row in rows], noise)
            done += len(rows)
            on_part()
    return ForwardPassResult(logp_BT, value_BT, excess_BT)


def _excess(logits_RTV: Tensor, tokens_RT: Tensor, responses: Sequence[tuple[int, int]], noise: Noise) -> Tensor:
    """Return the excess (R, T) of each token (`ForwardPassResult`).

    `responses` has the number and the length of each response.
    """
    excess_RT, device = torch.zeros(tokens_RT.shape), logits_RTV.device
    at_once = max(1, NUMBERS_AT_ONCE // logits_RTV.shape[2])
    for row, (number, length) in enumerate(responses):
        for start in range(0, length, at_once):
            part = slice(start, min(start + at_once, length))
            noise_TV = torch.from_numpy(noise((number, t) for t in range(part.start, part.stop)))
            sums_TV = logits_RTV[row, part] + noise_TV.to(device)
            excess_RT[row, part] = (sums_TV.amax(1) - sums_TV.gather(1, tokens_RT[row, part, None])[:, 0]).cpu()
    return excess_RT
