"""The canonical flat layout of a job's tensors, one float32 vector, and its initial values.

- A *chunk* (at most 4096 elements of one tensor) shares one scale in the codec.
- A *block* (at most 16 chunks of one tensor) is the unit of streaming code, and one leaf of the model root.
- A *stretch* (at most 64 blocks) is the work of one thread at a time.
- A *run* is several consecutive blocks that are processed together, since small ones are slow.

Tensors have the names and shapes of the torch model.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from protocol.errors import LocalProtocolError
from training import random_stream
from training.job_spec import JobSpec
from training.objectives.objective import Shape
from training.transformer import PARAMETERS_MAX, TENSORS_MAX, model_tensors

Float32Array = npt.NDArray[np.float32]
CHUNK: Final = 4096  # most elements that share a scale (DeMo and SparseLoCo have the same number)
BLOCK: Final = 16 * CHUNK  # most elements that are streamed at once: a dozen arrays of 256 KiB fit into the cache
# Most blocks of a stretch: a dozen milliseconds of work; the largest models have a few hundred stretches.
THREAD_BLOCKS: Final = 64
# Each tensor may have one shorter chunk and one shorter block, its last ones.
CHUNKS_MAX: Final = PARAMETERS_MAX // CHUNK + TENSORS_MAX
BLOCKS_MAX: Final = PARAMETERS_MAX // BLOCK + TENSORS_MAX


def float32_bytes(vector: Float32Array) -> memoryview:
    """Return the little-endian bytes of a vector, without a copy on nearly all machines."""
    return np.ascontiguousarray(vector, dtype="<f4").data.cast("B")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    name: str
    shape: Shape
    offset: int  # offset of the tensor in the flat vector, in elements

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def elements(self) -> slice:
        return slice(self.offset, self.offset + self.size)

    @property
    def decayed(self) -> bool:
        """True if inner and outer weight decay apply to the tensor. Weight decay must not pull the weights of a norm to zero."""
        return len(self.shape) > 1


@dataclass(frozen=True, slots=True)
class ElementRun:
    """A range of consecutive chunks, of one tensor or of several, and the same range in elements."""

    elements: slice
    chunks: slice

    @classmethod
    def of_blocks(cls, blocks: Sequence[ElementRun]) -> ElementRun:
        """Return the run that consists of these consecutive blocks."""
        first, last = blocks[0], blocks[-1]
        return ElementRun(slice(first.elements.start, last.elements.stop), slice(first.chunks.start, last.chunks.stop))

    @property
    def size(self) -> int:
        return self.elements.stop - self.elements.start


@dataclass(frozen=True, slots=True)
class TensorBlock(ElementRun):
    """A run of at most `BLOCK` elements of one tensor."""

    tensor: str
    decayed: bool  # True if weight decay applies to the tensor.


@dataclass(frozen=True)
class TensorLayout:
    tensors: tuple[TensorInfo, ...]
    size: int  # number of elements of the flat vector

    def tensor_views(self, flat: Float32Array) -> dict[str, Float32Array]:
        """Return the tensors inside a flat vector, by name and in order, without a copy."""
        if flat.shape != (self.size,):
            raise LocalProtocolError(f"a vector of shape {flat.shape} does not fit a layout of {self.size} elements")
        return {tensor.name: flat[tensor.elements].reshape(tensor.shape) for tensor in self.tensors}

    @functools.cached_property
    def blocks(self) -> tuple[TensorBlock, ...]:
        return tuple(_blocks(self.tensors))

    @functools.cached_property
    def stretches(self) -> tuple[tuple[TensorBlock, ...], ...]:
        return tuple(self.blocks[start : start + THREAD_BLOCKS] for start in range(0, len(self.blocks), THREAD_BLOCKS))

    @functools.cached_property
    def slots_by_name(self) -> Mapping[str, TensorInfo]:
        return {tensor.name: tensor for tensor in self.tensors}

    @functools.cached_property
    def chunk_lengths(self) -> npt.NDArray[np.int64]:
        return np.array([length for tensor in self.tensors for length in _cut(tensor.size, CHUNK)], dtype=np.int64)


@functools.lru_cache(maxsize=8)
def layout_of(spec: JobSpec) -> TensorLayout:
    """Return the layout of a valid job (`JobSpec.problem` is None)."""
    layout = layout_from_shapes(spec.resolved_objective.tensor_shapes(spec, spec.decoded_settings))
    # `JobSpec.problem` bounds both the tensors and the elements. The chunks are counted without `chunk_lengths`: a request for
    # the largest job must not cost every voter an array of its chunks.
    assert sum(math.ceil(tensor.size / CHUNK) for tensor in layout.tensors) <= CHUNKS_MAX
    return layout


def layout_from_shapes(named: Sequence[tuple[str, Shape]]) -> TensorLayout:
    tensors: list[TensorInfo] = []
    offset = 0
    for name, shape in named:
        tensors.append(TensorInfo(name, shape, offset))
        offset += tensors[-1].size
    return TensorLayout(tuple(tensors), offset)


def _cut(size: int, piece: int) -> list[int]:
    """Return the lengths of the pieces into which `size` elements are cut.

    All pieces except the last one have `piece` elements.
    """
    return [min(piece, size - start) for start in range(0, size, piece)]


def _blocks(tensors: tuple[TensorInfo, ...]) -> Iterator[TensorBlock]:
    chunk = 0
    for tensor in tensors:
        start = tensor.offset
        for length in _cut(tensor.size, BLOCK):
            chunks = -(-length // CHUNK)
            yield TensorBlock(slice(start, start + length), slice(chunk, chunk + chunks), tensor.name, tensor.decayed)
            start, chunk = start + length, chunk + chunks


# Initial values come only from integers and correctly rounded operations, so they are bit-equal on every machine. `torch.randn`
# and numpy's normal generator use the C library's logarithm, which differs between machines.


def initial_parameters(spec: JobSpec) -> Float32Array:
    """Return the flat vector of a job's first round, shape (parameters,). Scratch jobs start at zero."""
    return np.concatenate([initial_block(spec, block) for block in layout_of(spec).blocks])


def initial_block(spec: JobSpec, block: TensorBlock) -> Float32Array:
    tensor = layout_of(spec).slots_by_name[block.tensor]
    known = model_tensors(spec.model).get(tensor.name)
    if known is not None:
        parameter = known.parameter
    else:
        parameter = spec.resolved_objective.initial_parameter(tensor.name, tensor.shape)
    place = "initial", spec.seed, tensor.name, block.elements.start - tensor.offset
    # Both conversions are exact: the integers are below 2^24.
    if parameter.uniform:
        factor = np.float32(parameter.uniform / random_stream.UNIFORM_MAX)
        return random_stream.uniform_integers(block.size, *place).astype(np.float32) * factor
    if parameter.deviation:
        factor = np.float32(parameter.deviation / random_stream.IRWIN_HALL_DEVIATION)
        return random_stream.irwin_hall_integers(block.size, *place).astype(np.float32) * factor
    return np.full(block.size, parameter.initial, dtype=np.float32)
