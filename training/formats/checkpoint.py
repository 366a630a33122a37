"""Parameters in safetensors files (https://github.com/huggingface/safetensors).

A file has a length, a JSON header with names, types, shapes and offsets, and the numbers. A file is read as a memory map: nothing
in it is executed, and no tensor is copied as a whole.

Tensors are written one after another, so that a model need not fit into memory twice. The file has the same bytes as a file that
the library itself writes for the same tensors, so each model has exactly one file.

A checkpoint is such a file with the job, round and model root of its parameters.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors import numpy as safetensors

from protocol.errors import RemoteProtocolError, UserError
from storage import durable_files
from storage.regular_files import open_regular, read_regular
from training.job_spec import JobSpec
from training.replicated.tensor_layout import BLOCK, Float32Array, Shape, float32_bytes, layout_of

FORMAT = 1
METADATA = "folkmoot"  # name of the only entry of the file's metadata; the entry is JSON
SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
HEADER_BYTES_MAX: Final = 100_000_000  # bytes of a header that the format allows
INDEX_BYTES_MAX: Final = 16 << 20  # bytes of an index: the names of a hundred thousand tensors
PICKLES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl")  # endings of formats that execute code when they are opened
LFS_POINTER: Final = b"version https://git-lfs"
METADATA_KEY: Final = "__metadata__"
WRITTEN_METADATA: Final = {"format": "pt"}  # metadata that `transformers` writes and requires
WRITTEN_TYPES: Final = {np.dtype("<f4"): "F32", np.dtype(np.uint8): "U8"}
ALIGNMENT: Final = 8


@dataclass(frozen=True, slots=True)
class CheckpointOrigin:
    job: bytes
    round: int  # number of rounds that were applied to the model
    model_root: bytes


def write_checkpoint(path: Path, spec: JobSpec, parameters: Float32Array, origin: CheckpointOrigin) -> None:
    """Write a checkpoint, completely or not at all. Tensor names and shapes are those of the layout."""
    tensors = {
        name: np.ascontiguousarray(tensor) for name, tensor in layout_of(spec).tensor_views(np.asarray(parameters)).items()
    }
    about = {
        "format": FORMAT,
        "job": origin.job.hex(),
        "round": origin.round,
        "model_root": origin.model_root.hex(),
        "spec": spec.encode().hex(),
    }
    with durable_files.atomic_write(path) as stream:
        # The file has only one metadata entry: the library writes several entries in random order, and a model must have exactly
        # one file.
        stream.write(safetensors.save(tensors, {METADATA: json.dumps(about)}))


def read_checkpoint(path: Path) -> tuple[JobSpec, Float32Array, CheckpointOrigin]:
    """Read a checkpoint. Raises `UserError`, which names the file, if it is not a checkpoint of ours."""
    try:
        open_regular(path).close()  # Raises for a pipe, at which the library safetensors would block.
        with safe_open(path, framework="numpy") as file:
            about = json.loads((file.metadata() or {})[METADATA])
            if about["format"] != FORMAT:
                raise ValueError(f"its format is {about['format']!r}, expected {FORMAT!r}")
            spec = JobSpec.decode(bytes.fromhex(about["spec"]))
            layout = layout_of(spec)
            parameters = np.empty(layout.size, dtype=np.float32)
            if sorted(file.keys()) != sorted(tensor.name for tensor in layout.tensors):
                raise ValueError("its tensors are not those of its specification")
            for tensor in layout.tensors:
                values = file.get_tensor(tensor.name)
                if values.dtype != np.float32 or values.shape != tensor.shape:
                    raise ValueError(f"{tensor.name} is {values.dtype} {values.shape}, expected float32 {tensor.shape}")
                parameters[tensor.elements] = values.reshape(-1)
            origin = CheckpointOrigin(bytes.fromhex(about["job"]), int(about["round"]), bytes.fromhex(about["model_root"]))
    except OSError as error:
        why = error.strerror or str(error).removesuffix(f": {path}")  # Errors of safetensors end with the path.
        raise UserError(f"cannot read {path}: {why}") from None
    except (SafetensorError, ValueError, KeyError, TypeError, RemoteProtocolError) as error:
        raise UserError(f"{path} is not a checkpoint written by `peer export`: {_problem_of(error)}") from None
    return spec, parameters, origin


# Files of other programs -------------------------------------------------------------------------------------------

# For each type in the header: numpy's type of the stored numbers, and the exact conversion to float32.
TYPES: Final[dict[str, tuple[str, Callable[[npt.NDArray[Any]], Float32Array]]]] = {
    "F32": ("<f4", lambda values: values),
    "F16": ("<f2", lambda values: values.astype("<f4")),
    # BF16 is the upper half of a float32.
    "BF16": ("<u2", lambda values: (values.astype("<u4") << 16).view("<f4")),
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a safetensors file: its type, its shape and its place in the file."""

    path: Path
    type: str
    shape: Shape
    start: int  # offset of the first number in the file, in bytes

    def iter_blocks(self) -> Iterator[Float32Array]:
        """Yield all elements in order, in arrays of at most `BLOCK` elements."""
        kind, as_float32 = TYPES[self.type]
        size = math.prod(self.shape)
        mapped = np.memmap(self.path, kind, "r", self.start, (size,))
        for start in range(0, size, BLOCK):
            yield as_float32(np.asarray(mapped[start : start + BLOCK]))


def tensor_file_paths(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder, and the index file if there is one. Raises `UserError`."""
    if (folder / INDEX).is_file():
        shards = [folder / name for name in sorted(set(_index(folder).values()))]
        missing = [path for path in shards if not path.exists()]
        if missing:
            listed = f"{len(missing)} of {len(shards)} files that {INDEX} lists are missing"
            raise UserError(f"{missing[0]} is missing ({listed}): download the model again")
        return [folder / INDEX, *shards]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    if pickled:
        runs = f"{folder / pickled[0]} is a pickle, which can run code when it is opened"
        raise UserError(f"{runs}: save the model as safetensors (`save_pretrained` of transformers does)")
    raise UserError(f"{folder} has neither {SINGLE} nor {INDEX}")


def read_tensor_index(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a folder by name. Raises `UserError`, which names the file, for a damaged file or index."""
    found: dict[str, StoredTensor] = {}
    for path in tensor_file_paths(folder):
        if path.name == INDEX:
            continue
        for name, stored in _header(path).items():
            if name in found:
                raise UserError(f"{path}: tensor {name!r} is also in {found[name].path.name}")
            found[name] = stored
    if (folder / INDEX).is_file():
        for name, file in _index(folder).items():
            if name not in found or found[name].path.name != file:
                raise UserError(f"{folder / INDEX}: tensor {name!r} is not in {file}")
    return found


def _index(folder: Path) -> dict[str, str]:
    path = folder / INDEX
    try:
        if path.stat().st_size > INDEX_BYTES_MAX:
            raise ValueError(f"it has more than {INDEX_BYTES_MAX} bytes")
        files = json.loads(read_regular(path))["weight_map"]
        named = {str(name): str(file) for name, file in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} is not an index of safetensors files: {_problem_of(error)}") from None
    for file in named.values():
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise UserError(f"{path} names {file!r}, which is not a safetensors file in this folder")
    return named


def _header(path: Path) -> dict[str, StoredTensor]:
    with open_regular(path) as stream:
        size = path.stat().st_size
        require_downloaded(path, stream.read(len(LFS_POINTER)))
        stream.seek(0)
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= min(HEADER_BYTES_MAX, size - 8):
            raise UserError(f"{path} is damaged: its header cannot have {length} bytes")
        text = stream.read(length)
    try:
        listed = json.loads(text, object_pairs_hook=_without_repeats)
        entries = {str(name): _entry(of) for name, of in listed.items() if name != METADATA_KEY}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} is damaged: its header cannot be read ({_problem_of(error)[:100]})") from None
    at = 0
    for name, (kind, shape, start, end) in sorted(entries.items(), key=lambda item: item[1][2:]):
        if kind not in TYPES:
            raise UserError(f"{path}: tensor {name!r} has type {kind}: only {', '.join(TYPES)} are supported")
        if start != at or end - start != np.dtype(TYPES[kind][0]).itemsize * math.prod(shape):
            raise UserError(f"{path} is damaged: tensor {name!r} does not begin at the end of the previous one, or is cut short")
        at = end
    if 8 + length + at != size:
        raise UserError(f"{path} is damaged: it has {size} bytes, but its header describes {8 + length + at}")
    return {name: StoredTensor(path, kind, shape, 8 + length + start) for name, (kind, shape, start, _) in entries.items()}


def require_downloaded(path: Path, beginning: bytes) -> None:
    """Raise `UserError` for the pointer that Git LFS stores instead of a large file."""
    if beginning.startswith(LFS_POINTER):
        raise UserError(f"{path} is a Git LFS pointer, not the file: run `git lfs pull` there, or download the file")


def _entry(of: Any) -> tuple[str, Shape, int, int]:
    start, end = _counts(of["data_offsets"], 2)
    return str(of["dtype"]), tuple(_counts(of["shape"])), start, end


def _problem_of(error: Exception) -> str:
    return f"the field {error} is missing" if isinstance(error, KeyError) else str(error)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _counts(values: Any, length: int | None = None) -> list[int]:
    if not isinstance(values, list) or (length is not None and len(values) != length):
        raise ValueError(f"{str(values)[:40]} is not a list of counts")
    if not all(type(value) is int and 0 <= value < 2**48 for value in values):
        raise ValueError(f"{str(values)[:40]} has a value that is not a count")
    return values


def write_safetensors(stream: BinaryIO, tensors: Iterable[tuple[str, Float32Array]]) -> None:
    """Write a safetensors file with the tensors as little-endian float32, in the order of their names."""
    for piece in iter_safetensors(tensors, WRITTEN_METADATA):
        stream.write(piece)


def iter_safetensors(
    tensors: Iterable[tuple[str, npt.NDArray[Any]]], metadata: Mapping[str, str]
) -> Iterator[bytes | memoryview]:
    """Yield the parts of a safetensors file with tensors of float32 or uint8, in the order of their names."""
    ordered = sorted(tensors, key=lambda item: item[0])
    yield safetensors_header(((name, values.dtype, values.shape) for name, values in ordered), metadata)[0]
    for _, values in ordered:
        yield float32_bytes(values) if values.dtype == np.float32 else values.tobytes()


def safetensors_header(
    tensors: Iterable[tuple[str, npt.DTypeLike, Shape]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int]]:
    """Return the beginning of a file with tensors of these names, types and shapes, and the offset of each tensor in the file."""
    header: dict[str, object] = {METADATA_KEY: metadata}
    offset, places = 0, dict[str, int]()
    for name, kind, shape in sorted(tensors, key=lambda item: item[0]):
        size = np.dtype(kind).itemsize * math.prod(shape)
        header[name] = {"dtype": WRITTEN_TYPES[np.dtype(kind)], "shape": list(shape), "data_offsets": [offset, offset + size]}
        places[name], offset = offset, offset + size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    beginning = len(text).to_bytes(8, "little") + text
    return beginning, {name: len(beginning) + place for name, place in places.items()}
