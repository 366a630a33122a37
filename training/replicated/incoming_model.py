"""A model that arrives in parts: pieces of its files, a few together, each checked with its leaf under the model root."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, Final

from protocol.errors import RemoteProtocolError, StorageError
from protocol.limits import SNAPSHOT_PART_BYTES_MAX
from storage.crash_points import crash_points
from training.replicated import model_directory, model_files
from training.replicated.model_directory import PIECE_BYTES, model_leaf_hash, model_root
from training.replicated.replicated_model import ReplicatedModel

LEAVES_PER_PART: Final = SNAPSHOT_PART_BYTES_MAX // PIECE_BYTES

assert LEAVES_PER_PART >= 1


def read_model_part(model: ReplicatedModel, index: int) -> bytes:
    """`StorageError` if the disk holds something else than the root says; `RemoteProtocolError` if there is no such part."""
    part = slice(index * LEAVES_PER_PART, (index + 1) * LEAVES_PER_PART)
    chosen = model.leaf_ranges[part]
    if not chosen:
        raise RemoteProtocolError("bad-request", f"the model has no part {index}")
    data = [bytes(model.leaf_bytes(piece)) for piece in chosen]
    for piece, found, leaf in zip(chosen, data, model.leaves[part], strict=True):
        if model_leaf_hash(found) != leaf:
            raise StorageError(f"{piece.name} of the model does not hash to its model root: restore a snapshot")
    return b"".join(data)


class IncomingModelDirectory:
    """Implements `ledger.snapshots.snapshot_server.ModelReceiver`. Raises `StorageError` for what the disk does wrong."""

    def __init__(
        self, directory: Path, job: bytes, number: int, root: bytes, manifest: bytes, replaced: Callable[[], object]
    ) -> None:
        """`replaced` is called once another model stands in `directory` than before."""
        saved = model_directory.decode_manifest(manifest)
        if saved.root != root or model_root(saved.leaves, saved.state) != root:
            raise RemoteProtocolError("bad-part", "another manifest than the one under the model root")
        self._saved, self._directory, self._replaced = saved, directory, replaced
        self._pieces = model_directory.leaf_ranges(saved.state)
        assert (saved.state.job, saved.state.round) == (job, number) and len(saved.leaves) == len(self._pieces)
        self.parts = -(-len(self._pieces) // LEAVES_PER_PART)
        self._folder = directory.with_name(f".{directory.name}.incoming")
        with model_files.model_write_errors(self._folder):
            model_files.remove_directory(self._folder)
            self._folder.mkdir(parents=True)
            names = model_directory.part_names(saved.state.spec)
            self._files: dict[str, BinaryIO] = {
                name: (self._folder / model_directory.file_name(name)).open("wb") for name in names
            }

    def add_part(self, index: int, data: bytes) -> None:
        part = slice(index * LEAVES_PER_PART, (index + 1) * LEAVES_PER_PART)
        chosen, expected = self._pieces[part], self._saved.leaves[part]
        ends = [0, *itertools.accumulate(piece.bytes.stop - piece.bytes.start for piece in chosen)]
        if ends[-1] != len(data):
            raise RemoteProtocolError("bad-part", f"{len(data)} bytes of a model, expected {ends[-1]}")
        cut = [data[start:end] for start, end in pairwise(ends)]
        for piece, found, leaf in zip(chosen, cut, expected, strict=True):
            if model_leaf_hash(found) != leaf:
                raise RemoteProtocolError("bad-part", f"{piece.name} of the model is not what the model root says")
        with model_files.model_write_errors(self._folder):
            for piece, found in zip(chosen, cut, strict=True):
                self._files[piece.file].seek(piece.bytes.start)
                self._files[piece.file].write(found)

    def install(self) -> None:
        with model_files.model_write_errors(self._directory):
            with crash_points("model-fetched"):
                for file in self._files.values():
                    file.flush()
                    os.fsync(file.fileno())
                    file.close()
                model_directory.write_manifest(self._folder, self._saved, durable=True)
            model_files.recover_replaced_directory(self._directory)
            model_files.replace_directory(self._folder, self._directory)
        self._replaced()

    def discard_parts(self) -> None:
        for file in self._files.values():
            file.close()
        with model_files.model_write_errors(self._folder):
            model_files.remove_directory(self._folder)
