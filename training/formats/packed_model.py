"""Ternary models in a packed file: two bits for each element of a ternary matrix.

The file is a safetensors file, so other programs can read it. A ternary matrix is two tensors: its codes (U8, four in a byte, the
first one in the lowest bits) and its scale (F32, one element). The codes 0, 1 and 2 stand for the levels 0, 1 and −1. Names are
those of `transformers`, and the scale's name ends with `_scale`. Other tensors are F32.

The metadata have the SHA-256 of the whole file, computed with 64 zeros in its place.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
import numpy.typing as npt

from protocol.errors import UserError
from storage.regular_files import open_regular
from training.formats.checkpoint import METADATA_KEY, StoredTensor, iter_safetensors, require_downloaded, safetensors_header
from training.objectives.objective import Shape
from training.replicated.tensor_layout import BLOCK, Float32Array
from training.ternary import Int8Array, latent_weights, split_ternary
from training.transformer import ModelSpec, model_tensors

PACKED: Final = "packed.safetensors"
SCALE_SUFFIX: Final = "_scale"
CODES_IN_BYTE: Final = 4
SHIFTS: Final = np.arange(0, 8, 2, dtype=np.uint8)
LEVELS: Final = np.array([0, 1, -1], dtype=np.int8)  # levels by code
CODES: Final = np.array([0, 1, 2], dtype=np.uint8)  # codes by level, where −1 indexes the last one
NO_CODE: Final = 3
NO_DIGEST: Final = "0" * 64
DIGEST_KEY: Final = "sha256"
# Place of the digest in the file: the header begins with the metadata, and the digest is their only entry.
BEGINNING: Final = f'{{"{METADATA_KEY}":{{"{DIGEST_KEY}":"'.encode()
DIGEST_AT: Final = 8 + len(BEGINNING)
READ_BYTES: Final = 1 << 16  # bytes that are hashed at once

Packed = Float32Array | npt.NDArray[np.uint8]


def pack_levels(levels: Int8Array) -> npt.NDArray[np.uint8]:
    """Return the codes of levels, four in a byte. The last byte is filled up with the code 0."""
    codes = CODES[levels.ravel()]
    quarters = np.pad(codes, (0, -codes.size % CODES_IN_BYTE)).reshape(-1, CODES_IN_BYTE)
    packed: npt.NDArray[np.uint8] = np.bitwise_or.reduce(quarters << SHIFTS, axis=1)
    return packed


def unpack_levels(packed: npt.NDArray[np.uint8], size: int) -> Int8Array:
    """Return `size` levels. Raises `ValueError` for a code without a level, and for others than 0 behind the last level."""
    codes = ((packed[:, None] >> SHIFTS) & 3).ravel()
    wrong = np.flatnonzero(codes == NO_CODE)
    if wrong.size:
        raise ValueError(f"element {wrong[0]} has the code 11, which stands for no level")
    if codes[size:].any():
        raise ValueError(f"codes other than 0 follow its {size} elements")
    return LEVELS[codes[:size]]


@dataclass(frozen=True, slots=True)
class TernaryTensor:
    """A ternary matrix in a file. Its blocks are latent weights, from which a model makes exactly the weights in the file."""

    weights: StoredTensor
    name: str

    @property
    def path(self) -> Path:
        return self.weights.path

    def iter_blocks(self) -> Iterator[Float32Array]:
        """Yield latent weights. Raises `UserError` if the matrix is not ternary."""
        found = split_ternary(np.concatenate(list(self.weights.iter_blocks())))
        if found is None:
            more = f"tensor {self.name!r} has weights of more than one size, but its model has ternary matrices"
            raise UserError(f"{self.path}: {more}: export the model again")
        yield from _latent_blocks(self.path, self.name, *found)


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A ternary matrix in a packed file. Its blocks are latent weights, as those of `TernaryTensor`."""

    path: Path
    name: str
    size: int  # number of elements
    codes_at: int  # offset of the codes in the file, in bytes
    scale_at: int

    def read_levels(self) -> tuple[np.float32, Int8Array]:
        """Return the scale and the levels. Raises `UserError` for an invalid code or scale."""
        codes = np.memmap(self.path, np.uint8, "r", self.codes_at, (codes_bytes((self.size,)),))
        scale = np.float32(np.memmap(self.path, "<f4", "r", self.scale_at, (1,))[0])
        try:
            return scale, unpack_levels(np.asarray(codes), self.size)
        except ValueError as error:
            raise UserError(f"{self.path}: tensor {self.name!r}: {error}: export the model again") from None

    def iter_blocks(self) -> Iterator[Float32Array]:
        yield from _latent_blocks(self.path, self.name, *self.read_levels())


def _latent_blocks(path: Path, name: str, scale: np.float32, levels: Int8Array) -> Iterator[Float32Array]:
    latent = latent_weights(scale, levels)
    if latent is None:
        raise UserError(f"{path}: tensor {name!r}: no matrix with these levels has the scale {scale:g}: export the model again")
    for start in range(0, latent.size, BLOCK):
        yield latent[start : start + BLOCK]


def write_packed(stream: BinaryIO, model: ModelSpec, names: Mapping[str, str], weights: Mapping[str, Float32Array]) -> None:
    """Write a packed file. `names` are the file's names of tensors, and `weights` their values, both by our names.

    Raises `UserError` if a number is not finite.
    """
    found = dict[str, Packed]()
    for name, tensor in model_tensors(model).items():
        if not tensor.parameter.is_ternary:
            found[names[name]] = weights[name]
            continue
        split = split_ternary(weights[name])
        if split is None:
            raise UserError(f"tensor {name!r} has a non-finite number: choose an earlier round")
        found[names[name] + SCALE_SUFFIX], found[names[name]] = split[0].reshape(1), pack_levels(split[1])
    hashed = hashlib.sha256()
    for piece in iter_safetensors(found.items(), {DIGEST_KEY: NO_DIGEST}):
        hashed.update(piece)
    for piece in iter_safetensors(found.items(), {DIGEST_KEY: hashed.hexdigest()}):
        stream.write(piece)


def read_packed(path: Path, model: ModelSpec, names: Mapping[str, str]) -> dict[str, StoredTensor | PackedTensor]:
    """Return the tensors of a packed file by our names. `names` are the file's names.

    Raises `UserError` if a byte was changed, or if the file has another model.
    """
    digest = _checked_digest(path)
    tensors, forms = model_tensors(model), list[tuple[str, npt.DTypeLike, Shape]]()
    for name, tensor in tensors.items():
        if tensor.parameter.is_ternary:
            forms += [(names[name], np.uint8, (codes_bytes(tensor.parameter.shape),)), (names[name] + SCALE_SUFFIX, "<f4", (1,))]
        else:
            forms.append((names[name], "<f4", tensor.parameter.shape))
    header, places = safetensors_header(forms, {DIGEST_KEY: digest})
    with open_regular(path) as stream:
        if stream.read(len(header)) != header:
            raise UserError(f"{path}: its tensors are not those of the model that config.json describes: export the model again")
        size, described = os.fstat(stream.fileno()).st_size, len(header) + _tensors_bytes(forms)
    if size != described:
        raise UserError(f"{path} is damaged: it has {size} bytes, but its header describes {described}: export the model again")
    found = dict[str, StoredTensor | PackedTensor]()
    for name, tensor in tensors.items():
        theirs, shape = names[name], tensor.parameter.shape
        if tensor.parameter.is_ternary:
            packed = PackedTensor(path, theirs, math.prod(shape), places[theirs], places[theirs + SCALE_SUFFIX])
            packed.read_levels()  # Raises `UserError` before anything is written.
            found[name] = packed
        else:
            found[name] = StoredTensor(path, "F32", shape, places[theirs])
    return found


def codes_bytes(shape: Shape) -> int:
    """Return the bytes of a matrix's codes."""
    return -(-math.prod(shape) // CODES_IN_BYTE)


def _tensors_bytes(forms: Iterable[tuple[str, npt.DTypeLike, Shape]]) -> int:
    return sum(np.dtype(kind).itemsize * math.prod(shape) for _, kind, shape in forms)


def _checked_digest(path: Path) -> str:
    """Return the digest in the file. Raises `UserError` unless it is the file's own."""
    with open_regular(path) as stream:
        beginning = stream.read(DIGEST_AT + len(NO_DIGEST))
        require_downloaded(path, beginning)
        digest = beginning[DIGEST_AT:].decode("ascii", "replace")
        hashed = hashlib.sha256(beginning[:DIGEST_AT] + NO_DIGEST.encode())
        while piece := stream.read(READ_BYTES):
            hashed.update(piece)
    if beginning[8:DIGEST_AT] != BEGINNING or hashed.hexdigest() != digest:
        raise UserError(f"{path} is damaged: its bytes do not have the SHA-256 that it names: copy or export it again")
    return digest
