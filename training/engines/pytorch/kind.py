"""PyTorch as an engine."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import torch

from features.lazily import named
from training.data.tokenizer import Tokenizer
from training.engines.engine import EngineKind
from training.engines.pytorch import device
from training.engines.pytorch.declaring import DeclaringEngine
from training.engines.pytorch.engine import NAME, Engine, is_out_of_memory, start_threads
from training.replicated.layout import Float32Array
from training.resources import Parallel, Resources
from training.sequences import Tokens
from training.spec import JobSpec
from training.tasks import Ready

PARALLEL: Final = "training.engines.pytorch.parallel"


class PyTorch:
    """Implements `training.engines.engine.EngineKind`."""

    name = NAME

    def __init__(self) -> None:
        self._device, self._resources = device.CPU, Resources()
        self._crew: Any = None  # of a worker of several processes; its module loads all of torch's distributed part

    def start(self, resources: Resources, command: Sequence[str] = ()) -> None:
        start_threads(resources.threads or None)
        self._device, self._resources = device.chosen(resources.device), resources
        if resources.parallel is Parallel.OFF:
            device.start(self._device)
            return
        self._crew = named(f"{PARALLEL}:crew_of")(resources, command)

    def assist(self, resources: Resources, rank: int, store: Path, orders: BinaryIO) -> None:
        start_threads(resources.threads or None)
        named(f"{PARALLEL}:assist")(resources, rank, store, orders)

    def describe(self) -> Ready:
        versions = {"python": platform.python_version(), "numpy": np.__version__, "torch": str(torch.__version__)}
        if torch.version.cuda:
            versions["cuda"] = torch.version.cuda
        used = device.cuda_devices()[: self._resources.gpus] if self._crew and self._device.type == "cuda" else [self._device]
        devices = tuple(device.described(used))
        return Ready(f"torch {torch.__version__}", torch.get_num_threads(), devices, versions)

    def open(self, spec: JobSpec, tokens: Tokens, tokenizer: Tokenizer, first: Float32Array | None) -> Engine:
        if self._crew is not None:
            engine: Engine = named(f"{PARALLEL}:ParallelEngine")(spec, tokens, tokenizer, first, self._crew, self._resources)
            return engine
        kind = DeclaringEngine if NAME in spec.kind.declarers else Engine
        return kind(spec, tokens, tokenizer, first, self._device, self._resources)

    def is_out_of_memory(self, error: BaseException) -> bool:
        return is_out_of_memory(error)


KIND: EngineKind = PyTorch()
