"""PyTorch's implementation of ternary linear layers. Weights have the same bits as those of `training.ternary`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from training.ternary import EXPONENT_MIN, MANTISSA_BITS, SCALE_MIN, exponents_sum

LEVEL_MAX: Final = 127  # largest level of an activation in eight bits
ACTIVATION_MIN: Final = 1e-5  # least size of the largest activation of a token, so that a token of zeros has a scale


class _StraightThrough(torch.autograd.Function):
    """Weights whose gradient counts as that of the latent weights (Bengio et al. 2013, arXiv:1308.3432)."""

    @staticmethod
    def forward(ctx: Any, latent: Tensor, weights: Tensor) -> Tensor:
        return weights.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def _straight_through(latent: Tensor, weights: Tensor) -> Tensor:
    found: Tensor = _StraightThrough.apply(latent, weights)
    return found


def _round_matrix(latent: Tensor) -> Tensor:
    scale = ternary_scale(latent)
    half = scale / 2
    return ((latent > half).float() - (latent < -half).float()) * scale


def ternary_scale(latent: Tensor) -> Tensor:
    """Return γ of a matrix, as a tensor without dimensions, without a read from the device."""
    sizes = latent.abs()
    exponent = (sizes.max().view(torch.int32) >> MANTISSA_BITS).clamp(min=EXPONENT_MIN)
    factor = ((exponents_sum(latent.numel()) - exponent) << MANTISSA_BITS).view(torch.float32)
    total = (sizes * factor).round_().sum(dtype=torch.float64)
    return (total / latent.numel() / factor.double() + SCALE_MIN).float()


def ternary_weights(latent: Tensor, rows: Sequence[int]) -> Tensor:
    """Return the ternary weights of matrices with these numbers of rows, which are below each other in `latent`."""
    return _straight_through(latent, torch.cat([_round_matrix(matrix) for matrix in latent.detach().split(list(rows))]))


class MovingWeights:
    """The weights of matrices during the local steps of a round: their ternary weights at its start, moved without jumps.

    A latent weight beside the edge between two levels may be on either side of it, depending on rounding errors. If levels
    changed between the steps of a round, honest replays would therefore differ by up to a fifth of an update. So a weight moves
    along a ramp from one level to the next one (decision 149).
    """

    def __init__(self, latent: Tensor, rows: Sequence[int]) -> None:
        """`latent` are the matrices at the start of the round, with these numbers of rows, one below the other."""
        matrices = latent.detach().split(list(rows))
        self._start = torch.cat([_round_matrix(matrix) for matrix in matrices])
        self._scale_R1 = torch.cat([ternary_scale(matrix).expand(len(matrix), 1) for matrix in matrices])
        self._ramp = self._on_ramp(latent.detach())

    def _on_ramp(self, latent: Tensor) -> Tensor:
        """Return levels that rise linearly from 0 at γ / 4 to 1 at 3 γ / 4."""
        return torch.copysign((latent.abs() / self._scale_R1).mul_(2).sub_(0.5).clamp_(0, 1), latent)

    def __call__(self, latent: Tensor) -> Tensor:
        """Return the weights for these latent weights of a later step. Without a change they are exactly the ternary weights."""
        moved = (self._on_ramp(latent.detach()) - self._ramp) * self._scale_R1
        return _straight_through(latent, self._start + moved)


def round_activations(x: Tensor) -> Tensor:
    """Return activations of shape (…, features) with eight bits: the largest activation of each token is level 127."""
    scale = x.abs().amax(dim=-1, keepdim=True).clamp(min=ACTIVATION_MIN) / LEVEL_MAX
    return (x / scale).round() * scale


def linear_int8(x: Tensor, weights: Tensor) -> Tensor:
    """Return the outputs for activations of eight bits. The product of levels is computed in float32."""
    return F.linear(round_activations(x), weights)
