"""The disk space that a job takes on a peer, according to the job's specification. The job's text is not included."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from protocol.errors import UserError
from protocol.units import format_bytes
from training.job_spec import AuditMode, JobSpec
from training.model_store import ROUNDS_KEPT

# Number of models beside those of the last rounds: the last durable model, and the next model while it is written.
EXTRA_MODELS = 2
BUFFERS = 2  # number of buffers of each trainer: of its last accepted proposal, and of its next proposal
# Least number of rounds whose payloads are kept, whatever limit an operator sets: some minutes of the fastest rounds.
ROUNDS_MIN: Final = 256
DOWNLOAD_RESERVED_BYTES: Final = 256 << 20  # bytes of free disk space that a download leaves for the ledger and the models


@dataclass(frozen=True, slots=True)
class JobDiskSpace:
    models: int  # bytes of the models that are kept at the same time
    own: int  # bytes of trainers' buffers and inner states, and of data that audits may request
    round: int  # bytes of the payloads of each round
    opening: int = 0  # payload bytes of an opening round beyond those of other rounds
    compression_warmup_rounds: int = 0

    def payload_bytes(self, rounds: int, bytes_max: int = 0) -> int:
        """Return the bytes of stored payloads after `rounds` rounds.

        At most about `bytes_max` bytes are stored; 0: there is no limit.
        """
        kept = min(rounds, self.rounds_kept(bytes_max)) if bytes_max else rounds
        return self.round * kept + self.opening * min(kept, self.compression_warmup_rounds)

    def rounds_kept(self, bytes_max: int) -> int:
        """Return how many rounds' payloads fit into `bytes_max` if they include all opening rounds, but at least `ROUNDS_MIN`."""
        openings = bytes_max // (self.round + self.opening)
        if openings > self.compression_warmup_rounds:
            return max(ROUNDS_MIN, (bytes_max - self.opening * self.compression_warmup_rounds) // self.round)
        return max(ROUNDS_MIN, openings)

    def total_bytes(self, rounds: int, payload_bytes_max: int = 0) -> int:
        return self.models + self.own + self.payload_bytes(rounds, payload_bytes_max)


def job_disk_space(spec: JobSpec, trainers: int, trains: bool) -> JobDiskSpace:
    """Return the most disk space that a valid job with this many trainers needs at a peer.

    `trains`: the peer trains and does not only vote.
    """
    from training.replicated import error_feedback
    from training.replicated.codec import payload_bytes
    from training.replicated.tensor_layout import layout_of

    layout = layout_of(spec)
    if spec.resolved_objective.on_request:  # Each round has one trainer, whoever that is.
        trainers = 1
    # Number of anchors to which a rollback may return, if an audit window takes no longer than its rounds.
    anchors = spec.rounds_audited // spec.anchor_rounds + 1 if spec.rounds_audited else 0
    models = (max(ROUNDS_KEPT, spec.rounds_audited + 1) + EXTRA_MODELS + anchors) * spec.model_bytes
    first, last = (trainers * payload_bytes(layout, spec.payload_bits(number)) for number in (0, spec.rounds))
    payloads = last, max(0, first - last), spec.compression_warmup_rounds
    if not trains:
        return JobDiskSpace(models, 0, *payloads)
    is_full = spec.audit is AuditMode.FULL or spec.final_full_audit_rounds > 0
    shown = trainers if is_full else 1  # A peer that re-executes all proposals fetches the buffers of all trainers.
    own = BUFFERS * shown * (error_feedback.buffer_bytes(spec) + 8 * layout.size * spec.keeps_inner_state)
    if spec.audit is AuditMode.SAMPLED:
        own += spec.audit_bytes - spec.model_bytes * (spec.rounds_audited + 1)
    return JobDiskSpace(models, own, *payloads)


def require_disk_space(folder: Path, size: int, what: str = "text") -> None:
    """Raise `UserError` unless the disk has room for `size` bytes twice, since a full disk would stop the peer.

    A text is stored twice, in shards and in one file, and parameters are stored as received and as a model.
    """
    free = shutil.disk_usage(folder).free
    if free < 2 * size + DOWNLOAD_RESERVED_BYTES:
        needs = f"this job's {what} of {format_bytes(size)} needs twice its size and {DOWNLOAD_RESERVED_BYTES >> 20} MiB more"
        raise UserError(f"{needs}, but {folder} has {free >> 20} MiB free: free some space, or leave the job to others")
