"""AdamW (Loshchilov & Hutter 2019) on one flat vector: a handful of vector operations per step for the whole model.

Written here because importing `torch.optim`'s optimizers costs 70 MB of the worker's memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from training.replay.inner_state import ADAMW_EPSILON


@dataclass(frozen=True, slots=True)
class AdamWSettings:
    beta1: float
    beta2: float
    weight_decay: float
    gradient_clip: float  # largest L2 norm of a gradient


class AdamW:
    """Its moments start at zero, or go on from those of an earlier one."""

    def __init__(
        self,
        parameters: Tensor,
        gradients: Tensor,
        decayed: Tensor,
        settings: AdamWSettings,
        moments: Tensor | None = None,
        steps: int = 0,
    ) -> None:
        """Works on `parameters`, `gradients` and `moments` in place. `decayed` is 1 where weight decay applies and 0 elsewhere.

        `moments` has shape (2 · parameters,), the first moments before the second ones, after `steps` steps.
        """
        self.settings = settings
        self.moments = parameters.new_zeros(2 * len(parameters)) if moments is None else moments
        self.steps = steps
        self._parameters, self._gradients = parameters, gradients
        self._decayed = decayed
        self._first, self._second = self.moments.chunk(2)
        self._stretches = decay_ranges(decayed) if parameters.is_cuda else []

    @torch.no_grad()
    def step(self, rate: float) -> float:
        """Clips the gradients, moves the parameters against them, and returns the norm before clipping."""
        norm = clip_gradients(self._gradients, self.settings.gradient_clip)
        self.steps += 1
        vectors = self._parameters, self._gradients, self._first, self._second
        if self._stretches:
            fused_adamw_step(*vectors, self._stretches, self.settings, rate, self.steps)
        else:
            adamw_step(*vectors, self._decayed, self.settings, rate, self.steps)
        return norm


@torch.no_grad()
def clip_gradients(gradients: Tensor, limit: float) -> float:
    """Scales the gradients down to a norm of at most `limit`, in place, and returns what it was before."""
    norm = float(gradients.norm())
    if norm > limit:
        gradients.mul_(limit / norm)
    return norm


def adamw_step(
    parameters: Tensor,
    gradients: Tensor,
    first: Tensor,
    second: Tensor,
    decayed: Tensor | None,
    settings: AdamWSettings,
    rate: float,
    steps: int,
) -> None:
    """One AdamW step in place; `steps` counts this one. Weight decay applies where `decayed` is 1, nowhere if it is None."""
    first.lerp_(gradients, 1 - settings.beta1)
    second.mul_(settings.beta2).addcmul_(gradients, gradients, value=1 - settings.beta2)
    if settings.weight_decay and decayed is not None:
        parameters.addcmul_(parameters, decayed, value=-rate * settings.weight_decay)
    # Bias corrections are folded into the rate and the root, which saves two passes over the vector.
    first_correction = 1 - settings.beta1**steps
    second_correction = 1 - settings.beta2**steps
    root = second.sqrt().div_(math.sqrt(second_correction)).add_(ADAMW_EPSILON)
    parameters.addcdiv_(first, root, value=-rate / first_correction)


def decay_ranges(decayed: Tensor) -> list[tuple[slice, bool]]:
    """Neighbouring elements that all decay, or do not."""
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
    settings: AdamWSettings,
    rate: float,
    steps: int,
) -> None:
    """As `adamw_step`, by torch's own fused step: one pass over memory in the place of seven, and no vector beside the given
    ones.
    """
    betas = {"beta1": settings.beta1, "beta2": settings.beta2, "eps": ADAMW_EPSILON}
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
            weight_decay=settings.weight_decay * decay,
            **betas,
            amsgrad=False,
            maximize=False,
        )
