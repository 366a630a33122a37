"""The engine of objectives whose proposals declare what their steps go by."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from training.data.token_sequences import TokenizedText
from training.data.tokenizer import Tokenizer
from training.engine_implementations import objective_functions
from training.engine_resources import EngineResources
from training.engines.engine import OnProgress
from training.engines.pytorch.device import CPU
from training.engines.pytorch.engine import DEFAULT_RESOURCES, NAME, TorchEngine, no_subnormal_numbers
from training.job_spec import JobSpec
from training.objectives.objective import Declaration, RejectionReason
from training.replicated.tensor_layout import Float32Array


class TorchDeclarer(Protocol):
    """What `ObjectiveFunctions.declarer` makes with the engine. It computes with the engine's model."""

    def make_declaration(
        self, parameters: Float32Array, job: bytes, round: int, trainer: bytes, folder: Path, on_step: OnProgress
    ) -> Declaration: ...

    def why_declaration_refused(
        self,
        parameters: Float32Array,
        job: bytes,
        round: int,
        trainer: bytes,
        declaration: Declaration,
        on_step: OnProgress,
    ) -> RejectionReason | None: ...

    def derive_step_data(
        self, parameters: Float32Array, job: bytes, round: int, trainer: bytes, declaration: Declaration, on_step: OnProgress
    ) -> Declaration: ...


class TorchDeclaringEngine(TorchEngine):
    """Implements `training.engines.engine.DeclaringEngine`. Its passes over the model, too, are safe from subnormal numbers."""

    def __init__(
        self,
        spec: JobSpec,
        tokens: TokenizedText,
        tokenizer: Tokenizer,
        first: Float32Array | None,
        device: torch.device = CPU,
        resources: EngineResources = DEFAULT_RESOURCES,
    ) -> None:
        super().__init__(spec, tokens, tokenizer, first, device, resources)
        declarer = objective_functions(NAME, spec.objective).declarer
        assert declarer is not None, spec.objective
        self._declarer: TorchDeclarer = declarer(self)

    def make_declaration(
        self, parameters: Float32Array, job: bytes, round: int, trainer: bytes, folder: Path, on_step: OnProgress = lambda: None
    ) -> Declaration:
        with no_subnormal_numbers():
            return self._declarer.make_declaration(parameters, job, round, trainer, folder, on_step)

    def why_declaration_refused(
        self,
        parameters: Float32Array,
        job: bytes,
        round: int,
        trainer: bytes,
        declaration: Declaration,
        on_step: OnProgress = lambda: None,
    ) -> RejectionReason | None:
        with no_subnormal_numbers():
            return self._declarer.why_declaration_refused(parameters, job, round, trainer, declaration, on_step)

    def derive_step_data(
        self,
        parameters: Float32Array,
        job: bytes,
        round: int,
        trainer: bytes,
        declaration: Declaration,
        on_step: OnProgress = lambda: None,
    ) -> Declaration:
        with no_subnormal_numbers():
            return self._declarer.derive_step_data(parameters, job, round, trainer, declaration, on_step)
