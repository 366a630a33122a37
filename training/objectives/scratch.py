"""The scratch objective: an update that everybody can compute from a hash, to test a live network without a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from training import stream
from training.objectives.objective import Float32Array, Job, Objective, Shape

SIZE = 4096  # parameters


class Scratch(Objective):
    name = "scratch"
    about = "a known update on one small tensor: tests a live network"
    needs_worker = False
    reads_text = False
    makes_text = False

    def tensors(self, job: Job, settings: Any) -> Sequence[tuple[str, Shape]]:
        return [("scratch", (SIZE,))]

    def known_update(self, job: bytes, round: int, trainer: bytes, size: int) -> Float32Array:
        """Multiples of 1/256 in −1/2..1/2."""
        integers = np.frombuffer(stream.stream(size, "scratch", job, round, trainer), dtype=np.int8)
        return integers.astype(np.float32) * np.float32(1 / 256)
