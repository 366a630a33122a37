"""The engine of objectives whose proposals declare what their steps go by."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from features.lazily import named
from training.data.tokenizer import Tokenizer
from training.engines.engine import Beat
from training.engines.pytorch.device import CPU
from training.engines.pytorch.engine import ANY, NAME, Engine, no_subnormal_numbers
from training.objectives.objective import Declaration, Reason
from training.replicated.layout import Float32Array
from training.resources import Resources
from training.sequences import Tokens
from training.spec import JobSpec


class Declarer(Protocol):
    """What `Objective.declarers` names: it is made with the engine, and computes with the engine's model."""

    def make(
        self, parameters: Float32Array, job: bytes, round: int, trainer: bytes, folder: Path, on_step: Beat
    ) -> Declaration: ...

    def refutation(
        self,
        parameters: Float32Array,
        job: bytes,
        round: int,
        trainer: bytes,
        declaration: Declaration,
        on_step: Beat,
    ) -> Reason | None: ...

    def derived(
        self, parameters: Float32Array, job: bytes, round: int, trainer: bytes, declaration: Declaration, on_step: Beat
    ) -> Declaration: ...


class DeclaringEngine(Engine):
    """Implements `training.engines.engine.DeclaringEngine`. Its passes over the model, too, are safe from subnormal numbers."""

    def __init__(
        self,
        spec: JobSpec,
        tokens: Tokens,
        tokenizer: Tokenizer,
        first: Float32Array | None,
        device: torch.device = CPU,
        resources: Resources = ANY,
    ) -> None:
        super().__init__(spec, tokens, tokenizer, first, device, resources)
        self._declarer: Declarer = named(spec.kind.declarers[NAME])(self)

    def declare(
        self, parameters: Float32Array, job: bytes, round: int, trainer: bytes, folder: Path, on_step: Beat = lambda: None
    ) -> Declaration:
        with no_subnormal_numbers():
            return self._declarer.make(parameters, job, round, trainer, folder, on_step)

    def refutation(
        self,
        parameters: Float32Array,
        job: bytes,
        round: int,
        trainer: bytes,
        declaration: Declaration,
        on_step: Beat = lambda: None,
    ) -> Reason | None:
        with no_subnormal_numbers():
            return self._declarer.refutation(parameters, job, round, trainer, declaration, on_step)

    def derived(
        self,
        parameters: Float32Array,
        job: bytes,
        round: int,
        trainer: bytes,
        declaration: Declaration,
        on_step: Beat = lambda: None,
    ) -> Declaration:
        with no_subnormal_numbers():
            return self._declarer.derived(parameters, job, round, trainer, declaration, on_step)
