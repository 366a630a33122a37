"""What a trainer commits to of its m, as bytes: float32 values; or, in a job with lean audits, levels of eight bits.

Levels are a dense payload of eight bits, under the header of the trainer's own payload but for the mode. A trainer goes on from
the m that they say, as auditors do, and no longer knows what rounding has left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from protocol.errors import RemoteProtocolError
from training.replicated import codec
from training.replicated.estimates import MODE
from training.replicated.layout import Float32Array, float32_bytes, layout_of
from training.spec import JobSpec


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    m: Float32Array
    said: codec.Update | None = None  # the levels that m was read from

    def encode(self) -> bytes | memoryview:
        return float32_bytes(self.m) if self.said is None else self.said.encode()


def size(spec: JobSpec) -> int:
    """Bytes of every buffer; 0 in a job that has none."""
    if not spec.commits_to_buffer:
        return 0
    layout = layout_of(spec)
    return codec.payload_bytes_max(layout, MODE) if spec.lean_audits else 4 * layout.size


def of(m: Float32Array, header: codec.Header, spec: JobSpec) -> Buffer | None:
    """What the trainer of that header commits to; None in a job that carries nothing from round to round.

    Raise `LocalProtocolError` if m has no levels.
    """
    if not spec.commits_to_buffer:
        return None
    if not spec.lean_audits:
        return Buffer(m)
    return _said(codec.encode(replace(header, mode=MODE), m, layout_of(spec)), spec)


def read(path: Path, spec: JobSpec) -> Buffer:
    """A committed one; `RemoteProtocolError` if it is none of this job's."""
    if path.stat().st_size != size(spec):
        raise RemoteProtocolError("bad-buffer", f"{path.stat().st_size} bytes where {size(spec)} are right")
    if not spec.lean_audits:
        return Buffer(np.fromfile(path, dtype="<f4").astype(np.float32, copy=False))
    return _said(path.read_bytes(), spec)


def _said(encoded: bytes, spec: JobSpec) -> Buffer:
    said = codec.read(encoded, layout_of(spec))
    if said.mode != MODE:
        raise RemoteProtocolError("bad-buffer", f"a {said.mode.compression.value} payload of {said.mode.bits} bits")
    return Buffer(said.dense(), said)
