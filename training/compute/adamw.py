"""AdamW (Loshchilov & Hutter 2019) on one flat vector: a handful of vector operations per step for the whole model.

Written here because importing `torch.optim`'s optimizers costs 70 MB of the worker's memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

EPSILON = 1e-8


@dataclass(frozen=True, slots=True)
class Settings:
    beta1: float
    beta2: float
    weight_decay: float
    clip: float  # largest L2 norm of a gradient


class AdamW:
    """Its state starts at zero; make a new one to reset it."""

    def __init__(self, parameters: Tensor, gradients: Tensor, decayed: Tensor, settings: Settings) -> None:
        """Works on `parameters` and `gradients` in place. `decayed` is 1 where weight decay applies and 0 elsewhere."""
        self.settings = settings
        self._parameters, self._gradients = parameters, gradients
        self._decayed = decayed
        self._first = torch.zeros_like(parameters)
        self._second = torch.zeros_like(parameters)
        self._steps = 0

    @torch.no_grad()
    def step(self, rate: float) -> float:
        """Clips the gradients, moves the parameters against them, and returns the norm before clipping."""
        settings, gradients = self.settings, self._gradients
        norm = float(gradients.norm())
        if norm > settings.clip:
            gradients.mul_(settings.clip / norm)
        self._steps += 1
        self._first.lerp_(gradients, 1 - settings.beta1)
        self._second.mul_(settings.beta2).addcmul_(gradients, gradients, value=1 - settings.beta2)
        if settings.weight_decay:
            self._parameters.addcmul_(self._parameters, self._decayed, value=-rate * settings.weight_decay)
        # Bias corrections are folded into the rate and the root, which saves two passes over the vector.
        first_correction = 1 - settings.beta1**self._steps
        second_correction = 1 - settings.beta2**self._steps
        root = self._second.sqrt().div_(math.sqrt(second_correction)).add_(EPSILON)
        self._parameters.addcdiv_(self._first, root, value=-rate / first_correction)
        return norm
