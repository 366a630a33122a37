"""Parameters as a safetensors file with the job, round and model root they belong to: read by every framework, never executed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors import numpy as safetensors

from protocol.errors import RemoteProtocolError, UserError
from storage import durable_files
from storage.regular_files import open_regular
from training.job_spec import JobSpec
from training.replicated.tensor_layout import Float32Array, layout_of

FORMAT = 1
METADATA = "folkmoot"  # the one entry of the file's metadata: JSON


@dataclass(frozen=True, slots=True)
class CheckpointOrigin:
    job: bytes
    round: int  # rounds applied
    model_root: bytes


def write_checkpoint(path: Path, spec: JobSpec, parameters: Float32Array, origin: CheckpointOrigin) -> None:
    """Writes the file whole or not at all. Tensor names and shapes are those of the layout."""
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
    # One metadata entry: the library writes several in random order, and one model must have one file.
    metadata = {METADATA: json.dumps(about)}
    with durable_files.atomic_write(path) as stream:
        stream.write(safetensors.save(tensors, metadata))


def read_checkpoint(path: Path) -> tuple[JobSpec, Float32Array, CheckpointOrigin]:
    """`UserError` naming the file if it is no checkpoint of ours."""
    try:
        open_regular(path).close()  # safetensors would wait for the writer of a pipe
        with safe_open(path, framework="numpy") as file:
            about = json.loads((file.metadata() or {})[METADATA])
            if about["format"] != FORMAT:
                raise ValueError(f"format {about['format']!r}")
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
        why = error.strerror or str(error).removesuffix(f": {path}")  # of safetensors, which says the path once more
        raise UserError(f"cannot read {path}: {why}") from None
    except (SafetensorError, ValueError, KeyError, TypeError, RemoteProtocolError) as error:
        raise UserError(f"{path} is not a checkpoint written by `peer export`: {error}") from None
    return spec, parameters, origin
