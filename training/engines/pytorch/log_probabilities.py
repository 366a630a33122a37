"""Log-probabilities of tokens, with a gradient that is exact to rounding for any certainty of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from training.engines.pytorch.model import GPT

LOGITS_TOKENS = 256  # tokens whose logits are in memory at once: 64 MB for the largest vocabulary


class _LogProbability(torch.autograd.Function):
    """log p[y] with a gradient that is exact to rounding, even for p[y] near 1 (decision 46)."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, y_N: Tensor) -> Tensor:
        logp_NV = F.log_softmax(logits_NV, dim=1)
        ctx.save_for_backward(logp_NV, y_N)
        return logp_NV.gather(1, y_N[:, None])[:, 0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        logp_NV, y_N = ctx.saved_tensors
        minus_p_NV, y_N1 = logp_NV.exp().neg_(), y_N[:, None]
        minus_p_NV.scatter_(1, y_N1, 0.0)
        minus_p_NV.scatter_(1, y_N1, -minus_p_NV.sum(dim=1, keepdim=True))  # 1 − p[y], as the sum of all other probabilities
        return minus_p_NV.mul_(gradients[0][:, None]), None


def log_probabilities(logits_BTV: Tensor, tokens_BT: Tensor) -> Tensor:
    """Return log π of each token (B, T). Token t was drawn from `logits_BTV[:, t]`."""
    logp_N: Tensor = _LogProbability.apply(logits_BTV.flatten(0, 1).float(), tokens_BT.flatten())
    return logp_N.view(tokens_BT.shape)


@torch.no_grad()
def sequence_log_probabilities(model: GPT, tokens: Sequence[int], on_step: Callable[[], None]) -> Tensor:
    """Return log p of each token of a sequence but the first, given those before it: shape (tokens - 1,), on the CPU."""
    if len(tokens) == 1:
        return torch.zeros(0)
    tokens_BT = torch.tensor([tokens], device=model.device)
    features_BTC, targets_BT = model.features(tokens_BT[:, :-1]), tokens_BT[:, 1:]
    found = []
    for features_BMC, targets_BM in zip(
        features_BTC.split(LOGITS_TOKENS, dim=1), targets_BT.split(LOGITS_TOKENS, dim=1), strict=True
    ):
        on_step()
        found.append(log_probabilities(model.logits(features_BMC), targets_BM)[0].cpu())
    return torch.cat(found)
