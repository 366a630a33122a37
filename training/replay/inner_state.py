"""The state of an inner optimizer between two steps: the number of steps, and its moments as one float32 vector.

This module uses only numpy. In files, the number of steps (unsigned, 8 bytes) precedes the moments, all little-endian. The digest
of a state is that of its file.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from protocol.blob_digest import hash_pieces
from protocol.errors import RemoteProtocolError
from storage.multipart_objects import write_list
from training.job_spec import InnerOptimizerKind, JobSpec
from training.replicated.tensor_layout import BLOCK, Float32Array, TensorInfo, TensorLayout, float32_bytes, layout_of
from training.transformer import EMBEDDING, OUTPUT_MATRIX

# Summand of the root of AdamW's second moment. With 1e-8, rounding would decide the step of a parameter whose gradient is about
# 1e-8. Honest replays on other processors would then differ by more than a job tolerates (decision 42).
ADAMW_EPSILON = 1e-6
# Coefficients of Muon's polynomial, from its blog post: after five steps, singular values above 0.002 are in 0.7..1.2.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
# Summand of the norm of a matrix's direction. With 1e-7, a gradient of mere rounding errors, as on text without variety, would
# become as long as any other (decision 42).
MUON_EPSILON = 1e-3
# Summand of the norm of SAM's gradient: with a gradient of zero both passes are at one point. It is far below the norms of models
# that are sure of their text, about 1e-6, whose honest replays still differ by 2e-5 only.
SAM_EPSILON = 1e-12
# Least size of elements in a matrix with a norm of about 1: smaller elements become zero. Their products could be subnormal
# numbers, which take twenty times as long.
MUON_LEAST = 2.0**-60
RELATIVE_ERROR_MAX = 1e9  # largest relative error in a report, which stands for all larger errors and for NaN
_STEPS = struct.Struct("<Q")
_NOTHING = np.float32(0)


@dataclass(frozen=True, slots=True, eq=False)
class InnerState:
    steps: int
    moments: Float32Array  # all moments, one after another, in the order of `moment_slots`

    @classmethod
    def fresh(cls, spec: JobSpec) -> InnerState:
        return cls(0, np.zeros(inner_size(spec), dtype=np.float32))

    @classmethod
    def load(cls, path: Path, spec: JobSpec) -> InnerState:
        """Read a state that `write` wrote to `path`. Raises `RemoteProtocolError` for an impossible length or number of steps."""
        size = path.stat().st_size
        if size != inner_bytes(spec):
            raise RemoteProtocolError("malformed", f"an inner state has {size} bytes, expected {inner_bytes(spec)}")
        with path.open("rb") as stream:
            (steps,) = _STEPS.unpack(stream.read(_STEPS.size))
            moments = np.fromfile(stream, dtype="<f4").astype(np.float32, copy=False)
        if steps > spec.rounds * spec.local_steps:
            raise RemoteProtocolError(
                "malformed", f"an inner state has {steps} steps, but the job has only {spec.rounds * spec.local_steps}"
            )
        return cls(steps, moments)

    def iter_bytes(self) -> Iterator[bytes | memoryview]:
        """Yield the bytes of the state, without a copy of the moments."""
        yield _STEPS.pack(self.steps)
        yield float32_bytes(self.moments)

    def digest(self) -> bytes:
        return hash_pieces(self.iter_bytes()).digest()

    def write(self, path: Path) -> bytes:
        """Write the state and return its digest.

        The daemon makes the file durable, and the list of its parts in a file beside it, if any.
        """
        with path.open("wb") as stream:
            stream.writelines(self.iter_bytes())
        hasher = hash_pieces(self.iter_bytes())
        write_list(path, hasher.part_list)
        return hasher.digest()


def inner_bytes(spec: JobSpec) -> int:
    return _STEPS.size + 4 * inner_size(spec)


def inner_size(spec: JobSpec) -> int:
    """Return the number of float32 moments in an inner state."""
    return max(part.stop for part in moment_slots(spec).values())


# A function of parameters and inner state; the next step may change both arrays.
OnState = Callable[[Float32Array, InnerState], None]


@functools.lru_cache(maxsize=8)
def moment_slots(spec: JobSpec) -> dict[str, slice]:
    """Return the range of each moment in `InnerState.moments`, by name.

    AdamW has two moments for every parameter. Muon has one for every parameter, and second moments only for the tensors that it
    leaves to AdamW, in layout order. The first moments of these tensors are in the slot of the momentum.
    """
    layout = layout_of(spec)
    if spec.inner is InnerOptimizerKind.MUON:
        rest = sum(tensor.size for tensor in adamw_tensors(layout))
        return {"momentum": slice(0, layout.size), "second": slice(layout.size, layout.size + rest)}
    return {"first": slice(0, layout.size), "second": slice(layout.size, 2 * layout.size)}


def update_directions(inner: InnerState, spec: JobSpec) -> Float32Array:
    """Return the change of each parameter by the moments alone, at rate 1 and without decay: shape (parameters,).

    AdamW divides the first moments by the roots of the second ones, and Muon makes momentum orthogonal. A small error in a moment
    can therefore be a large error in a step. The number of steps is at least 1.
    """
    layout = layout_of(spec)
    first, second = (inner.moments[part] for part in moment_slots(spec).values())
    if spec.inner is not InnerOptimizerKind.MUON:
        return _adamw_direction(first, second, inner.steps, spec)
    found, start = np.empty_like(first), 0
    for tensor in adamw_tensors(layout):
        rest = second[start : start + tensor.size]
        found[tensor.elements] = _adamw_direction(first[tensor.elements], rest, inner.steps, spec)
        start += tensor.size
    for tensor in hidden_matrices(layout):
        stack = first[tensor.elements].reshape(-1, *tensor.shape[-2:])
        found[tensor.elements] = np.concatenate([_orthogonal(matrix).ravel() for matrix in stack])
    return found


def _adamw_direction(first: Float32Array, second: Float32Array, steps: int, spec: JobSpec) -> Float32Array:
    corrections = np.float32(1 - spec.beta1**steps), np.float32(1 - spec.beta2**steps)
    root = np.sqrt(second / corrections[1]) + np.float32(ADAMW_EPSILON)
    return np.asarray(first / corrections[0] / root, dtype=np.float32)


def _orthogonal(matrix: Float32Array) -> Float32Array:
    """Compute `training.engines.pytorch.inner_optimizers.orthogonalize` in numpy."""
    a, b, c = map(np.float32, NEWTON_SCHULZ)
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = _flushed(wide / (np.linalg.norm(wide) + np.float32(MUON_EPSILON)))
    for _ in range(NEWTON_SCHULZ_STEPS):
        square = _flushed(x @ x.T)
        x = _flushed(a * x + _flushed(b * square + c * (square @ square)) @ x)
    return np.asarray(x.T if matrix.shape[0] > matrix.shape[1] else x, dtype=np.float32)


def _flushed(matrix: Float32Array) -> Float32Array:
    return matrix * (np.abs(matrix) >= np.float32(MUON_LEAST))


def hidden_matrices(layout: TensorLayout) -> list[TensorInfo]:
    """Return the tensors that Muon updates: all matrices and stacks of matrices, except the embedding and the output layer."""
    return [tensor for tensor in layout.tensors if _is_hidden_matrix(tensor)]


def adamw_tensors(layout: TensorLayout) -> list[TensorInfo]:
    return [tensor for tensor in layout.tensors if not _is_hidden_matrix(tensor)]


def _is_hidden_matrix(tensor: TensorInfo) -> bool:
    return len(tensor.shape) >= 2 and tensor.name not in (EMBEDDING, OUTPUT_MATRIX)


# Comparison ----------------------------------------------------------------------------------------------------------


def inner_error(committed: InnerState, replayed: InnerState, spec: JobSpec) -> float:
    """Return the largest relative error of a committed state: of first moments, roots of second moments, or directions.

    The relative error of a vector is ‖committed − replayed‖ / ‖replayed‖.
    """
    if committed.steps != replayed.steps:
        return RELATIVE_ERROR_MAX
    moments = zip(_moments(committed, spec), _moments(replayed, spec), strict=True)
    apart = max(relative_error(l2_distance(theirs, own), l2_distance(own, _NOTHING)) for theirs, own in moments)
    with np.errstate(all="ignore"):
        theirs, own = update_directions(committed, spec), update_directions(replayed, spec)
    return max(apart, relative_error(l2_distance(theirs, own), l2_distance(own, _NOTHING)))


def _moments(inner: InnerState, spec: JobSpec) -> list[Float32Array]:
    """Return the moments, but the roots of second moments: a norm of squares would only reflect the largest."""
    # Second moments of a liar may be negative. Their roots are NaN, which counts as the largest error.
    with np.errstate(all="ignore"):
        return [
            np.sqrt(inner.moments[part]) if name == "second" else inner.moments[part] for name, part in moment_slots(spec).items()
        ]


def l2_distance(a: Float32Array, b: Float32Array | np.float32) -> float:
    """Return ‖a − b‖, in float64 and block by block."""
    total = 0.0
    with np.errstate(all="ignore"):  # Values of a liar may overflow, which counts as the largest error.
        for start in range(0, len(a), BLOCK):
            part = slice(start, start + BLOCK)
            difference = a[part].astype(np.float64) - (b[part] if isinstance(b, np.ndarray) else b)
            # `einsum` instead of `dot`, with which OpenBLAS would wake threads.
            total += float(np.einsum("i,i", difference, difference))
    return math.sqrt(total) if total >= 0 else math.inf


def relative_error(error: float, norm: float) -> float:
    """Return error / norm, at most `RELATIVE_ERROR_MAX`. It is 0 if error and norm are 0."""
    if error == 0:
        return 0.0
    relative = error / norm if norm else math.inf
    return min(relative, RELATIVE_ERROR_MAX) if relative == relative else RELATIVE_ERROR_MAX
