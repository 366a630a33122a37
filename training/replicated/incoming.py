"""A model that arrives in parts: the blocks of its vectors, a few together, each checked with its leaf under the model root."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, Final

from protocol import codec
from protocol.errors import RemoteProtocolError, StorageError
from protocol.limits import PART_BYTES_MAX
from storage.crash_points import crash_points
from training.replicated import files
from training.replicated.layout import BLOCK, Block, float32_bytes, layout_of
from training.replicated.model import ReplicatedModel
from training.replicated.state import leaf_name, leaf_of, root_of

LEAVES_PER_PART: Final = PART_BYTES_MAX // (4 * BLOCK)

assert LEAVES_PER_PART >= 1


def part_of(model: ReplicatedModel, index: int) -> bytes:
    """`StorageError` if the disk holds something else than the root says; `RemoteProtocolError` if there is no such part."""
    blocks = [(name, block) for name in model.vectors for block in model.layout.blocks]
    chosen = blocks[index * LEAVES_PER_PART : (index + 1) * LEAVES_PER_PART]
    if not chosen:
        raise RemoteProtocolError("bad-request", f"the model has no part {index}")
    data = [bytes(float32_bytes(model.vectors[name][block.elements])) for name, block in chosen]
    expected = model.leaves[index * LEAVES_PER_PART :]
    for (name, block), piece, leaf in zip(chosen, data, expected, strict=False):
        if leaf_of(piece) != leaf:
            raise StorageError(f"{leaf_name(name, block)} of the model does not hash to its model root: restore a snapshot")
    return b"".join(data)


class IncomingModel:
    """Implements `ledger.snapshots.snapshot.IncomingModel`. Raises `StorageError` for what the disk does wrong."""

    def __init__(
        self, directory: Path, job: bytes, number: int, root: bytes, manifest: bytes, replaced: Callable[[], object]
    ) -> None:
        """`replaced` is called once another model stands in `directory` than before."""
        saved = codec.decode(files.Saved, manifest)
        if saved.root != root or root_of(saved.leaves, saved.state) != root:
            raise RemoteProtocolError("bad-part", "another manifest than the one under the model root")
        self._saved, self._directory, self._replaced = saved, directory, replaced
        layout = layout_of(saved.state.spec)
        vectors = files.vectors_of(saved.state.spec)
        assert (saved.state.job, saved.state.round) == (job, number) and len(saved.leaves) == len(vectors) * len(layout.blocks)
        self._blocks = [(name, block) for name in vectors for block in layout.blocks]
        self.parts = -(-len(self._blocks) // LEAVES_PER_PART)
        self._folder = directory.with_name(f".{directory.name}.incoming")
        with files.explained(self._folder):
            files.remove(self._folder)
            self._folder.mkdir(parents=True)
            self._files: dict[str, BinaryIO] = {name: (self._folder / files.file_of(name)).open("wb") for name in vectors}

    def put(self, index: int, data: bytes) -> None:
        chosen = self._blocks[index * LEAVES_PER_PART : (index + 1) * LEAVES_PER_PART]
        pieces = self._cut(data, [block for _, block in chosen])
        expected = self._saved.leaves[index * LEAVES_PER_PART :]
        for (name, block), piece, leaf in zip(chosen, pieces, expected, strict=False):
            if leaf_of(piece) != leaf:
                raise RemoteProtocolError("bad-part", f"{leaf_name(name, block)} of the model is not what the model root says")
        with files.explained(self._folder):
            for (name, block), piece in zip(chosen, pieces, strict=True):
                self._files[name].seek(4 * block.elements.start)
                self._files[name].write(piece)

    def _cut(self, data: bytes, blocks: list[Block]) -> list[bytes]:
        ends = [0]
        for block in blocks:
            ends.append(ends[-1] + 4 * block.size)
        if ends[-1] != len(data):
            raise RemoteProtocolError("bad-part", f"{len(data)} bytes of a model, expected {ends[-1]}")
        return [data[start:end] for start, end in pairwise(ends)]

    def install(self) -> None:
        with files.explained(self._directory):
            with crash_points("model-fetched"):
                for file in self._files.values():
                    file.flush()
                    os.fsync(file.fileno())
                    file.close()
                files.finish(self._folder, self._saved, durable=True)
            files.finish_exchange(self._directory)
            files.exchange(self._folder, self._directory)
        self._replaced()

    def abandon(self) -> None:
        for file in self._files.values():
            file.close()
        with files.explained(self._folder):
            files.remove(self._folder)
