"""PyTorch as an engine."""

from __future__ import annotations

import platform

import numpy as np
import torch

from training.data.tokenizer import Tokenizer
from training.engines.engine import EngineKind
from training.engines.pytorch import device
from training.engines.pytorch.declaring import DeclaringEngine
from training.engines.pytorch.engine import NAME, Engine, is_out_of_memory, start_threads
from training.replicated.layout import Float32Array
from training.resources import Resources
from training.sequences import Tokens
from training.spec import JobSpec
from training.tasks import Ready


class PyTorch:
    """Implements `training.engines.engine.EngineKind`."""

    name = NAME

    def __init__(self) -> None:
        self._device, self._resources = device.CPU, Resources()

    def start(self, resources: Resources) -> None:
        start_threads(resources.threads or None)
        self._device, self._resources = device.chosen(resources.device), resources
        device.start(self._device)

    def describe(self) -> Ready:
        versions = {"python": platform.python_version(), "numpy": np.__version__, "torch": str(torch.__version__)}
        if torch.version.cuda:
            versions["cuda"] = torch.version.cuda
        devices = tuple(device.described(self._device))
        return Ready(f"torch {torch.__version__}", torch.get_num_threads(), devices, versions)

    def open(self, spec: JobSpec, tokens: Tokens, tokenizer: Tokenizer, first: Float32Array | None) -> Engine:
        kind = DeclaringEngine if NAME in spec.kind.declarers else Engine
        return kind(spec, tokens, tokenizer, first, self._device, self._resources)

    def is_out_of_memory(self, error: BaseException) -> bool:
        return is_out_of_memory(error)


KIND: EngineKind = PyTorch()
