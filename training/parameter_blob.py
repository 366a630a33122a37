"""The blob of initial parameters of a job whose first model no job trained: little-endian float32 in the order of the layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from protocol.blob_digest import blob_digest
from protocol.errors import StorageError
from training.job_spec import JobSpec
from training.replicated.replicated_model import ReplicatedModel
from training.replicated.tensor_layout import BLOCK, Float32Array, TensorBlock, float32_bytes, layout_of
from training.transformer import tensor_shapes

Read = Callable[[bytes, int, int], bytes]  # a function that reads a part of a stored blob; arguments: digest, offset, most bytes


def blob_bytes(spec: JobSpec) -> int:
    return 4 * layout_of(spec).size


def iter_parameters(model: ReplicatedModel) -> Iterator[memoryview]:
    """Yield the pieces of a blob with the parameters of a trained model, without the tensors of its objective."""
    known = model.layout.tensor_views(model.parameters)
    for name, _ in tensor_shapes(model.spec.model):
        values = known[name].reshape(-1)
        for start in range(0, len(values), BLOCK):
            yield float32_bytes(values[start : start + BLOCK])


def blob_problem(spec: JobSpec, size: int, read: Read) -> str | None:
    """Return why the job cannot start from the blob of `size` bytes; None if it can. Only one block is in memory at a time."""
    if size != blob_bytes(spec):
        return f"the blob has {size} bytes, but {layout_of(spec).size} parameters need {blob_bytes(spec)}"
    for block in layout_of(spec).blocks:
        if not np.isfinite(_values(spec, read, block)).all():
            return f"{block.tensor} has a non-finite number"
    return None


def read_block_values(spec: JobSpec, read: Read, block: TensorBlock) -> Float32Array:
    """Return the parameters of one block. Raises `StorageError` if they are damaged.

    A quorum of voters has checked this blob, so an error means that this peer's copy is damaged.
    """
    found = _values(spec, read, block)
    if len(found) != block.size or not np.isfinite(found).all():
        raise StorageError(f"job {spec.name!r} cannot start: {block.tensor} is cut short, or has a non-finite number")
    return found


def read_all_values(spec: JobSpec, path: Path) -> Float32Array:
    """Return all parameters in a file. Raises `StorageError` if the file is not the blob that the job names."""
    found = np.fromfile(path, dtype="<f4")
    if len(found) != layout_of(spec).size or blob_digest(float32_bytes(found)) != spec.initial_model:
        raise StorageError(f"{path} does not contain the parameters that job {spec.name!r} starts from")
    return found


def _values(spec: JobSpec, read: Read, block: TensorBlock) -> Float32Array:
    assert spec.initial_model is not None
    return np.frombuffer(read(spec.initial_model, 4 * block.elements.start, 4 * block.size), dtype="<f4")
