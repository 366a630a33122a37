"""The resources of this machine that an engine may use. The daemon passes the peer's settings to its worker as arguments."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import re
from dataclasses import dataclass
from typing import Final

AUTO: Final = "auto"
GPUS_MAX: Final = 64  # most GPUs of one machine


class ParallelMode(enum.StrEnum):
    """The mode in which several processes of a worker train one model, each on its own device."""

    OFF = "off"
    DDP = "ddp"  # Each process has the whole model, and computes the gradient of a part of the batch.
    FSDP = "fsdp"  # Each process has a part of every tensor, and computes the gradient of a part of the batch.


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineResources:
    threads: int = 0  # number of threads; 0: the engine's default
    device: str = "cpu"  # `cpu`, the name of an accelerator such as `cuda:1`, or `AUTO`: an accelerator if the machine has one
    memory_mb_max: int = 0  # largest estimated memory of a job, in MB of 10^6 bytes; 0: no bound
    gpus: int = 0  # number of processes that train together, each on its own GPU or all on the CPU; 0: one process
    parallel: ParallelMode = ParallelMode.OFF
    compile: bool = False  # True if losses are compiled for the device, where that works.
    cache_folder: str = ""  # folder for compiled programs, in the data directory; empty: they are not kept
    recompute: bool = False  # True if a pass stores only the inputs of layers, and recomputes other results for the gradient.

    def arguments(self) -> list[str]:
        """Return the worker's arguments: all values that differ from the default."""
        found = list[str]()
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                found += [_flag(field.name)] if value is True else [_flag(field.name), str(value)]
        return found

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> EngineResources:
        return cls(**{field.name: getattr(options, field.name) for field in dataclasses.fields(cls)})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for field in dataclasses.fields(EngineResources):
        if isinstance(field.default, bool):
            parser.add_argument(_flag(field.name), action="store_true")
        else:
            parser.add_argument(_flag(field.name), type=type(field.default), default=field.default)


def device_problem(name: str) -> str | None:
    """Return why this name cannot be a device on any machine; None if it may be a device."""
    if re.fullmatch(rf"{AUTO}|cpu|cuda(:\d{{1,3}})?", name):
        return None
    return f"is not a device: use {AUTO}, cpu, cuda, or cuda:1 for one of several"


def parallel_problem(resources: EngineResources) -> str | None:
    """Return why this number of processes cannot train together in this mode; None if they can."""
    if not 0 <= resources.gpus <= GPUS_MAX:
        return f"gpus {resources.gpus} is outside 0..{GPUS_MAX}"
    if resources.parallel is ParallelMode.OFF:
        return f"gpus {resources.gpus} needs parallel ddp or fsdp, not off" if resources.gpus > 1 else None
    if resources.gpus < 2:
        return f"parallel {resources.parallel} needs gpus 2 or more, not {resources.gpus}"
    if resources.compile:
        return f"compile with parallel {resources.parallel} is not supported: turn one of them off"
    if ":" in resources.device:
        return f"parallel {resources.parallel} uses the first {resources.gpus} GPUs, not {resources.device}: use device cuda"
    return None


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
