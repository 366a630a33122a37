"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon): momentum whose matrices are made nearly orthogonal, so
that every direction of a matrix moves equally far. Vectors and the embedding are left to AdamW.

Each matrix step is scaled to the root mean square that AdamW's has (Liu et al. 2025, arXiv:2502.16982, section 2.2): one rate and
one weight decay serve both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from training.engines.pytorch.adamw import AdamWSettings, adamw_step, clip_gradients
from training.replay.inner_state import MUON_EPSILON, NEWTON_SCHULZ, NEWTON_SCHULZ_STEPS, adamw_tensors, hidden_matrices
from training.replicated.tensor_layout import TensorLayout

ADAMW_RMS = 0.2  # of an AdamW step at rate 1, as Liu et al. measured it


class Muon:
    """Its moments start at zero, or go on from those of an earlier one."""

    def __init__(
        self,
        parameters: Tensor,
        gradients: Tensor,
        settings: AdamWSettings,
        layout: TensorLayout,
        moments: Tensor | None = None,
        steps: int = 0,
    ) -> None:
        """Works on `parameters`, `gradients` and `moments` in place. `settings.beta1` is the momentum of the matrices too.

        `moments` has shape (`inner_state.inner_size`,) and lies as `inner_state.slots` says, after `steps` steps.
        """
        self.settings = settings
        self.steps = steps
        self._matrices, self._others = hidden_matrices(layout), adamw_tensors(layout)
        size = layout.size + sum(tensor.size for tensor in self._others)
        self.moments = parameters.new_zeros(size) if moments is None else moments
        self._parameters, self._gradients = parameters, gradients
        self._momentum, self._second = self.moments.split([layout.size, size - layout.size])

    @torch.no_grad()
    def step(self, rate: float) -> float:
        """Clips the gradients, moves the parameters, and returns the norm before clipping."""
        norm = clip_gradients(self._gradients, self.settings.gradient_clip)
        self.steps += 1
        self._move_others(rate)
        for tensor in self._matrices:
            part, shape = tensor.elements, tensor.shape
            weights, gradients, momentum = (
                vector[part].view(shape) for vector in (self._parameters, self._gradients, self._momentum)
            )
            self._move_matrix(weights, gradients, momentum, rate)
        return norm

    def _move_matrix(self, weights: Tensor, gradients: Tensor, momentum: Tensor, rate: float) -> None:
        beta, decay = self.settings.beta1, self.settings.weight_decay
        momentum.lerp_(gradients, 1 - beta)
        direction = orthogonalize(gradients.lerp(momentum, beta))  # Nesterov: this gradient counts once more
        weights.mul_(1 - rate * decay)
        weights.add_(direction, alpha=-rate * ADAMW_RMS * max(weights.shape) ** 0.5)

    def _move_others(self, rate: float) -> None:
        start = 0
        for tensor in self._others:
            part = tensor.elements
            second = self._second[start : start + tensor.size]
            parameters, gradients, first = (vector[part] for vector in (self._parameters, self._gradients, self._momentum))
            decayed = parameters.new_ones(()) if len(tensor.shape) > 1 else None
            adamw_step(parameters, gradients, first, second, decayed, self.settings, rate, self.steps)
            start += tensor.size


def orthogonalize(matrix: Tensor) -> Tensor:
    """The matrix with its singular values moved near 1, by an odd polynomial applied five times, in float32."""
    a, b, c = NEWTON_SCHULZ
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix  # the products are then of the smaller side
    x = wide / (wide.norm() + MUON_EPSILON)
    for _ in range(NEWTON_SCHULZ_STEPS):
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x
