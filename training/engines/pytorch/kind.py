"""PyTorch as an engine."""

from __future__ import annotations

import torch

from training.data.tokenizer import Tokenizer
from training.engines.engine import EngineKind
from training.engines.pytorch.declaring import DeclaringEngine
from training.engines.pytorch.engine import NAME, Engine, is_out_of_memory, start_threads
from training.replicated.layout import Float32Array
from training.sequences import Tokens
from training.spec import JobSpec


class PyTorch:
    """Implements `training.engines.engine.EngineKind`."""

    name = NAME

    def start(self, threads: int | None) -> None:
        start_threads(threads)

    def describe(self) -> tuple[str, int]:
        return f"torch {torch.__version__}", torch.get_num_threads()

    def open(self, spec: JobSpec, tokens: Tokens, tokenizer: Tokenizer, first: Float32Array | None) -> Engine:
        kind = DeclaringEngine if NAME in spec.kind.declarers else Engine
        return kind(spec, tokens, tokenizer, first)

    def is_out_of_memory(self, error: BaseException) -> bool:
        return is_out_of_memory(error)


KIND: EngineKind = PyTorch()
