"""The backend of JAX. It sets the environment that JAX reads at its import, so it imports JAX at its start."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

import numpy as np

from features.lazy_import import import_object
from protocol.errors import UserError
from training.data.token_sequences import TokenizedText
from training.data.tokenizer import Tokenizer
from training.engine_resources import AUTO, EngineResources
from training.engines.engine import Engine, EngineBackend
from training.engines.gradient_engine import require_plain_resources
from training.engines.processor import CPU, MB, describe_processor
from training.job_spec import JobSpec
from training.replicated.tensor_layout import Float32Array
from training.worker_protocol import DeviceInfo, WorkerInfo

NAME: Final = "jax"  # name of the engine
ENVIRONMENT: Final = {
    # GPUs and TPUs would otherwise round the factors of products to 10 or 7 bits: replays then differ by more than audits allow.
    "JAX_DEFAULT_MATMUL_PRECISION": "highest",
    "XLA_FLAGS": "--xla_gpu_deterministic_ops=true",  # A GPU would otherwise add in another order at each execution.
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # JAX would otherwise take three quarters of a GPU's memory at its start.
}


class JaxBackend:
    """An implementation of `training.engines.engine.EngineBackend`."""

    name = NAME

    def __init__(self) -> None:
        self._threads = 1
        self._device: Any = None  # JAX's device, after the start

    def start_backend(self, resources: EngineResources, command: Sequence[str]) -> None:
        require_plain_resources(NAME, resources)
        self._threads = resources.threads or os.cpu_count() or 1
        # XLA's threads of a processor divide sums among them, so their number is fixed and does not follow the machine's load.
        os.environ.update(ENVIRONMENT, PJRT_NPROC=str(self._threads))
        if resources.device == CPU:
            os.environ["JAX_PLATFORMS"] = CPU  # JAX would otherwise start the plugins of all accelerators.
        self._device = select_device(resources.device)
        import_object("jax:config").update("jax_default_device", self._device)

    def run_rank(self, resources: EngineResources, rank: int, store: Path, orders: BinaryIO) -> None:
        raise AssertionError("the engine jax computes in one process")

    def describe_worker(self) -> WorkerInfo:
        versions = {"python": platform.python_version(), "numpy": np.__version__}
        versions |= {name: metadata.version(name) for name in ("jax", "jaxlib")}
        return WorkerInfo(f"jax {versions['jax']}", self._threads, tuple(describe_devices(self._device)), versions)

    def open_engine(self, spec: JobSpec, tokens: TokenizedText, tokenizer: Tokenizer, first: Float32Array | None) -> Engine:
        return cast(Engine, import_object("training.engines.jax.engine:JaxEngine")(spec, tokens, tokenizer, first))

    def is_out_of_memory(self, error: BaseException) -> bool:
        return is_out_of_memory(error)


def select_device(name: str) -> Any:
    """Return JAX's device that a setting names. Raises `UserError` for a device that this machine lacks."""
    devices = import_object("jax:devices")
    kind, _, number = name.partition(":")
    try:
        return devices(None if kind == AUTO else kind)[int(number or 0)]
    except (RuntimeError, IndexError) as error:  # JAX has no plugin for this kind of device, or finds fewer devices.
        there_are = ", ".join(map(device_name, devices()))
        raise UserError(
            f"the engine {NAME!r} finds no device {name!r}, only {there_are}: start this peer with one of them"
        ) from error


def describe_devices(used: Any) -> Iterator[DeviceInfo]:
    """Yield descriptions of the processor and of JAX's accelerators."""
    yield describe_processor(used.platform == CPU)
    for device in import_object("jax:devices")():
        if device.platform != CPU:
            memory = device.memory_stats() or {}
            total, held = (memory.get(key, 0) // MB for key in ("bytes_limit", "bytes_in_use"))
            yield DeviceInfo(device_name(device), device.device_kind, total, total - held, held, device == used)


def device_name(device: Any) -> str:
    return CPU if device.platform == CPU else f"{device.platform}:{device.id}"


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" in str(error))


BACKEND: EngineBackend = JaxBackend()
