"""A model on disk: a directory of `parameters.f32`, `momentum.f32` (little-endian float32) and `state.msgpack`.

It is written beside its final name, made durable and then renamed, so that a name never stands for half a model.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import numpy as np

from ledger.crash_points import crash_points
from ledger.durable import make_directory, sync_directory
from protocol import codec
from protocol.codec import Digest, Length
from protocol.errors import RemoteProtocolError, StorageError
from training.replicated.layout import CHUNKS_MAX, Float32Array, layout_of
from training.replicated.state import State, root_of

PARAMETERS: Final = "parameters.f32"
MOMENTUM: Final = "momentum.f32"
STATE: Final = "state.msgpack"


@dataclass(frozen=True, slots=True)
class Saved:
    """What `state.msgpack` holds: all but the tensors, and their hashes."""

    state: State
    leaves: Annotated[tuple[Digest, ...], Length(1, 2 * CHUNKS_MAX)]
    root: Digest


def write(directory: Path, saved: Saved, parameters: Float32Array, momentum: Float32Array) -> None:
    """Durable once it returns. Raises `StorageError` if the disk is full or refuses; what was there is still there then."""
    with explained(directory):
        finish_exchange(directory)
        if directory.exists() and _root_in(directory) == saved.root:
            return
        fresh = directory.with_name(f".{directory.name}.fresh")
        remove(fresh)
        make_directory(fresh)
        with crash_points("model-write"):
            write_file(fresh / PARAMETERS, np.ascontiguousarray(parameters, dtype="<f4").data)
            write_file(fresh / MOMENTUM, np.ascontiguousarray(momentum, dtype="<f4").data)
            write_file(fresh / STATE, memoryview(codec.encode(saved)))
            sync_directory(fresh)
        exchange(fresh, directory)


@contextmanager
def explained(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot write {directory}: {error.strerror}; free some space and start again") from error


def read(directory: Path) -> tuple[Saved, Float32Array, Float32Array]:
    finish_exchange(directory)
    saved = _read_state(directory)
    if root_of(saved.leaves, saved.state) != saved.root:
        raise _damaged(directory / STATE)
    size = layout_of(saved.state.spec).size
    return saved, _map(directory / PARAMETERS, size), _map(directory / MOMENTUM, size)


def read_manifest(directory: Path) -> bytes:
    """What all the parts of a model can be checked with: an encoded `Saved`."""
    try:
        return (directory / STATE).read_bytes()
    except OSError as error:
        raise StorageError(f"{directory / STATE} cannot be read ({error}): restore a snapshot") from None


def _read_state(directory: Path) -> Saved:
    try:
        return codec.decode(Saved, read_manifest(directory))
    except RemoteProtocolError as error:
        raise StorageError(f"{directory / STATE} cannot be read ({error}): restore a snapshot") from None


def _root_in(directory: Path) -> bytes | None:
    try:
        return _read_state(directory).root
    except StorageError:
        return None


def _map(path: Path, size: int) -> Float32Array:
    try:
        if path.stat().st_size != 4 * size:
            raise _damaged(path)
        return np.asarray(np.memmap(path, dtype="<f4", mode="r", shape=(size,)))
    except OSError as error:
        raise StorageError(f"{path} cannot be read ({error}): restore a snapshot") from None


def _damaged(path: Path) -> StorageError:
    return StorageError(f"{path} is damaged: restore a snapshot")


# Durability ----------------------------------------------------------------------------------------------------------


def exchange(fresh: Path, directory: Path) -> None:
    """`fresh` becomes `directory`; what was there moves aside first, since a rename cannot replace a full directory."""
    aside = _aside(directory)
    if directory.exists():
        with crash_points("model-aside"):
            directory.rename(aside)
    with crash_points("model-name"):
        fresh.rename(directory)
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


def remove(directory: Path) -> None:
    if directory.exists():
        shutil.rmtree(directory)


def write_file(path: Path, data: memoryview) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
