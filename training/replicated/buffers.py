"""The buffer that a trainer commits to: levels of eight bits of its m, or with estimates of its momentum.

The levels are a dense payload of eight bits under the header of the trainer's own payload. Trainers and auditors go on from the
vector that the levels decode to. Rounding errors are lost.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from protocol.errors import RemoteProtocolError
from training.replicated import codec
from training.replicated.estimates import MODE
from training.replicated.layout import Float32Array, layout_of
from training.spec import JobSpec


def size(spec: JobSpec) -> int:
    """Bytes of every buffer; 0 in a job that has none."""
    return codec.payload_bytes_max(layout_of(spec), MODE) if spec.commits_to_buffer else 0


def of(m: Float32Array, header: codec.Header, spec: JobSpec) -> codec.Update | None:
    """The buffer of `m`; None in a job that carries nothing from round to round. `LocalProtocolError` if m has no levels."""
    if not spec.commits_to_buffer:
        return None
    return codec.quantize(replace(header, mode=MODE), m, layout_of(spec))


def read(path: Path, spec: JobSpec) -> codec.Update:
    """A committed buffer; `RemoteProtocolError` if the file holds none of this job."""
    if path.stat().st_size != size(spec):
        raise RemoteProtocolError("bad-buffer", f"{path.stat().st_size} bytes where {size(spec)} are right")
    buffer = codec.read(path.read_bytes(), layout_of(spec))
    if buffer.mode != MODE:
        raise RemoteProtocolError("bad-buffer", f"a {buffer.mode.compression.value} payload of {buffer.mode.bits} bits")
    return buffer
