"""The backend of tinygrad. It sets the environment that tinygrad reads at its import, so it imports tinygrad at its start."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import sqlite3
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import BinaryIO, Final, cast

import numpy as np

from features.lazy_import import import_object
from protocol.errors import UserError
from training.data.token_sequences import TokenizedText
from training.data.tokenizer import Tokenizer
from training.engine_resources import AUTO, EngineResources
from training.engines.engine import Engine, EngineBackend
from training.engines.gradient_engine import require_plain_resources
from training.engines.processor import CPU, describe_processor
from training.engines.tinygrad.compiler import PROGRAM, REMEDY, find_compiler
from training.job_spec import JobSpec
from training.replicated.tensor_layout import Float32Array
from training.worker_protocol import WorkerInfo

NAME: Final = "tinygrad"  # name of the engine
CACHE_FILE: Final = "tinygrad.db"
OBJECT_BYTES_MIN: Final = 64  # least bytes of an object file, the header of ELF: shorter entries are failed compilations


class TinygradBackend:
    """An implementation of `training.engines.engine.EngineBackend`."""

    name = NAME

    def __init__(self) -> None:
        self._threads, self._compiler = 1, ""

    def start_backend(self, resources: EngineResources, command: Sequence[str]) -> None:
        require_plain_resources(NAME, resources)
        if resources.device not in (CPU, AUTO):
            raise UserError(f"the engine {NAME!r} has no device {resources.device!r}, only {CPU}: start this peer with it")
        compiler = find_compiler()
        if compiler is None:
            raise UserError(f"the engine {NAME!r} needs the program {PROGRAM}, which was not found: {REMEDY}")
        self._threads, self._compiler = max(1, resources.threads), compiler
        # tinygrad's pool of compiling processes would outlive this process. With `PARALLEL=0`, only clang is a child.
        os.environ.update(DEV="CPU", CC=compiler, NUM_CPU_THREADS=str(self._threads), PARALLEL="0")
        if resources.cache_folder:
            cache = Path(resources.cache_folder) / CACHE_FILE
            cache.parent.mkdir(parents=True, exist_ok=True)
            drop_failed_compilations(cache)
            os.environ["CACHEDB"] = str(cache)
        else:
            os.environ["CACHELEVEL"] = "0"  # no cache on the disk
        try:
            import_object("tinygrad:Tensor").ones(1).realize()
        except (OSError, subprocess.CalledProcessError) as error:
            raise UserError(f"the engine {NAME!r} cannot compile with {compiler}: {error}") from error

    def run_rank(self, resources: EngineResources, rank: int, store: Path, orders: BinaryIO) -> None:
        raise AssertionError("the engine tinygrad computes in one process")

    def describe_worker(self) -> WorkerInfo:
        versions = {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "tinygrad": metadata.version("tinygrad"),
            "clang": compiler_version(self._compiler),
        }
        return WorkerInfo(f"tinygrad {versions['tinygrad']}", self._threads, (describe_processor(True),), versions)

    def open_engine(self, spec: JobSpec, tokens: TokenizedText, tokenizer: Tokenizer, first: Float32Array | None) -> Engine:
        return cast(Engine, import_object("training.engines.tinygrad.engine:TinygradEngine")(spec, tokens, tokenizer, first))

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, MemoryError)


def drop_failed_compilations(cache: Path) -> None:
    """Delete the results of failed compilations from tinygrad's cache, which would fail again. A broken cache is deleted."""
    if not cache.exists():
        return
    try:
        with contextlib.closing(sqlite3.connect(cache)) as database, database:
            for (table,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name LIKE 'compile%'"):
                name = table.replace('"', '""')
                database.execute(f'DELETE FROM "{name}" WHERE length(val) < ?', (OBJECT_BYTES_MIN,))
    except sqlite3.DatabaseError:
        for path in cache.parent.glob(f"{cache.name}*"):
            path.unlink(missing_ok=True)


def compiler_version(path: str) -> str:
    """Return the version that the compiler prints, such as 14.0.6, or an empty text if it prints none."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        found = re.search(r"version (\S+)", subprocess.check_output([path, "--version"], text=True, timeout=10))
        return found[1] if found else ""
    return ""


BACKEND: EngineBackend = TinygradBackend()
