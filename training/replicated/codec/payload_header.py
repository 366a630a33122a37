"""What a payload begins with: its mode, and the digest of what it is said of (job, round, trainer, model)."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from protocol.errors import RemoteProtocolError
from training.job_spec import BITS, KEEP_MAX, KEEP_MIN, OPENING_BITS, Compression, JobSpec
from training.replicated.tensor_layout import CHUNK

_DOMAIN: Final = b"folkmoot/payload\0"
_CODES: Final = {Compression.DENSE: 1, Compression.SPARSE: 2}
_COMPRESSIONS: Final = {code: compression for compression, code in _CODES.items()}
_ORIGIN: Final = struct.Struct("<32sQ32s32sII")
_STRUCT: Final = struct.Struct("<BBH32sb")
HEADER_BYTES: Final = _STRUCT.size

assert HEADER_BYTES == 37 and KEEP_MAX == CHUNK


@dataclass(frozen=True, slots=True)
class PayloadMode:
    compression: Compression
    bits: int  # of one level: 1, 2, 4 or 8
    keep: int  # elements of a chunk of 4096 that are said; all of them in a dense payload

    @classmethod
    def of_round(cls, spec: JobSpec, taken: int) -> PayloadMode:
        """That of every payload in the round after so many."""
        if taken < spec.compression_warmup_rounds:
            return cls(Compression.DENSE, OPENING_BITS, CHUNK)
        return cls(spec.compression, spec.bits, spec.keep if spec.compression is Compression.SPARSE else CHUNK)

    @property
    def sparse(self) -> bool:
        return self.compression is Compression.SPARSE


@dataclass(frozen=True)
class PayloadHeader:
    """All that a payload is bound to. Who judges it knows all of that, so only a digest of it is sent."""

    job: bytes
    round: int
    trainer: bytes
    base: bytes  # root of the model it was computed on
    local_steps: int
    batch: int
    mode: PayloadMode

    @classmethod
    def of_spec(cls, spec: JobSpec, job: bytes, round: int, taken: int, trainer: bytes, base: bytes) -> PayloadHeader:
        return cls(job, round, trainer, base, spec.local_steps, spec.batch, PayloadMode.of_round(spec, taken))

    @cached_property
    def origin(self) -> bytes:
        fields = (self.job, self.round, self.trainer, self.base, self.local_steps, self.batch)
        return hashlib.sha256(_DOMAIN + _ORIGIN.pack(*fields)).digest()


def pack_header(mode: PayloadMode, origin: bytes, exponent: int) -> bytes:
    return _STRUCT.pack(_CODES[mode.compression], mode.bits, mode.keep, origin, exponent)


def unpack_header(payload: bytes | memoryview) -> tuple[PayloadMode, bytes, int]:
    """Mode, origin and exponent that `payload` begins with."""
    if len(payload) < HEADER_BYTES:
        raise malformed_payload(f"{len(payload)} bytes are less than a header")
    compression, bits, keep, origin, exponent = _STRUCT.unpack_from(payload)
    return _mode(compression, bits, keep), origin, exponent


def _mode(compression: int, bits: int, keep: int) -> PayloadMode:
    if compression not in _COMPRESSIONS or bits not in BITS:
        raise malformed_payload(f"compression {compression} with {bits} bits")
    mode = PayloadMode(_COMPRESSIONS[compression], bits, keep)
    if not (KEEP_MIN if mode.sparse else CHUNK) <= keep <= CHUNK:
        raise malformed_payload(f"{keep} elements of a chunk are kept")
    return mode


def malformed_payload(detail: str) -> RemoteProtocolError:
    return RemoteProtocolError("malformed", f"payload: {detail}")
