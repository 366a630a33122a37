"""Rewards, advantages and losses of RLHF: functions of float32 tensors. The daemon never imports this module.

Axes: B responses, T tokens of a response, V vocabulary, G groups of responses to one prompt. Responses start at t = 0, and short
responses are padded at the end. `mask_BT` is true on a response's tokens, including its stop token. Contents of padding, even
NaN, do not change values or gradients.

| source | used for |
|---|---|
| Schulman et al. 2017 (arXiv:1707.06347) | PPO |
| Schulman et al. 2016 (arXiv:1506.02438) | GAE |
| Ziegler et al. 2019 (arXiv:1909.08593), Ouyang et al. 2022 (arXiv:2203.02155) | rewards of tokens, clipped value loss |
| Shao et al. 2024 (arXiv:2402.03300) | GRPO |
| Rafailov et al. 2023 (arXiv:2305.18290) | DPO |
| http://joschu.net/blog/kl-approx.html | k1, k3 |
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from rlhf.objectives.ppo import CLIP_RANGE, GAE_LAMBDA

DISCOUNT = 1.0  # γ of GAE: responses are short, so all tokens count alike
CENTRE_WEIGHT = 0.01  # weight of the pull of a reward model's scores to a mean of zero; preferences do not determine the mean
WHITENING_EPSILON = 1e-8  # added to the variance before the division
DEVIATION_EPSILON = 1e-4  # added to a group's deviation before the division, since all its scores may be equal


def kl_estimate_k3(logp_BT: Tensor, reference_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Estimate KL(π ‖ reference) of each response (B,): e^d − 1 − d with d = log reference − log π. For display only."""
    difference_BT = _only(reference_BT - logp_BT, mask_BT)
    return (torch.expm1(difference_BT) - difference_BT).sum(1)


# Rewards and advantages ---------------------------------------------------------------------------------------------------


def token_rewards(
    logp_BT: Tensor, reference_BT: Tensor, score_B: Tensor, mask_BT: Tensor, *, beta: float, score_clip: float
) -> Tensor:
    """Return the reward of each token (B, T): −β·k1 with k1 = log π − log reference, plus the clipped score on the last token.

    `score_B` includes penalties, and is clipped to ±`score_clip`. The gradient of the expected k1 is unbiased, unlike that of k3.
    """
    rewards_BT = _only(reference_BT - logp_BT, mask_BT) * beta
    return rewards_BT + _last(mask_BT) * score_B.clamp(-score_clip, score_clip)[:, None]


def gae_advantages(
    rewards_BT: Tensor, value_BT: Tensor, mask_BT: Tensor, *, discount: float = DISCOUNT, decay: float = GAE_LAMBDA
) -> tuple[Tensor, Tensor]:
    """Return the advantages of GAE (equation 16) and the returns, the targets of the values: each (B, T), zero on padding.

    `value_BT[:, t]` is the value before token t. The value after the last token is zero.
    """
    rewards_BT, value_BT = _only(rewards_BT, mask_BT), _only(value_BT, mask_BT)
    next_BT = F.pad(value_BT[:, 1:], (0, 1))
    delta_BT = rewards_BT + discount * next_BT - value_BT
    gathered_B, reversed_ = torch.zeros_like(delta_BT[:, 0]), []
    for t in reversed(range(delta_BT.shape[1])):
        gathered_B = delta_BT[:, t] + discount * decay * gathered_B
        reversed_.append(gathered_B)
    advantage_BT = torch.stack(reversed_[::-1], dim=1)
    return advantage_BT, advantage_BT + value_BT


def whiten_advantages(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return advantages normalized to mean 0 and variance 1 over all tokens, zero on padding.

    `x_BT` has all rollouts of a trainer's round.
    """
    x_BT, count = _only(x_BT, mask_BT), mask_BT.sum()
    centred_BT = _only(x_BT - x_BT.sum() / count, mask_BT)
    variance = centred_BT.square().sum() / (count - 1).clamp(min=1)
    return centred_BT * torch.rsqrt(variance + WHITENING_EPSILON)


def group_advantages(total_B: Tensor, group: int, *, by_deviation: bool = False) -> Tensor:
    """Return the advantages of GRPO (B,): the total reward of a response minus the mean of its group.

    A group is `group` adjacent responses to one prompt. With `by_deviation` the advantages are divided by their group's
    deviation, as in the paper. The division gives more weight to prompts whose responses have similar scores (Liu et al. 2025,
    arXiv:2503.20783).
    """
    total_GN = total_B.view(-1, group)
    centred_GN = total_GN - total_GN.mean(1, keepdim=True)
    if by_deviation:
        centred_GN = centred_GN / (total_GN.std(1, keepdim=True) + DEVIATION_EPSILON)
    return centred_GN.flatten()


# Losses -------------------------------------------------------------------------------------------------------------------


def policy_losses(
    logp_BT: Tensor, old_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor, *, clip: float = CLIP_RANGE, ramp: float = 0.0
) -> Tensor:
    """Return the negated clipped surrogate of PPO (equation 7) for each token (B, T), zero on padding. `token_mean` reduces it.

    The edge of the ratio is 1 ± `clip`. Beyond the edge, the gradient of a token falls linearly to zero within `ramp`. In the
    paper the gradient jumps to zero at the edge.
    """
    ratio_BT = torch.exp(_only(logp_BT - old_BT, mask_BT))
    advantage_BT = _only(advantage_BT, mask_BT)
    free_BT, clipped_BT = -advantage_BT * ratio_BT, -advantage_BT * ratio_BT.clamp(1 - clip, 1 + clip)
    return _ramped_maximum(free_BT, clipped_BT, ramp * advantage_BT.abs())


def value_losses(
    value_BT: Tensor, old_BT: Tensor, return_BT: Tensor, mask_BT: Tensor, *, clip: float = CLIP_RANGE, ramp: float = 0.0
) -> Tensor:
    """Return half the squared error of each value (B, T), clipped around the old value, zero on padding. `token_mean` reduces it.

    Beyond the edge old ± `clip`, the gradient falls to zero within about `ramp`, in units of the value.
    """
    value_BT, old_BT, return_BT = (_only(x_BT, mask_BT) for x_BT in (value_BT, old_BT, return_BT))
    edge_BT = old_BT + clip * torch.sign(value_BT.detach() - old_BT)
    free_BT = (value_BT - return_BT).square()
    clipped_BT = (torch.clamp(value_BT, old_BT - clip, old_BT + clip) - return_BT).square()
    return 0.5 * _ramped_maximum(free_BT, clipped_BT, 2 * ramp * (edge_BT - return_BT).abs())


def token_mean(x_BT: Tensor, mask_BT: Tensor, tokens: Tensor | int | None = None) -> Tensor:
    """Return the mean over the response tokens. If these rows are a part of a batch, `tokens` is the divisor."""
    return _only(x_BT, mask_BT).sum() / (mask_BT.sum() if tokens is None else tokens)


def reward_model_losses(first_B: Tensor, second_B: Tensor, p_B: Tensor) -> Tensor:
    """Return Bradley–Terry losses (B,), plus a pull of the scores to mean zero.

    `p_B` is the probability that the first response is better.
    """
    return _preference_losses(first_B - second_B, p_B) + CENTRE_WEIGHT * (first_B + second_B).square()


def dpo_losses(
    first_B: Tensor, second_B: Tensor, reference_first_B: Tensor, reference_second_B: Tensor, p_B: Tensor, *, beta: float
) -> Tensor:
    """Return the losses of DPO (B,) (equation 7) from log-probabilities of responses.

    `p_B` is the probability that the first is better.
    """
    return _preference_losses(beta * ((first_B - reference_first_B) - (second_B - reference_second_B)), p_B)


def _preference_losses(difference_B: Tensor, p_B: Tensor) -> Tensor:
    return -p_B * F.logsigmoid(difference_B) - (1 - p_B) * F.logsigmoid(-difference_B)


def _ramped_maximum(free: Tensor, clipped: Tensor, width: Tensor) -> Tensor:
    """Return approximately the maximum of `free` and `clipped`.

    While `clipped` exceeds `free` by less than `width`, the gradient is interpolated between their gradients. Processors round
    differently, so a token can be on different sides of the clip range's edge at trainer and auditor. If the gradient jumped at
    the edge, the gradients of a step would differ by far more than re-execution tolerates.
    """
    inside = torch.minimum((clipped - free).clamp(min=0), width)
    return torch.maximum(free, clipped) - (inside - inside.square() / (2 * width.clamp(min=torch.finfo(width.dtype).tiny)))


def _only(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    return x_BT.masked_fill(~mask_BT, 0.0)


def _last(mask_BT: Tensor) -> Tensor:
    """Return a mask (B, T) of the last token of each response."""
    return mask_BT & ~F.pad(mask_BT[:, 1:], (0, 1))
