"""Two ways through a model: sampling responses, and one pass over responses that are there.

Axes: B responses, P tokens of a prompt, T tokens of a response, S = P + T − 1 inputs, V vocabulary, C features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from rlhf.losses import log_probabilities
from rlhf.rollouts import Bounds
from training.engines.engine import Beat
from training.engines.pytorch.model import GPT, Cache
from training.replicated.layout import Float32Array

SAMPLED_AT_ONCE = 64  # responses: one pass over the weights serves them all
NUMBERS_AT_ONCE = 1 << 20  # in the largest tensor of a pass: 4 MB

Noise = Callable[[Iterable[tuple[int, int]]], Float32Array]  # of tokens, each (response, number there): shape (tokens, V)


def sample(model: GPT, prompts_BP: Tensor, noise: Noise, bounds: Bounds, on_token: Beat) -> list[list[int]]:
    """A response to each prompt: token t is the argmax of logits and noise."""
    responses: list[list[int]] = []
    with torch.no_grad():
        for part in prompts_BP.split(SAMPLED_AT_ONCE):
            responses += _sample_part(model, part, len(responses), noise, bounds, on_token)
    return responses


def _sample_part(model: GPT, prompts_BP: Tensor, first: int, noise: Noise, bounds: Bounds, on_token: Beat) -> list[list[int]]:
    responses: list[list[int]] = [[] for _ in prompts_BP]
    spec = replace(model.spec, context=prompts_BP.shape[1] + bounds.tokens_max)  # what is seen of it
    going, cache, pending = list(range(len(responses))), Cache(spec, len(responses)), prompts_BP
    for t in range(bounds.tokens_max):
        logits_BV = F.linear(model.features(pending, cache)[:, -1], model.embedding_VC)
        chosen_B = torch.zeros(len(responses), dtype=torch.int64)  # what an ended response goes on with, nobody reads
        noise_GV = torch.from_numpy(noise((first + row, t) for row in going))
        chosen_B[going] = (logits_BV[going] + noise_GV).argmax(1)
        for row in going:
            responses[row].append(int(chosen_B[row]))
        going = [row for row in going if responses[row][-1] != bounds.stop]
        pending = chosen_B[:, None]
        on_token()
        if not going:
            break
    return responses


@dataclass(frozen=True, slots=True)
class Passed:
    logp_BT: Tensor  # of each response token; of padding anything, as in all of these
    value_BT: Tensor  # before each token; zero where the model has no such head
    excess_BT: Tensor | None  # by how much another token's logit and noise are more than this one's


def over(
    model: GPT, x_BS: Tensor, tokens_BT: Tensor, lengths: Sequence[int], head: str, on_part: Beat, noise: Noise | None = None
) -> Passed:
    """One pass over all responses, a few at a time, always the same ones together: so on one machine it gives the same bits."""
    longest = tokens_BT.shape[1]
    rows = max(1, NUMBERS_AT_ONCE // max(longest * model.spec.vocabulary, x_BS.shape[1] * 2 * model.spec.hidden))
    logps, values, excesses = list[Tensor](), list[Tensor](), list[Tensor]()
    with torch.no_grad():
        for start in range(0, len(x_BS), rows):
            x, tokens = x_BS[start : start + rows], tokens_BT[start : start + rows]
            features_BTC = model.features(x)[:, -longest:]
            logits_BTV = F.linear(features_BTC, model.embedding_VC)
            logps.append(log_probabilities(logits_BTV, tokens))
            values.append(features_BTC @ model.heads[head] if head in model.heads else torch.zeros(tokens.shape))
            if noise is not None:
                excesses.append(_excess(logits_BTV, tokens, lengths[start : start + rows], start, noise))
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
