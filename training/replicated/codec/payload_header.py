"""What a payload begins with: the bits of its levels, and the digest of what it is said of (job, round, trainer, model)."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from protocol.errors import RemoteProtocolError
from training.job_spec import BITS, JobSpec

_DOMAIN: Final = b"folkmoot/payload\0"
_ORIGIN: Final = struct.Struct("<32sQ32s32sII")
_STRUCT: Final = struct.Struct("<B32sb")
HEADER_BYTES: Final = _STRUCT.size


@dataclass(frozen=True)
class PayloadHeader:
    """All that a payload is bound to. Who judges it knows all of that, so only a digest of it is sent."""

    job: bytes
    round: int
    trainer: bytes
    base: bytes  # root of the model it was computed on
    local_steps: int
    batch: int
    bits: int  # of one level: 1, 2, 4 or 8

    @classmethod
    def of_spec(cls, spec: JobSpec, job: bytes, round: int, taken: int, trainer: bytes, base: bytes) -> PayloadHeader:
        return cls(job, round, trainer, base, spec.local_steps, spec.batch, spec.payload_bits(taken))

    @cached_property
    def origin(self) -> bytes:
        fields = (self.job, self.round, self.trainer, self.base, self.local_steps, self.batch)
        return hashlib.sha256(_DOMAIN + _ORIGIN.pack(*fields)).digest()


def pack_header(bits: int, origin: bytes, exponent: int) -> bytes:
    return _STRUCT.pack(bits, origin, exponent)


def unpack_header(payload: bytes | memoryview) -> tuple[int, bytes, int]:
    """Bits of a level, origin and exponent that `payload` begins with."""
    if len(payload) < HEADER_BYTES:
        raise malformed_payload(f"{len(payload)} bytes are less than a header")
    bits, origin, exponent = _STRUCT.unpack_from(payload)
    if bits not in BITS:
        raise malformed_payload(f"levels of {bits} bits")
    return bits, origin, exponent


def malformed_payload(detail: str) -> RemoteProtocolError:
    return RemoteProtocolError("malformed", f"payload: {detail}")
