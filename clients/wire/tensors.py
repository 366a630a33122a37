"""Tensors in messages: the inputs of a loss, and the outputs of all examples in one batch."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from clients.wire.wire_format import (
    BYTES_FIELD,
    VARINT_FIELD,
    VARINTS_FIELD,
    FieldReader,
    FieldTypes,
    encode_bytes,
    encode_varint,
    read_integers,
)
from protocol.errors import RemoteProtocolError

DIMENSIONS_MAX: Final = 8  # dimensions in the text of an error: only tensors with one dimension are valid

Vector = npt.NDArray[np.float32] | npt.NDArray[np.int64]


class DataType(enum.IntEnum):
    FLOAT32 = 1
    INT64 = 2


class TensorField(enum.IntEnum):
    DENSE = 1
    SPARSE_CSR = 2
    DTYPE = 3
    SHAPE = 4


class BatchedTensorField(enum.IntEnum):
    DATA = 1
    OFFSETS = 2
    DTYPE = 3


NUMBER_TYPES: Final = {DataType.FLOAT32: "<f4", DataType.INT64: "<i8"}
TENSOR_TYPES: Final[FieldTypes] = {
    TensorField.DENSE: BYTES_FIELD,
    TensorField.SPARSE_CSR: BYTES_FIELD,
    TensorField.DTYPE: VARINT_FIELD,
    TensorField.SHAPE: VARINTS_FIELD,
}


def read_vector(reader: FieldReader, message: memoryview) -> Vector:
    """Return the numbers of a tensor with one dimension. Raises `RemoteProtocolError` for all other tensors."""
    dense, dtype, shape = memoryview(b""), 0, list[int]()
    for field in reader.read_fields(message, TENSOR_TYPES):
        match field.number:
            case TensorField.DENSE:
                dense = field.data
            case TensorField.SPARSE_CSR:
                raise RemoteProtocolError("unsupported", "the tensor is sparse: only dense tensors are supported")
            case TensorField.DTYPE:
                dtype = field.integer
            case TensorField.SHAPE:
                shape += itertools.islice(read_integers(field), DIMENSIONS_MAX + 1 - len(shape))
    if dtype not in NUMBER_TYPES:
        known = " and ".join(f"{kind:d} ({kind.name.lower()})" for kind in DataType)
        raise RemoteProtocolError("unsupported", f"the tensor has the data type {dtype}: {known} are supported")
    number_type = np.dtype(NUMBER_TYPES[DataType(dtype)])
    count, rest = divmod(len(dense), number_type.itemsize)
    if rest:
        raise RemoteProtocolError("malformed", f"the tensor has {len(dense)} bytes, not a multiple of {number_type.itemsize}")
    if shape not in ([], [count]):  # A tensor without a shape has one dimension.
        named = " × ".join(map(str, shape[:DIMENSIONS_MAX])) + (" × …" if len(shape) > DIMENSIONS_MAX else "")
        raise RemoteProtocolError(
            "unsupported", f"the tensor has the shape {named} and {count} numbers: its shape must be {count}"
        )
    return np.frombuffer(dense, dtype=number_type)


def encode_batch(vectors: Sequence[npt.NDArray[np.float32]]) -> bytes:
    """Encode the vectors of all examples as one batched tensor: their numbers, and the byte positions at which they begin."""
    ends = np.cumsum([0, *(vector.size for vector in vectors)], dtype="<i8") * np.dtype("<f4").itemsize
    return (
        encode_bytes(BatchedTensorField.DATA, b"".join(vector.astype("<f4").tobytes() for vector in vectors))
        + encode_bytes(BatchedTensorField.OFFSETS, ends.astype("<i8").tobytes())
        + encode_varint(BatchedTensorField.DTYPE, DataType.FLOAT32)
    )
