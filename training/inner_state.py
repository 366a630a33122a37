"""The state of an inner optimizer between two steps: how many it has taken, and its moments as one float32 vector. numpy only.

On disk and under a digest it is the number of steps (unsigned, 8 bytes) and then the moments, all little-endian.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from protocol.errors import RemoteProtocolError
from training.replicated.layout import Float32Array, Layout, Tensor, layout_of
from training.spec import Inner, JobSpec

_STEPS = struct.Struct("<Q")


@dataclass(frozen=True, slots=True, eq=False)
class InnerState:
    steps: int
    moments: Float32Array  # the slots one after another, see `slots`

    @classmethod
    def fresh(cls, spec: JobSpec) -> InnerState:
        return cls(0, np.zeros(inner_size(spec), dtype=np.float32))

    @classmethod
    def load(cls, path: Path, spec: JobSpec) -> InnerState:
        """What `pieces` were written to `path`; `RemoteProtocolError` if length or count are not possible in the job."""
        size = path.stat().st_size
        if size != inner_bytes(spec):
            raise RemoteProtocolError("malformed", f"an inner state of {size} bytes, this job's has {inner_bytes(spec)}")
        with path.open("rb") as stream:
            (steps,) = _STEPS.unpack(stream.read(_STEPS.size))
            moments = np.fromfile(stream, dtype="<f4").astype(np.float32, copy=False)
        if steps > spec.rounds * spec.local_steps:
            raise RemoteProtocolError("malformed", f"an inner state after {steps} steps, this job has fewer")
        return cls(steps, moments)

    def pieces(self) -> Iterator[bytes | memoryview]:
        """Its bytes, without a copy of the moments."""
        yield _STEPS.pack(self.steps)
        yield float32_bytes(self.moments)


def float32_bytes(vector: Float32Array) -> memoryview:
    """The little-endian bytes of a vector; on nearly every machine those that it already is in memory."""
    return np.ascontiguousarray(vector, dtype="<f4").data.cast("B")


def inner_bytes(spec: JobSpec) -> int:
    return _STEPS.size + 4 * inner_size(spec)


def inner_size(spec: JobSpec) -> int:
    """float32 numbers of moments."""
    return max(part.stop for part in slots(spec).values())


@functools.lru_cache(maxsize=8)
def slots(spec: JobSpec) -> dict[str, slice]:
    """Where each moment lies, by name.

    AdamW has two for every parameter. Muon has one for every parameter (for what it leaves to AdamW, the first moment of that),
    and the second moments of that part alone, in layout order.
    """
    layout = layout_of(spec)
    if spec.inner is Inner.MUON:
        rest = sum(tensor.size for tensor in others(layout))
        return {"momentum": slice(0, layout.size), "second": slice(layout.size, layout.size + rest)}
    return {"first": slice(0, layout.size), "second": slice(layout.size, 2 * layout.size)}


def hidden_matrices(layout: Layout) -> list[Tensor]:
    """What Muon is for: the matrices between the embedding, which is the output layer too, and the loss."""
    return [tensor for tensor in layout.tensors if _is_hidden_matrix(tensor)]


def others(layout: Layout) -> list[Tensor]:
    return [tensor for tensor in layout.tensors if not _is_hidden_matrix(tensor)]


def _is_hidden_matrix(tensor: Tensor) -> bool:
    return len(tensor.shape) == 2 and tensor.name != "embedding.weight"
