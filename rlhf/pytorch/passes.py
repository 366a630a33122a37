"""Two ways through a model: sampling responses, and one pass over responses that are there.

Axes: B responses, T tokens of a response, S inputs: those of the longest prompt and T − 1, V vocabulary, C features. Prompts may
differ in length. A row is a prompt, its response right behind it, and padding: no token sees what stands behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from rlhf.losses import log_probabilities
from rlhf.rollouts import Bounds, TokenIds
from training.engines.engine import Beat
from training.engines.pytorch.model import GPT, Cache
from training.replicated.layout import Float32Array

SAMPLED_AT_ONCE = 64  # responses: one pass over the weights serves them all
NUMBERS_AT_ONCE = 1 << 20  # in the largest tensor of a pass: 4 MB

Noise = Callable[[Iterable[tuple[int, int]]], Float32Array]  # of tokens, each (response, number there): shape (tokens, V)


def sample(model: GPT, prompts: Sequence[TokenIds], noise: Noise, bounds: Bounds, on_token: Beat) -> list[list[int]]:
    """A response to each prompt: token t is the argmax of logits and noise."""
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
    model: GPT, prompts: Sequence[TokenIds], rows: Sequence[int], noise: Noise, bounds: Bounds, on_token: Beat
) -> list[list[int]]:
    """Responses to prompts of which none is shorter than the one before. All are at the same position: while the shorter ones
    are answered, the longer ones go on with tokens of their own.
    """
    responses: list[list[int]] = [[] for _ in prompts]
    at, longest = len(prompts[0]), len(prompts[-1])
    spec = replace(model.spec, context=longest + bounds.tokens_max)  # what is seen of it
    going, cache = list(range(len(prompts))), Cache(spec, len(prompts))
    pending = torch.from_numpy(np.stack([prompt[:at] for prompt in prompts]))
    while going:
        logits_BV = F.linear(model.features(pending, cache)[:, -1], model.embedding_VC)
        # What an ended response goes on with, nobody reads.
        next_B = torch.tensor([int(prompt[at]) if at < len(prompt) else 0 for prompt in prompts])
        answered = [row for row in going if at >= len(prompts[row])]
        if answered:
            noise_GV = torch.from_numpy(noise((rows[row], at - len(prompts[row])) for row in answered))
            next_B[answered] = (logits_BV[answered] + noise_GV).argmax(1)
        for row in answered:
            responses[row].append(int(next_B[row]))
        going = [row for row in going if len(responses[row]) < bounds.tokens_max and responses[row][-1:] != [bounds.stop]]
        pending, at = next_B[:, None], at + 1
        on_token()
    return responses


def answering(features_BSC: Tensor, begin_B: Tensor, tokens: int) -> Tensor:
    """(B, T, C): the features that give each of T tokens of a response, the first of which stands at `begin_B`."""
    at_BT = begin_B[:, None] - 1 + torch.arange(tokens)
    return features_BSC.gather(1, at_BT[:, :, None].expand(-1, -1, features_BSC.shape[2]))


@dataclass(frozen=True, slots=True)
class Passed:
    logp_BT: Tensor  # of each response token; of padding anything, as in all of these
    value_BT: Tensor  # before each token; zero where the model has no such head
    excess_BT: Tensor | None  # by how much another token's logit and noise are more than this one's


def over(
    model: GPT,
    x_BS: Tensor,
    tokens_BT: Tensor,
    lengths: Sequence[int],
    head: str,
    on_part: Beat,
    noise: Noise | None = None,
    begin_B: Tensor | None = None,  # how long each prompt is; None: they are alike
) -> Passed:
    """One pass over all responses, a few at a time, always the same ones together: so on one machine it gives the same bits."""
    longest = tokens_BT.shape[1]
    begin_B = torch.full((len(x_BS),), x_BS.shape[1] - longest + 1) if begin_B is None else begin_B
    rows = max(1, NUMBERS_AT_ONCE // max(longest * model.spec.vocabulary, x_BS.shape[1] * 2 * model.spec.hidden))
    logps, values, excesses = list[Tensor](), list[Tensor](), list[Tensor]()
    with torch.no_grad():
        for start in range(0, len(x_BS), rows):
            part = slice(start, start + rows)
            tokens = tokens_BT[part]
            features_BTC = answering(model.features(x_BS[part]), begin_B[part], longest)
            logits_BTV = F.linear(features_BTC, model.embedding_VC)
            logps.append(log_probabilities(logits_BTV, tokens))
            values.append(features_BTC @ model.heads[head] if head in model.heads else torch.zeros(tokens.shape))
            if noise is not None:
                excesses.append(_excess(logits_BTV, tokens, lengths[part], start, noise))
            on_part()
    return Passed(torch.cat(logps), torch.cat(values), torch.cat(excesses) if excesses else None)


def _excess(logits_BTV: Tensor, tokens_BT: Tensor, lengths: Sequence[int], first: int, noise: Noise) -> Tensor:
    excess_BT = torch.zeros(tokens_BT.shape)
    at_once = max(1, NUMBERS_AT_ONCE // logits_BTV.shape[2])
    for row, length in enumerate(lengths):
        for start in range(0, length, at_once):
            part = slice(start, min(start + at_once, length))
            noise_TV = torch.from_numpy(noise((first + row, t) for t in range(part.start, part.stop)))
            sums_TV = logits_BTV[row, part] + noise_TV
            excess_BT[row, part] = sums_TV.amax(1) - sums_TV.gather(1, tokens_BT[row, part, None])[:, 0]
    return excess_BT
