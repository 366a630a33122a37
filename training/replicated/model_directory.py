"""The state of a model, its leaves under the model root, and the model on disk.

A model is a directory with these files:

- a file of little-endian float32 numbers for each vector: `parameters.f32`, and one for each slot of the outer optimizer
- a file with the estimates of all trainers, if the job has estimates
- `state.msgpack`: the state and the hashes of all leaves

A model is written beside its final name and then renamed. While the machine runs, a name therefore never stands for an incomplete
model. Some models are also made durable before the rename, and an empty file, `durable`, marks them. Most models of a job are not
durable (`docs/decisions/0030`). If a power cut damages the newest model, it is recomputed from the last durable one.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import hashlib
import itertools
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

from protocol import codec, merkle
from protocol.codec import Count, Digest, Key, Length
from protocol.errors import RemoteProtocolError, StorageError
from protocol.identity import short_id
from protocol.limits import MEMBERS_MAX, MODEL_MANIFEST_BYTES_MAX, SNAPSHOT_PART_BYTES_MAX, TRAINERS_MAX
from storage.crash_points import crash_points
from storage.durable_files import lock_file, make_directory, sync_directory
from training.job_spec import ESTIMATES_BYTES_MAX, JobSpec
from training.objectives.objective import STEERING_BYTES_MAX
from training.replicated import error_feedback
from training.replicated.error_feedback import FeedbackRecord
from training.replicated.model_files import (
    DURABLE,
    STATE,
    is_durable,
    model_write_errors,
    open_over,
    read_manifest,
    recover_replaced_directory,
    remove_directory,
    replace_directory,
    spare_directory,
)
from training.replicated.tensor_layout import BLOCK, BLOCKS_MAX, Float32Array, TensorLayout, float32_bytes, layout_of

PARAMETERS: Final = "parameters"  # name of the first vector; other vectors are the outer optimizer's slots
# Name of the file part with the estimates of all trainers that have a record, in ascending order of their keys.
ESTIMATES: Final = "estimates"
PIECE_BYTES: Final = 4 * BLOCK  # bytes of a leaf: of an estimate, or at most of a vector
LEAVES_PER_PART: Final = SNAPSHOT_PART_BYTES_MAX // PIECE_BYTES
# Number of last rounds whose median norms limit the next norm: liars must be the majority in more than half of them to move it.
NORM_ROUNDS: Final = 16
MAPPED_BYTES_MIN: Final = 16 << 20  # bytes from which an array is mapped to a file and not kept in memory
VECTORS_MAX: Final = 4  # most vectors of a model: parameters, the two moments of AdamW, and the slow gradient of Grokfast
# Most leaves of a model. Estimates have levels and scales, hence the factor of two.
LEAVES_MAX: Final = VECTORS_MAX * BLOCKS_MAX + TRAINERS_MAX + 2 * (ESTIMATES_BYTES_MAX // PIECE_BYTES)
RECORD_BYTES: Final = 256  # most bytes of a trainer's record in the encoded state

assert LEAVES_PER_PART >= 1
assert 34 * LEAVES_MAX + RECORD_BYTES * MEMBERS_MAX < MODEL_MANIFEST_BYTES_MAX


EncodedEstimate = bytes | memoryview  # an encoded estimate, in memory or as a mapped file


@dataclass(frozen=True, slots=True)
class ModelState:
    """A model without its vectors and estimates. It is the last leaf under the model root."""

    job: Digest
    spec: JobSpec
    round: Count
    rounds_in_model: Count  # number of applied rounds, without those that a rollback undid
    records: Annotated[dict[Key, FeedbackRecord], Length(0, MEMBERS_MAX)]
    # Median accepted norm² of each of the last rounds that accepted any proposal.
    median_norms_squared: Annotated[tuple[float, ...], Length(0, NORM_ROUNDS)]
    beta_powers: Annotated[tuple[float, ...], Length(0, 2)] = ()  # for an outer AdamW: beta1^t and beta2^t after t steps
    # Controller state of the objective (`Objective.next_controller_state`).
    steering: Annotated[bytes, Length(0, STEERING_BYTES_MAX)] = b""


@dataclass(frozen=True, slots=True)
class LeafRange:
    """The range of a leaf in one of the model's files: a block of a vector, or a part of a trainer's estimate."""

    file: str
    bytes: slice
    name: str  # name of the leaf for people


def iter_leaf_ranges(layout: TensorLayout, vectors: Iterable[str], trainers: Iterable[bytes]) -> Iterator[LeafRange]:
    """Yield the ranges of a model's leaves, in order. `trainers` are the trainers with estimates, in ascending order."""
    for vector in vectors:
        for block in layout.blocks:
            name = f"parameter {block.tensor}" if vector == PARAMETERS else f"{vector} of {block.tensor}"
            yield LeafRange(vector, slice(4 * block.elements.start, 4 * block.elements.stop), name)
    for number, trainer in enumerate(trainers):
        start, end = (at * error_feedback.estimate_bytes(layout) for at in (number, number + 1))
        for at in range(start, end, PIECE_BYTES):
            yield LeafRange(ESTIMATES, slice(at, min(at + PIECE_BYTES, end)), f"the estimate of {short_id(trainer)}")


def model_leaf_hash(data: Float32Array | EncodedEstimate) -> bytes:
    """Return the Merkle leaf hash of bytes, or of little-endian float32 elements, without a copy of them."""
    leaf = hashlib.sha256(merkle.LEAF_PREFIX)
    leaf.update(float32_bytes(data) if isinstance(data, np.ndarray) else data)
    return leaf.digest()


def model_root(leaves: Sequence[bytes], state: ModelState) -> bytes:
    return merkle.merkle_root([*leaves, merkle.leaf_hash(codec.encode(state))])


# On disk -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelManifest:
    """The content of `state.msgpack`: the state of a model, and the hashes of all leaves."""

    state: ModelState
    leaves: Annotated[tuple[Digest, ...], Length(1, LEAVES_MAX)]
    root: Digest


def vector_names(spec: JobSpec) -> tuple[str, ...]:
    """Return the names of a model's vectors, in the order of the model's leaves."""
    return (PARAMETERS, *spec.outer_slots)


def part_names(spec: JobSpec) -> tuple[str, ...]:
    """Return the names of a model's parts: its vectors, and the estimates if the job has any. Each part has its own file."""
    return (*vector_names(spec), *((ESTIMATES,) if spec.has_estimates else ()))


def leaf_ranges(state: ModelState) -> tuple[LeafRange, ...]:
    """Return the ranges of all leaves in order, except the last leaf, which is the state."""
    return _pieces(state.spec, _trainers(state))


@functools.lru_cache(maxsize=2)
def _pieces(spec: JobSpec, trainers: tuple[bytes, ...]) -> tuple[LeafRange, ...]:
    return tuple(iter_leaf_ranges(layout_of(spec), vector_names(spec), trainers))


def _trainers(state: ModelState) -> tuple[bytes, ...]:
    """Return the trainers that have estimates, in the order of the estimates in their file."""
    return tuple(sorted(state.records)) if state.spec.has_estimates else ()


def file_name(part: str) -> str:
    return f"{part}.payloads" if part == ESTIMATES else f"{part}.f32"


class ModelDirectoryWriter:
    """A writer of a model into a directory beside its final name. The old model stays until `install_model`.

    Use it within `model_write_errors`.
    """

    def __init__(self, directory: Path, parts: Sequence[str]) -> None:
        recover_replaced_directory(directory)
        self._directory, self._folder = directory, directory.with_name(f".{directory.name}.fresh")
        remove_directory(self._folder)
        make_directory(directory.parent)
        try:
            spare_directory(directory).rename(self._folder)
        except FileNotFoundError:
            self._folder.mkdir()
        with ExitStack() as opened:
            self._files = {name: opened.enter_context(open_over(self._folder / file_name(name))) for name in parts}
            self._opened = opened.pop_all()

    def __enter__(self) -> ModelDirectoryWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def write_bytes_at(self, part: str, start: int, data: Float32Array | EncodedEstimate) -> None:
        """Write `data` at offset `start` of the part's file. Several threads may write, in any order."""
        left = float32_bytes(data) if isinstance(data, np.ndarray) else memoryview(data)
        while left:
            written = os.pwrite(self._files[part].fileno(), left, start)
            left, start = left[written:], start + written

    def write_estimates(self, held: Mapping[bytes, EncodedEstimate]) -> None:
        for number, trainer in enumerate(sorted(held)):
            self.write_bytes_at(ESTIMATES, number * len(held[trainer]), held[trainer])

    def install_model(self, saved: ModelManifest, durable: bool) -> None:
        """Give the model its final name. If `durable`, the model is durable after the call."""
        if self._directory.exists() and _root_in(self._directory) == saved.root and (is_durable(self._directory) or not durable):
            remove_directory(self._folder)
            return
        with crash_points("model-write"):
            layout = layout_of(saved.state.spec)
            estimates = len(saved.state.records) * error_feedback.estimate_bytes(layout)
            for part, file in self._files.items():
                file.truncate(estimates if part == ESTIMATES else 4 * layout.size)
                if durable:
                    os.fsync(file.fileno())
            write_manifest(self._folder, saved, durable)
        replace_directory(self._folder, self._directory, durable)


def write_manifest(folder: Path, saved: ModelManifest, durable: bool) -> None:
    """Write the manifest of a model, and the mark of a durable model."""
    data = codec.encode(saved)
    if durable:
        with (folder / STATE).open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        (folder / DURABLE).touch()
        sync_directory(folder)
    else:
        (folder / STATE).write_bytes(data)


def read_model(directory: Path) -> tuple[ModelManifest, dict[str, Float32Array], dict[bytes, EncodedEstimate]]:
    """Return the manifest in a directory, the vectors by name, and the encoded estimates by trainer. Raises `StorageError`."""
    recover_replaced_directory(directory)
    saved = _read_state(directory)
    if model_root(saved.leaves, saved.state) != saved.root:
        raise _damaged(directory / STATE)
    layout = layout_of(saved.state.spec)
    vectors = {name: _map(directory / file_name(name), "<f4", layout.size) for name in vector_names(saved.state.spec)}
    if not saved.state.spec.has_estimates:
        return saved, vectors, {}
    trainers, size = _trainers(saved.state), error_feedback.estimate_bytes(layout)
    data = _map(directory / file_name(ESTIMATES), "u1", len(trainers) * size).data
    return saved, vectors, {trainer: data[at * size : (at + 1) * size] for at, trainer in enumerate(trainers)}


def decode_manifest(data: bytes) -> ModelManifest:
    """Return the manifest. Raises `RemoteProtocolError` for malformed bytes."""
    return codec.decode(ModelManifest, data, MODEL_MANIFEST_BYTES_MAX)


def _read_state(directory: Path) -> ModelManifest:
    try:
        return decode_manifest(read_manifest(directory))
    except RemoteProtocolError as error:
        raise StorageError(f"{directory / STATE} cannot be read ({error}): restore a snapshot") from None


def _root_in(directory: Path) -> bytes | None:
    try:
        return _read_state(directory).root
    except StorageError:
        return None


def _map(path: Path, dtype: str, size: int) -> npt.NDArray[Any]:
    """Return the elements of a file as a memory map.

    The map holds a shared lock on the file, by its duplicate of the descriptor.
    """
    try:
        with path.open("rb") as file:
            lock_file(file.fileno(), fcntl.LOCK_SH, path.parent)
            opened, named = os.fstat(file.fileno()), path.stat()
            if opened.st_ino != named.st_ino:
                raise FileNotFoundError(errno.ENOENT, "replaced before it was locked")
            if opened.st_size != np.dtype(dtype).itemsize * size:
                raise _damaged(path)
            return np.asarray(np.memmap(file, dtype, mode="r", shape=(size,))) if size else np.empty(0, dtype)
    except OSError as error:
        raise StorageError(f"{path} cannot be read ({error}): restore a snapshot") from None


def scratch_array(folder: Path, size: int) -> npt.NDArray[np.uint8]:
    """Return an array of `size` bytes.

    A large array is mapped to an unnamed file in `folder`, which is deleted with the array.
    """
    if size < MAPPED_BYTES_MIN:
        return np.empty(size, np.uint8)
    with model_write_errors(folder), tempfile.TemporaryFile(dir=folder) as file:
        file.truncate(size)
        return np.asarray(np.memmap(file, np.uint8, mode="r+", shape=(size,)))


def _damaged(path: Path) -> StorageError:
    return StorageError(f"{path} is damaged: restore a snapshot")


class IncomingModelDirectory:
    """A model that another peer sends in parts of a few leaves. Each part is checked against the model root.

    Implements `ledger.snapshots.snapshot_server.ModelReceiver`. Raises `StorageError` for errors of the disk.
    """

    def __init__(
        self, directory: Path, job: bytes, number: int, root: bytes, manifest: bytes, replaced: Callable[[], object]
    ) -> None:
        """`replaced` is called after the received model has replaced the model in `directory`."""
        saved = decode_manifest(manifest)
        if saved.root != root or model_root(saved.leaves, saved.state) != root:
            raise RemoteProtocolError("bad-part", "the manifest does not match the model root")
        self._saved, self._directory, self._replaced = saved, directory, replaced
        self._pieces = leaf_ranges(saved.state)
        assert (saved.state.job, saved.state.round) == (job, number) and len(saved.leaves) == len(self._pieces)
        self.parts = -(-len(self._pieces) // LEAVES_PER_PART)
        self._folder = directory.with_name(f".{directory.name}.incoming")
        with model_write_errors(self._folder):
            remove_directory(self._folder)
            self._folder.mkdir(parents=True)
            names = part_names(saved.state.spec)
            self._files: dict[str, BinaryIO] = {name: (self._folder / file_name(name)).open("wb") for name in names}

    def add_part(self, index: int, data: bytes) -> None:
        part = slice(index * LEAVES_PER_PART, (index + 1) * LEAVES_PER_PART)
        chosen, expected = self._pieces[part], self._saved.leaves[part]
        ends = [0, *itertools.accumulate(piece.bytes.stop - piece.bytes.start for piece in chosen)]
        if ends[-1] != len(data):
            raise RemoteProtocolError("bad-part", f"the part has {len(data)} bytes, expected {ends[-1]}")
        cut = [data[start:end] for start, end in itertools.pairwise(ends)]
        for piece, found, leaf in zip(chosen, cut, expected, strict=True):
            if model_leaf_hash(found) != leaf:
                raise RemoteProtocolError("bad-part", f"{piece.name} of the model does not match the model root")
        with model_write_errors(self._folder):
            for piece, found in zip(chosen, cut, strict=True):
                self._files[piece.file].seek(piece.bytes.start)
                self._files[piece.file].write(found)

    def install(self) -> None:
        with model_write_errors(self._directory):
            with crash_points("model-fetched"):
                for file in self._files.values():
                    file.flush()
                    os.fsync(file.fileno())
                    file.close()
                write_manifest(self._folder, self._saved, durable=True)
            recover_replaced_directory(self._directory)
            replace_directory(self._folder, self._directory)
        self._replaced()

    def discard_parts(self) -> None:
        for file in self._files.values():
            file.close()
        with model_write_errors(self._folder):
            remove_directory(self._folder)
