"""The scratch objective: an update that everybody can compute from a hash, to test a live network without a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from training import random_stream
from training.objectives.objective import Float32Array, JobSpecProtocol, Objective, Shape

SIZE = 4096  # parameters


class ScratchObjective(Objective):
    name = "scratch"
    description = "a known update on one small tensor: tests a live network"
    needs_worker = False
    reads_text = False
    makes_text = False

    def tensor_shapes(self, job: JobSpecProtocol, settings: Any) -> Sequence[tuple[str, Shape]]:
        return [("scratch", (SIZE,))]

    def deterministic_update(self, job: bytes, round: int, trainer: bytes, size: int) -> Float32Array:
        """Multiples of 1/256 in −1/2..1/2."""
        integers = np.frombuffer(random_stream.random_bytes(size, "scratch", job, round, trainer), dtype=np.int8)
        return integers.astype(np.float32) * np.float32(1 / 256)
