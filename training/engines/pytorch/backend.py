"""The PyTorch backend."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import torch

from features.lazy_import import import_object
from training.data.token_sequences import TokenizedText
from training.data.tokenizer import Tokenizer
from training.engine_implementations import objective_functions
from training.engine_resources import EngineResources, ParallelMode
from training.engines.engine import Engine, EngineBackend, OnProgress
from training.engines.pytorch import device
from training.engines.pytorch.engine import NAME, TorchEngine, is_out_of_memory, no_subnormal_numbers, start_torch_threads
from training.job_spec import JobSpec
from training.objectives.objective import Brief, Declaration, RejectionReason
from training.replay.proposal_replay import Declarer
from training.replicated.tensor_layout import Float32Array
from training.worker_protocol import WorkerInfo

PARALLEL: Final = "training.engines.pytorch.parallel_engine"


class TorchDeclaringEngine(TorchEngine):
    """An implementation of `training.engines.engine.DeclaringEngine`.

    Its passes over the model also treat subnormal numbers as zero.
    """

    def _prepare(self) -> None:
        super()._prepare()
        declarer = objective_functions(NAME, self.spec.objective).declarer
        assert declarer is not None, self.spec.objective
        self._declarer: Declarer = declarer(self)

    @no_subnormal_numbers()
    def make_declaration(
        self,
        parameters: Float32Array,
        job: bytes,
        round: int,
        trainer: bytes,
        folder: Path,
        on_step: OnProgress = lambda: None,
        brief: Brief | None = None,
    ) -> Declaration:
        return self._declarer.make_declaration(parameters, job, round, trainer, folder, on_step, brief)

    @no_subnormal_numbers()
    def why_declaration_refused(
        self,
        parameters: Float32Array,
        job: bytes,
        round: int,
        trainer: bytes,
        declaration: Declaration,
        on_step: OnProgress = lambda: None,
    ) -> RejectionReason | None:
        return self._declarer.why_declaration_refused(parameters, job, round, trainer, declaration, on_step)

    @no_subnormal_numbers()
    def derive_step_data(
        self,
        parameters: Float32Array,
        job: bytes,
        round: int,
        trainer: bytes,
        declaration: Declaration,
        on_step: OnProgress = lambda: None,
    ) -> Declaration:
        return self._declarer.derive_step_data(parameters, job, round, trainer, declaration, on_step)


class TorchBackend:
    """An implementation of `training.engines.engine.EngineBackend`."""

    name = NAME

    def __init__(self) -> None:
        self._device, self._resources = device.CPU, EngineResources()
        # `RankProcesses`, or None for one process. The type is Any, since an import of the class would load all of torch's
        # distributed part.
        self._crew: Any = None

    def start_backend(self, resources: EngineResources, command: Sequence[str] = ()) -> None:
        start_torch_threads(resources.threads or None)
        self._device, self._resources = device.select_device(resources.device), resources
        if resources.parallel is ParallelMode.OFF:
            device.configure_device(self._device)
            return
        self._crew = import_object(f"{PARALLEL}:RankProcesses")(resources, [sys.executable, *command[1:]])

    def run_rank(self, resources: EngineResources, rank: int, store: Path, orders: BinaryIO) -> None:
        start_torch_threads(resources.threads or None)
        import_object(f"{PARALLEL}:run_rank")(resources, rank, store, orders)

    def describe_worker(self) -> WorkerInfo:
        versions = {"python": platform.python_version(), "numpy": np.__version__, "torch": str(torch.__version__)}
        if torch.version.cuda:
            versions["cuda"] = torch.version.cuda
        used = device.cuda_devices()[: self._resources.gpus] if self._crew and self._device.type == "cuda" else [self._device]
        devices = tuple(device.describe_devices(used))
        return WorkerInfo(f"torch {torch.__version__}", torch.get_num_threads(), devices, versions)

    def open_engine(self, spec: JobSpec, tokens: TokenizedText, tokenizer: Tokenizer, first: Float32Array | None) -> Engine:
        functions = objective_functions(NAME, spec.objective)
        if self._crew is not None and functions.engine is None:
            return import_object(f"{PARALLEL}:ParallelEngine")(spec, tokens, tokenizer, first, self._crew, self._resources)
        kind = functions.engine or (TorchEngine if functions.declarer is None else TorchDeclaringEngine)
        return kind(spec, tokens, tokenizer, first, self._device, self._resources)

    def is_out_of_memory(self, error: BaseException) -> bool:
        return is_out_of_memory(error)


BACKEND: EngineBackend = TorchBackend()
