"""The buffer that a trainer commits to: levels of eight bits of its m, or with estimates of its momentum.

The levels are a payload of eight bits under the header of the trainer's own payload. Trainers and auditors go on from the
vector that the levels decode to. Rounding errors are lost.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from protocol.errors import RemoteProtocolError
from training.job_spec import JobSpec
from training.replicated import codec
from training.replicated.momentum_estimates import ESTIMATE_BITS
from training.replicated.tensor_layout import Float32Array, layout_of


def buffer_bytes(spec: JobSpec) -> int:
    """Bytes of every buffer; 0 in a job that has none."""
    return codec.payload_bytes(layout_of(spec), ESTIMATE_BITS) if spec.commits_to_buffer else 0


def make_buffer(m: Float32Array, header: codec.PayloadHeader, spec: JobSpec) -> codec.QuantizedUpdate | None:
    """The buffer of `m`; None in a job that carries nothing from round to round. `LocalProtocolError` if m has no levels."""
    if not spec.commits_to_buffer:
        return None
    return codec.quantize_vector(replace(header, bits=ESTIMATE_BITS), m, layout_of(spec))


def read_buffer(path: Path, spec: JobSpec) -> codec.QuantizedUpdate:
    """A committed buffer; `RemoteProtocolError` if the file holds none of this job."""
    if path.stat().st_size != buffer_bytes(spec):
        raise RemoteProtocolError("bad-buffer", f"{path.stat().st_size} bytes where {buffer_bytes(spec)} are right")
    return codec.read_payload(path.read_bytes(), layout_of(spec))  # levels of fewer bits have fewer bytes
