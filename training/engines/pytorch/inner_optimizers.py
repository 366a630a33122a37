"""Inner optimizers: AdamW (Loshchilov & Hutter 2019) on one flat vector for the whole model, and Muon.

A step of each takes a few vector operations. `torch.optim` is not used, since its import costs 70 MB of the worker's memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from training.engines.pytorch.model import GPT
from training.job_spec import InnerOptimizerKind, JobSpec
from training.replay.inner_state import (
    ADAMW_EPSILON,
    MUON_EPSILON,
    NEWTON_SCHULZ,
    NEWTON_SCHULZ_STEPS,
    SAM_EPSILON,
    adamw_tensors,
    hidden_matrices,
)
from training.replicated.tensor_layout import layout_of

# Elements whose squares are added in float32: torch adds them one after another, and an error of 1e-7 is then left. For 67M
# elements at once the error is 5e-3, several times the tolerance of a replay, and depends on the processor.
NORM_ELEMENTS = 1 << 16
ADAMW_RMS = 0.2  # root mean square of an AdamW step at rate 1, as measured by Liu et al.


def make_inner_optimizer(spec: JobSpec, model: GPT, decayed: Tensor, moments: Tensor | None, steps: int) -> AdamW | Muon:
    """Return the job's inner optimizer in its state after `steps` steps, with the given moments (None: all are zero)."""
    if spec.inner is InnerOptimizerKind.MUON:
        return Muon(model.parameters, model.gradients, spec, moments, steps)
    return AdamW(model.parameters, model.gradients, decayed, spec, moments, steps)


class AdamW:
    """The AdamW optimizer. Its moments start at zero, or continue from the moments of an earlier optimizer."""

    def __init__(
        self,
        parameters: Tensor,
        gradients: Tensor,
        decayed: Tensor,
        spec: JobSpec,
        moments: Tensor | None = None,
        steps: int = 0,
    ) -> None:
        """Work on `parameters`, `gradients` and `moments` in place. `decayed` is 1 where weight decay applies and 0 elsewhere.

        `moments` has shape (2 · parameters,) and is the state after `steps` steps. The first moments precede the second ones.
        """
        self.spec = spec
        self.moments = parameters.new_zeros(2 * len(parameters)) if moments is None else moments
        self.steps = steps
        self._parameters, self._gradients = parameters, gradients
        self._decayed = decayed
        self._first, self._second = self.moments.chunk(2)
        self._stretches = decay_ranges(decayed) if parameters.is_cuda else []

    @torch.no_grad()
    def step(self, rate: float) -> float:
        """Clip the gradients and take a step. Return the norm before clipping."""
        norm = clip_gradients(self._gradients, self.spec.gradient_clip)
        self.steps += 1
        vectors = self._parameters, self._gradients, self._first, self._second
        if self._stretches:
            fused_adamw_step(*vectors, self._stretches, self.spec, rate, self.steps)
        else:
            adamw_step(*vectors, self._decayed, self.spec, rate, self.steps)
        return norm


@torch.no_grad()
def clip_gradients(gradients: Tensor, limit: float) -> float:
    """Scale the gradients down to a norm of at most `limit`, in place. Return their norm before scaling."""
    norm = vector_norm(gradients)
    if norm > limit:
        gradients.mul_(limit / norm)
    return norm


def vector_norm(vector: Tensor) -> float:
    """Return the norm of a flat vector, as exact as float32 for any length."""
    whole = len(vector) - len(vector) % NORM_ELEMENTS
    rows = vector[:whole].view(whole // NORM_ELEMENTS, NORM_ELEMENTS)
    return float(torch.cat((rows.norm(dim=1), vector[whole:].norm()[None])).double().norm())


@contextmanager
def sam_perturbation(parameters: Tensor, gradients: Tensor, radius: float) -> Iterator[None]:
    """Move the parameters by `radius` along the gradient until the context ends (SAM: Foret et al. 2021, arXiv:2010.01412).

    The parameters then have exactly their former values again.
    """
    kept = parameters.detach().clone()
    with torch.no_grad():
        parameters.add_(gradients, alpha=radius / (vector_norm(gradients) + SAM_EPSILON))
    try:
        yield
    finally:
        with torch.no_grad():
            parameters.copy_(kept)


def adamw_step(
    parameters: Tensor,
    gradients: Tensor,
    first: Tensor,
    second: Tensor,
    decayed: Tensor | None,
    spec: JobSpec,
    rate: float,
    steps: int,
) -> None:
    """Take one AdamW step in place. `steps` is the number of steps, including this one.

    Weight decay applies where `decayed` is 1; None: nowhere.
    """
    first.lerp_(gradients, 1 - spec.beta1)
    second.mul_(spec.beta2).addcmul_(gradients, gradients, value=1 - spec.beta2)
    if spec.weight_decay and decayed is not None:
        parameters.addcmul_(parameters, decayed, value=-rate * spec.weight_decay)
    # Bias corrections are applied to the rate and the root instead of the moments, which saves two passes over the vector.
    first_correction = 1 - spec.beta1**steps
    second_correction = 1 - spec.beta2**steps
    root = second.sqrt().div_(math.sqrt(second_correction)).add_(ADAMW_EPSILON)
    parameters.addcdiv_(first, root, value=-rate / first_correction)


def decay_ranges(decayed: Tensor) -> list[tuple[slice, bool]]:
    """Return the ranges of consecutive elements with equal weight decay, each with true if weight decay applies to it."""
    ends = ((decayed[1:] != decayed[:-1]).nonzero().flatten() + 1).tolist()
    starts = [0, *ends]
    decays = decayed[starts].tolist()
    return [(slice(start, end), bool(decay)) for start, end, decay in zip(starts, [*ends, len(decayed)], decays, strict=True)]


@torch.no_grad()
def fused_adamw_step(
    parameters: Tensor,
    gradients: Tensor,
    first: Tensor,
    second: Tensor,
    decays: Sequence[tuple[slice, bool]],
    spec: JobSpec,
    rate: float,
    steps: int,
) -> None:
    """Take the same step as `adamw_step`, with torch's fused AdamW.

    It makes one pass over memory instead of seven, and needs no temporary vector.
    """
    betas = {"beta1": spec.beta1, "beta2": spec.beta2, "eps": ADAMW_EPSILON}
    for decay in (False, True):
        places = [place for place, is_decayed in decays if is_decayed is decay]
        if not places:
            continue
        count = torch.full((), float(steps), device=parameters.device)
        torch._fused_adamw_(
            *([vector[place] for place in places] for vector in (parameters, gradients, first, second)),
            [],
            [count] * len(places),
            lr=rate,
            weight_decay=spec.weight_decay * decay,
            **betas,
            amsgrad=False,
            maximize=False,
        )


class Muon:
    """Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon): momentum whose matrices are made nearly orthogonal.

    Every direction of a matrix then moves equally far. Vectors and the embedding are left to AdamW. Each matrix step is scaled to
    the root mean square of AdamW's (Liu et al. 2025, arXiv:2502.16982, section 2.2), so that one rate and one weight decay serve
    both optimizers. The moments start at zero, or continue from earlier ones.
    """

    def __init__(
        self,
        parameters: Tensor,
        gradients: Tensor,
        spec: JobSpec,
        moments: Tensor | None = None,
        steps: int = 0,
    ) -> None:
        """Work on `parameters`, `gradients` and `moments` in place. `spec.beta1` is also the momentum of the matrices.

        `moments` has shape (`inner_state.inner_size`,), in the order of `inner_state.moment_slots`, after `steps` steps.
        """
        self.spec = spec
        self.steps = steps
        layout = layout_of(spec)
        self._matrices, self._others = hidden_matrices(layout), adamw_tensors(layout)
        size = layout.size + sum(tensor.size for tensor in self._others)
        self.moments = parameters.new_zeros(size) if moments is None else moments
        self._parameters, self._gradients = parameters, gradients
        self._momentum, self._second = self.moments.split([layout.size, size - layout.size])

    @torch.no_grad()
    def step(self, rate: float) -> float:
        """Clip the gradients and take a step. Return the norm before clipping."""
        norm = clip_gradients(self._gradients, self.spec.gradient_clip)
        self.steps += 1
        vectors, start = (self._parameters, self._gradients, self._momentum), 0
        for tensor in self._others:
            second = self._second[start : start + tensor.size]
            parameters, gradients, first = (vector[tensor.elements] for vector in vectors)
            decayed = parameters.new_ones(()) if len(tensor.shape) > 1 else None
            adamw_step(parameters, gradients, first, second, decayed, self.spec, rate, self.steps)
            start += tensor.size
        beta, decay = self.spec.beta1, self.spec.weight_decay
        for weights, gradients, momentum in self._iter_matrices(vectors):
            momentum.lerp_(gradients, 1 - beta)
            direction = orthogonalize(gradients.lerp(momentum, beta))  # Nesterov momentum: the gradient counts a second time.
            weights.mul_(1 - rate * decay)
            weights.add_(direction, alpha=-rate * ADAMW_RMS * max(weights.shape) ** 0.5)
        return norm

    def _iter_matrices(self, vectors: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
        """Yield the views of each matrix in these flat vectors. A stack has several matrices."""
        for tensor in self._matrices:
            stacks = (vector[tensor.elements].view(-1, *tensor.shape[-2:]) for vector in vectors)
            yield from zip(*stacks, strict=True)


def orthogonalize(matrix: Tensor) -> Tensor:
    """Return `matrix` with all singular values moved near 1: an odd polynomial is applied five times in float32."""
    a, b, c = NEWTON_SCHULZ
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix  # The matrix products have the size of the smaller side.
    x = wide / (wide.norm() + MUON_EPSILON)
    for _ in range(NEWTON_SCHULZ_STEPS):
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x
