"""The disk space that a job takes on a peer, according to its specification. Its text is not included."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from protocol.errors import UserError
from protocol.units import format_bytes
from training.job_spec import AuditMode, JobSpec
from training.model_store import ROUNDS_KEPT

EXTRA_MODELS = 2  # models in addition to those of the last rounds: the last durable one, and the next one while it is written
BUFFERS = 2  # buffers of a trainer's last accepted proposal and of the next one
ROUNDS_MIN: Final = 256  # rounds whose payloads stay at any limit of an operator: minutes of the fastest rounds
DOWNLOAD_RESERVED_BYTES: Final = 256 << 20  # bytes of the disk that a download leaves to ledger and models


@dataclass(frozen=True, slots=True)
class JobDiskSpace:
    models: int  # bytes of the models that are kept at the same time
    own: int  # bytes of trainers' state, and of data that audits may request
    round: int  # bytes of the payloads of each round
    opening: int = 0  # additional payload bytes of each opening round
    compression_warmup_rounds: int = 0

    def payload_bytes(self, rounds: int, bytes_max: int = 0) -> int:
        """Return the payload bytes of the first `rounds` rounds, where at most `bytes_max` are kept; 0: all are kept."""
        kept = min(rounds, self.rounds_kept(bytes_max)) if bytes_max else rounds
        return self.round * kept + self.opening * min(kept, self.compression_warmup_rounds)

    def rounds_kept(self, bytes_max: int) -> int:
        """Return how many rounds' payloads fit into `bytes_max`, all opening rounds included; at least `ROUNDS_MIN`."""
        openings = bytes_max // (self.round + self.opening)
        if openings > self.compression_warmup_rounds:
            return max(ROUNDS_MIN, (bytes_max - self.opening * self.compression_warmup_rounds) // self.round)
        return max(ROUNDS_MIN, openings)

    def total_bytes(self, rounds: int, payload_bytes_max: int = 0) -> int:
        return self.models + self.own + self.payload_bytes(rounds, payload_bytes_max)


def job_disk_space(spec: JobSpec, trainers: int, trains: bool) -> JobDiskSpace:
    """Return the largest disk space of a valid job with this many trainers, at a peer that trains it or only votes."""
    from training.replicated import error_feedback
    from training.replicated.codec import payload_bytes
    from training.replicated.tensor_layout import layout_of

    layout = layout_of(spec)
    # Anchors within the reach of audits, if audit windows take no longer than their rounds.
    anchors = spec.rounds_audited // spec.anchor_rounds + 1 if spec.rounds_audited else 0
    models = (max(ROUNDS_KEPT, spec.rounds_audited + 1) + EXTRA_MODELS + anchors) * spec.model_bytes
    first, last = (trainers * payload_bytes(layout, spec.payload_bits(number)) for number in (0, spec.rounds))
    payloads = last, max(0, first - last), spec.compression_warmup_rounds
    if not trains:
        return JobDiskSpace(models, 0, *payloads)
    is_full = spec.audit is AuditMode.FULL or spec.final_full_audit_rounds > 0
    shown = trainers if is_full else 1  # Peers that re-execute the others' proposals fetch their buffers.
    own = BUFFERS * shown * (error_feedback.buffer_bytes(spec) + 8 * layout.size * spec.keeps_inner_state)
    if spec.audit is AuditMode.SAMPLED:
        own += spec.audit_bytes - spec.model_bytes * (spec.rounds_audited + 1)
    return JobDiskSpace(models, own, *payloads)


def require_disk_space(folder: Path, size: int, what: str = "text") -> None:
    """Raise `UserError` unless `size` bytes fit twice, since a full disk would stop the peer.

    A text is stored in shards and in one file, and parameters as received and as a model.
    """
    free = shutil.disk_usage(folder).free
    if free < 2 * size + DOWNLOAD_RESERVED_BYTES:
        needs = f"this job's {what} of {format_bytes(size)} needs twice its size and {DOWNLOAD_RESERVED_BYTES >> 20} MiB more"
        raise UserError(f"{needs}, but {folder} has {free >> 20} MiB free: free some space, or leave the job to others")
