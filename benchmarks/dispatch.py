"""Choices that numpy, OpenBLAS, torch and the C library make for a processor, and child processes with narrower choices.

All of these libraries choose when they are loaded, so every choice needs a process of its own.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

REPOSITORY = Path(__file__).parents[1]
CHILD_SECONDS_MAX = 600.0  # for a child on a busy machine; a hanging child must not block its parent


@dataclass(frozen=True)
class Environment:
    """A process's choices as environment variables, with a name for people."""

    name: str
    variables: Mapping[str, str] = field(default_factory=dict)

    def run(self, module: str, *arguments: str) -> str:
        """Return the output of `python -m module` in such a process, run in the repository's root.

        Raises `CalledProcessError` if it fails.
        """
        return subprocess.run(
            [sys.executable, "-m", module, *arguments],
            env={**os.environ, **self.variables},
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=CHILD_SECONDS_MAX,
        ).stdout


def numpy_units() -> list[str]:
    """Return the instruction sets that numpy dispatches to in this process, narrowest first."""
    found: list[str] = np.show_config(mode="dicts")["SIMD Extensions"].get("found", [])
    return found


def without_units(names: Sequence[str]) -> dict[str, str]:
    return {"NPY_DISABLE_CPU_FEATURES": " ".join(names)} if names else {}


# Torch's threads sleep while they wait for one another. With active waits on a busy machine each takes a core that another one
# needs, and small models take ten times as long. The results are the same.
WAITING = {"OMP_WAIT_POLICY": "passive"}


def threads(count: int) -> dict[str, str]:
    return {"OPENBLAS_NUM_THREADS": str(count), "OMP_NUM_THREADS": str(count), **WAITING}


def c_library_without(*features: str) -> dict[str, str]:
    """Disable features for glibc, which also chooses implementations of exp, log, pow, sin and memcpy."""
    return {"GLIBC_TUNABLES": "glibc.cpu.hwcaps=" + ",".join(f"-{name}" for name in features)}


WIDE = ("AVX512F", "AVX512VL", "AVX2", "FMA")  # variants of glibc's mathematical functions besides the baseline


def handful() -> list[Environment]:
    """Return the narrowest choice, one in the middle, and the default of each library with more threads than cores."""
    units = numpy_units()
    return [
        Environment(
            "narrowest",
            {
                **without_units(units),
                **c_library_without(*WIDE),
                **threads(1),
                "OPENBLAS_CORETYPE": "Prescott",
                "ATEN_CPU_CAPABILITY": "default",
                "PYTHONHASHSEED": "1",
            },
        ),
        Environment(
            "middle",
            {**without_units(units[1:]), **threads(3), "OPENBLAS_CORETYPE": "Sandybridge", "ATEN_CPU_CAPABILITY": "avx2"},
        ),
        Environment("widest", {**threads(8), "PYTHONHASHSEED": "2"}),
    ]


def matrix() -> list[Environment]:
    """Return every choice that each library allows, one at a time, and the combinations above."""
    units = numpy_units()
    found = [Environment("as it is"), *handful()]
    found += [Environment(f"numpy without {' '.join(units[i:])}", without_units(units[i:])) for i in range(len(units))]
    cores = ("Prescott", "Core2", "Nehalem", "Sandybridge", "Haswell", "Zen", "SkylakeX", "Cooperlake", "SapphireRapids")
    found += [Environment(f"OpenBLAS for {core}", {"OPENBLAS_CORETYPE": core}) for core in cores]
    found += [Environment(f"{count} threads", threads(count)) for count in (1, 2, 3, 4, 16)]
    found += [Environment(f"torch {level}", {"ATEN_CPU_CAPABILITY": level}) for level in ("default", "avx2", "avx512")]
    found += [Environment(f"C library without {name}", c_library_without(name)) for name in WIDE]
    return found


def seen() -> dict[str, Any]:
    """Return this process's choices, and those of torch if it was imported."""
    about: dict[str, Any] = {"numpy": np.__version__, "units": numpy_units(), **_openblas()}
    torch = sys.modules.get("torch")
    if torch is not None:
        about |= {
            "torch": torch.__version__,
            "aten": torch.backends.cpu.get_cpu_capability(),
            "torch_threads": torch.get_num_threads(),
        }
    return about


def _openblas() -> dict[str, Any]:
    """Return kernels and threads of the OpenBLAS in numpy's wheels, or nothing if numpy uses another library."""
    maps = Path("/proc/self/maps")
    paths = {line.split()[-1] for line in maps.read_text().splitlines() if "openblas64_" in line} if maps.exists() else set()
    for path in sorted(paths):
        library = ctypes.CDLL(path)
        library.scipy_openblas_get_corename64_.restype = ctypes.c_char_p
        core = library.scipy_openblas_get_corename64_().decode()
        return {"core": core, "blas_threads": library.scipy_openblas_get_num_threads64_()}
    return {}


def processor() -> str:
    """Return the processor's name, for people."""
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match.group(1) if match else "unknown"


def last_json(output: str) -> Any:
    """Parse the last line of a child's output. Libraries may have printed others before."""
    return json.loads(output.strip().splitlines()[-1])
