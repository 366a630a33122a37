"""An engine of the feature: numpy alone, and no model but the share that each byte has in the text."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from features.lazily import named
from training.data.tokenizer import Tokenizer
from training.engines.engine import Beat, EngineKind
from training.objectives.objective import Step
from training.replay.inner_state import InnerState, OnState
from training.replicated.layout import Float32Array, layout_of
from training.sequences import Tokens
from training.spec import JobSpec

RATE = np.float32(0.5)
Gradient = Callable[[Float32Array, Float32Array], tuple[Float32Array, float]]


@dataclass(frozen=True, slots=True)
class Metrics:
    loss: float


@dataclass
class Slate:
    spec: JobSpec
    tokens: Tokens
    gradient: Gradient
    micro_batch: int = 1

    @property
    def parameters(self) -> int:
        return layout_of(self.spec).size

    def local_steps(
        self,
        parameters: Float32Array,
        job: bytes,
        round: int,
        trainer: bytes,
        on_step: Beat = lambda: None,
        inner: InnerState | None = None,
        on_state: OnState = lambda parameters, inner: None,
    ) -> tuple[Float32Array, Metrics]:
        now, loss = parameters, 0.0
        for step in range(self.spec.local_steps):
            gradient, loss = self.gradient(now, self._shares(job, round, trainer, step))
            now = now - RATE * gradient
            on_step()
        return parameters - now, Metrics(loss)

    def _shares(self, job: bytes, round: int, trainer: bytes, step: int) -> Float32Array:
        """Of each byte in the sequences of one step."""
        kind, spec = self.spec.kind, self.spec
        drawn = kind.draw(spec, Step(job, round, trainer, step), spec.batch, self.tokens)
        (seen,) = kind.examples(spec, drawn, self.tokens)
        return (np.bincount(seen.ravel(), minlength=self.parameters) / seen.size).astype(np.float32)

    def inner_step(
        self,
        parameters: Float32Array,
        inner: InnerState,
        job: bytes,
        round: int,
        trainer: bytes,
        step: int,
        on_step: Beat = lambda: None,
    ) -> tuple[Float32Array, InnerState]:
        raise NotImplementedError("its jobs commit to no states")

    def evaluate(self, parameters: Float32Array, on_step: Beat = lambda: None) -> float | None:
        return None

    def generate(
        self, parameters: Float32Array, prompt: bytes, count: int, temperature: float, seed: int, on_step: Beat = lambda: None
    ) -> bytes:
        return bytes([int(parameters.argmax())]) * count


class Slates:
    name = "slate"

    def start(self, threads: int | None) -> None:
        """There is nothing to start."""

    def describe(self) -> tuple[str, int]:
        return ("slate beside torch" if "torch" in sys.modules else "slate alone"), 1

    def open(self, spec: JobSpec, tokens: Tokens, tokenizer: Tokenizer) -> Slate:
        return Slate(spec, tokens, named(spec.kind.losses[self.name]))

    def is_out_of_memory(self, error: BaseException) -> bool:
        return False


def distance(parameters: Float32Array, shares: Float32Array) -> tuple[Float32Array, float]:
    """Gradient and value of ½‖parameters − shares‖²."""
    gap = parameters - shares
    return gap, float(gap @ gap) / 2


KIND: EngineKind = Slates()
