"""A model on disk: a directory of one file of little-endian float32 for every vector (`parameters.f32`, and one for each slot of
the outer optimizer), of one with all trainers' estimates where the job has any, and `state.msgpack`.

It is written beside its final name, made durable and then renamed, so that a name never stands for half a model. Most models of
a job are not made durable (`docs/decisions/0030`): while the machine runs they are as good as others, and if it stops they are
computed anew from the last one that was. An empty file, `durable`, tells them apart.

Such a model that nobody needs any more is not deleted but set aside, and the next one is written over it: the kernel takes many
times longer to find pages for a new file than to fill those that are there. Whoever maps a file holds a shared lock on it for as
long, and what is locked is not written over.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

from protocol import codec
from protocol.codec import Digest, Length
from protocol.errors import RemoteProtocolError, StorageError
from protocol.limits import MEMBERS_MAX, MODEL_MANIFEST_BYTES_MAX, TRAINERS_MAX
from storage.crash_points import crash_points
from storage.durable_files import lock_file, make_directory, sync_directory
from training.replicated import estimates
from training.replicated.layout import BLOCKS_MAX, Float32Array, float32_bytes, layout_of
from training.replicated.outer import slots_of
from training.replicated.state import ESTIMATES, PARAMETERS, PIECE_BYTES, Encoded, Piece, State, pieces_of, root_of
from training.spec import ESTIMATES_BYTES_MAX, JobSpec

STATE: Final = "state.msgpack"
DURABLE: Final = "durable"
MAPPED_BYTES_MIN: Final = 16 << 20  # what is smaller is kept in memory
VECTORS_MAX: Final = 3  # parameters and the two moments of AdamW
# estimates have scales, too
LEAVES_MAX: Final = VECTORS_MAX * BLOCKS_MAX + TRAINERS_MAX + 2 * (ESTIMATES_BYTES_MAX // PIECE_BYTES)
RECORD_BYTES: Final = 256  # of a trainer in the state, at most

assert 34 * LEAVES_MAX + RECORD_BYTES * MEMBERS_MAX < MODEL_MANIFEST_BYTES_MAX


@dataclass(frozen=True, slots=True)
class Saved:
    """What `state.msgpack` holds: all but the vectors, and their hashes."""

    state: State
    leaves: Annotated[tuple[Digest, ...], Length(1, LEAVES_MAX)]
    root: Digest


def vectors_of(spec: JobSpec) -> tuple[str, ...]:
    """Names of a model's vectors, in the order of its leaves."""
    return (PARAMETERS, *slots_of(spec))


def parts_of(spec: JobSpec) -> tuple[str, ...]:
    """Names of what has a file of its own: the vectors, and the estimates of a job that has any."""
    return (*vectors_of(spec), *((ESTIMATES,) if spec.has_estimates else ()))


def pieces_in(state: State) -> tuple[Piece, ...]:
    """All that has a leaf, in their order; the state's own comes after them."""
    return _pieces(state.spec, _trainers(state))


@functools.lru_cache(maxsize=2)
def _pieces(spec: JobSpec, trainers: tuple[bytes, ...]) -> tuple[Piece, ...]:
    return tuple(pieces_of(layout_of(spec), vectors_of(spec), trainers))


def _trainers(state: State) -> tuple[bytes, ...]:
    """Those that have estimates, in the order of these."""
    return tuple(sorted(state.records)) if state.spec.has_estimates else ()


def sizes_of(state: State) -> dict[str, int]:
    """Bytes of every part."""
    layout = layout_of(state.spec)
    sizes = dict.fromkeys(vectors_of(state.spec), 4 * layout.size)
    return sizes | ({ESTIMATES: len(state.records) * estimates.size(layout)} if state.spec.has_estimates else {})


def file_of(part: str) -> str:
    return f"{part}.payloads" if part == ESTIMATES else f"{part}.f32"


class Fresh:
    """A model that is being written beside its final name. Within `explained`; what was there is there until `install`."""

    def __init__(self, directory: Path, parts: Sequence[str]) -> None:
        finish_exchange(directory)
        self._directory, self._folder = directory, directory.with_name(f".{directory.name}.fresh")
        remove(self._folder)
        make_directory(directory.parent)
        try:
            _spare(directory).rename(self._folder)
        except FileNotFoundError:
            self._folder.mkdir()
        with ExitStack() as opened:
            self._files = {name: opened.enter_context(_open_over(self._folder / file_of(name))) for name in parts}
            self._opened = opened.pop_all()

    def __enter__(self) -> Fresh:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def write(self, part: str, start: int, data: Float32Array | Encoded) -> None:
        """`data` stands `start` bytes behind the beginning of the part's file. Any thread may write any bytes in any order."""
        left = float32_bytes(data) if isinstance(data, np.ndarray) else memoryview(data)
        while left:
            written = os.pwrite(self._files[part].fileno(), left, start)
            left, start = left[written:], start + written

    def write_estimates(self, held: Mapping[bytes, Encoded]) -> None:
        for number, trainer in enumerate(sorted(held)):
            self.write(ESTIMATES, number * len(held[trainer]), held[trainer])

    def install(self, saved: Saved, durable: bool) -> None:
        """It gets its name, and if it is to be `durable`, is so once this returns."""
        if self._directory.exists() and _root_in(self._directory) == saved.root and (is_durable(self._directory) or not durable):
            remove(self._folder)
            return
        with crash_points("model-write"):
            for part, size in sizes_of(saved.state).items():
                file = self._files[part]
                file.truncate(size)
                if durable:
                    os.fsync(file.fileno())
            finish(self._folder, saved, durable)
        exchange(self._folder, self._directory, durable)


def finish(folder: Path, saved: Saved, durable: bool) -> None:
    """What a model has beside its vectors."""
    data = codec.encode(saved)
    if durable:
        write_file(folder / STATE, memoryview(data))
        (folder / DURABLE).touch()
        sync_directory(folder)
    else:
        (folder / STATE).write_bytes(data)


def is_durable(directory: Path) -> bool:
    return (directory / DURABLE).exists()


def write(
    directory: Path, saved: Saved, vectors: Mapping[str, Float32Array], held: Mapping[bytes, Encoded], durable: bool = True
) -> None:
    """Raises `StorageError` if the disk is full or refuses; what was there is still there then."""
    with explained(directory), Fresh(directory, parts_of(saved.state.spec)) as fresh:
        for name, vector in vectors.items():
            fresh.write(name, 0, vector)
        fresh.write_estimates(held)
        fresh.install(saved, durable)


@contextmanager
def explained(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot write {directory}: {error.strerror}; free some space and start again") from error


def read(directory: Path) -> tuple[Saved, dict[str, Float32Array], dict[bytes, Encoded]]:
    """With the vectors, and the encoded estimates by trainer."""
    finish_exchange(directory)
    saved = _read_state(directory)
    if root_of(saved.leaves, saved.state) != saved.root:
        raise _damaged(directory / STATE)
    layout = layout_of(saved.state.spec)
    vectors = {name: _map(directory / file_of(name), "<f4", layout.size) for name in vectors_of(saved.state.spec)}
    if not saved.state.spec.has_estimates:
        return saved, vectors, {}
    trainers, size = _trainers(saved.state), estimates.size(layout)
    data = _map(directory / file_of(ESTIMATES), "u1", len(trainers) * size).data
    return saved, vectors, {trainer: data[at * size : (at + 1) * size] for at, trainer in enumerate(trainers)}


def read_manifest(directory: Path) -> bytes:
    """What all the parts of a model can be checked with: an encoded `Saved`."""
    try:
        return (directory / STATE).read_bytes()
    except OSError as error:
        raise StorageError(f"{directory / STATE} cannot be read ({error}): restore a snapshot") from None


def decode_manifest(data: bytes) -> Saved:
    """`RemoteProtocolError` for every other byte string."""
    return codec.decode(Saved, data, MODEL_MANIFEST_BYTES_MAX)


def _read_state(directory: Path) -> Saved:
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
    """The file's elements. It stays locked while they are mapped, since the map has a duplicate of its descriptor."""
    try:
        with path.open("rb") as file:
            lock_file(file.fileno(), fcntl.LOCK_SH, path.parent)
            opened, named = os.fstat(file.fileno()), path.stat()
            if opened.st_ino != named.st_ino:
                raise FileNotFoundError(errno.ENOENT, "written over before it was locked")
            if opened.st_size != np.dtype(dtype).itemsize * size:
                raise _damaged(path)
            return np.asarray(np.memmap(file, dtype, mode="r", shape=(size,))) if size else np.empty(0, dtype)
    except OSError as error:
        raise StorageError(f"{path} cannot be read ({error}): restore a snapshot") from None


def room(folder: Path, size: int) -> npt.NDArray[np.uint8]:
    """An array of so many bytes; a large one is mapped to a file in `folder` that has no name and goes with the array."""
    if size < MAPPED_BYTES_MIN:
        return np.empty(size, np.uint8)
    with explained(folder), tempfile.TemporaryFile(dir=folder) as file:
        file.truncate(size)
        return np.asarray(np.memmap(file, np.uint8, mode="r+", shape=(size,)))


def _damaged(path: Path) -> StorageError:
    return StorageError(f"{path} is damaged: restore a snapshot")


# Durability ----------------------------------------------------------------------------------------------------------


def exchange(fresh: Path, directory: Path, durable: bool = True) -> None:
    """`fresh` becomes `directory`; what was there moves aside first, since a rename cannot replace a full directory."""
    aside = _aside(directory)
    if directory.exists():
        with crash_points("model-aside"):
            directory.rename(aside)
    with crash_points("model-name"):
        fresh.rename(directory)
        if durable:
            sync_directory(directory.parent)
    with crash_points("model-remove"):
        remove(aside)


def finish_exchange(directory: Path) -> None:
    """After a crash between the two renames the old model stands aside: it comes back."""
    aside = _aside(directory)
    if not aside.exists():
        return
    if directory.exists():
        remove(aside)
    else:
        aside.rename(directory)
        sync_directory(directory.parent)


def _aside(directory: Path) -> Path:
    return directory.with_name(f".{directory.name}.aside")


def retire(directory: Path) -> None:
    """Nobody needs this model any more: the next one of the job is written over it. Durable ones are deleted, which leaves no
    doubt of what is durable, and so is all but one."""
    try:
        if is_durable(directory) or directory.name.startswith("."):
            raise FileExistsError
        directory.rename(_spare(directory))
    except OSError:
        shutil.rmtree(directory, ignore_errors=True)


def remove_spare(directory: Path) -> None:
    """No model follows this one."""
    shutil.rmtree(_spare(directory), ignore_errors=True)


def _spare(directory: Path) -> Path:
    return directory.with_name(".spare")


def _open_over(path: Path) -> BinaryIO:
    """To write what is at `path` anew, in place if it is there and nobody maps it."""
    try:
        file = path.open("r+b")
    except FileNotFoundError:
        return path.open("wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        path.unlink()
        return path.open("wb")
    return file


def remove(directory: Path) -> None:
    if directory.exists():
        shutil.rmtree(directory)


def write_file(path: Path, data: memoryview) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
