"""What a job starts from if that is no job's model: a blob of little-endian float32 parameters in the order of the layout."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from protocol.errors import StorageError
from training.replicated.layout import Block, Float32Array, layout_of
from training.spec import JobSpec

Read = Callable[[bytes, int, int], bytes]  # of a blob that is here: digest, offset, most bytes


def bytes_of(spec: JobSpec) -> int:
    return 4 * layout_of(spec).size


def problem(spec: JobSpec, size: int, read: Read) -> str | None:
    """Why no job can start from the blob, which has `size` bytes; None if one can. It holds one block in memory."""
    if size != bytes_of(spec):
        return f"the blob has {size} bytes, {layout_of(spec).size} parameters have {bytes_of(spec)}"
    for block in layout_of(spec).blocks:
        if not np.isfinite(_values(spec, read, block)).all():
            return f"{block.tensor} has a number that is not finite"
    return None


def values(spec: JobSpec, read: Read, block: Block) -> Float32Array:
    """`StorageError` if they are unsound: a quorum of voters has found them sound, so that what is here is not what they hold."""
    found = _values(spec, read, block)
    if len(found) != block.size or not np.isfinite(found).all():
        raise StorageError(f"job {spec.name!r} cannot start: {block.tensor} is cut short, or has a number that is not finite")
    return found


def _values(spec: JobSpec, read: Read, block: Block) -> Float32Array:
    assert spec.start is not None
    return np.frombuffer(read(spec.start, 4 * block.elements.start, 4 * block.size), dtype="<f4")
