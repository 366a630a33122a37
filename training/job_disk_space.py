"""How many bytes a job takes on a peer's disk, as far as its specification says. Its text comes on top of that."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from protocol.errors import UserError
from protocol.units import format_bytes
from training.job_spec import AuditMode, JobSpec
from training.model_store import ROUNDS_KEPT

EXTRA_MODELS = 2  # models beside those of the last rounds: the last durable one, and the next one while it is written
BUFFERS = 2  # of a trainer's last accepted proposal, and of the next one
ROUNDS_MIN: Final = 256  # of which payloads stay, however little an operator allows: minutes of the quickest rounds
DOWNLOAD_RESERVED_BYTES: Final = 256 << 20  # of the disk, for ledger and models when a text was fetched


@dataclass(frozen=True, slots=True)
class JobDiskSpace:
    models: int  # those that are there side by side
    own: int  # what trainers go on from, and what audits may ask for
    round: int  # payloads of each round
    opening: int = 0  # what those of each opening round have more
    compression_warmup_rounds: int = 0

    def payload_bytes(self, rounds: int, bytes_max: int = 0) -> int:
        """Of the first so many rounds, where `bytes_max` of them may stay; 0: all."""
        kept = min(rounds, self.rounds_kept(bytes_max)) if bytes_max else rounds
        return self.round * kept + self.opening * min(kept, self.compression_warmup_rounds)

    def rounds_kept(self, bytes_max: int) -> int:
        """Of which the payloads stay, even if all of the opening rounds are among them."""
        openings = bytes_max // (self.round + self.opening)
        if openings > self.compression_warmup_rounds:
            return max(ROUNDS_MIN, (bytes_max - self.opening * self.compression_warmup_rounds) // self.round)
        return max(ROUNDS_MIN, openings)

    def total_bytes(self, rounds: int, payload_bytes_max: int = 0) -> int:
        return self.models + self.own + self.payload_bytes(rounds, payload_bytes_max)


def job_disk_space(spec: JobSpec, trainers: int, trains: bool) -> JobDiskSpace:
    """At most, for a valid job with so many trainers, at a peer that trains it, or votes only."""
    from training.replicated import error_feedback
    from training.replicated.codec import payload_bytes
    from training.replicated.tensor_layout import layout_of

    layout = layout_of(spec)
    # Anchors of the rounds that audits may reach, as long as windows take no longer than their rounds.
    anchors = spec.rounds_audited // spec.anchor_rounds + 1 if spec.rounds_audited else 0
    models = (max(ROUNDS_KEPT, spec.rounds_audited + 1) + EXTRA_MODELS + anchors) * spec.model_bytes
    first, last = (trainers * payload_bytes(layout, spec.payload_bits(number)) for number in (0, spec.rounds))
    payloads = last, max(0, first - last), spec.compression_warmup_rounds
    if not trains:
        return JobDiskSpace(models, 0, *payloads)
    is_full = spec.audit is AuditMode.FULL or spec.final_full_audit_rounds > 0
    shown = trainers if is_full else 1  # those of others are fetched by whoever re-executes them
    own = BUFFERS * shown * (error_feedback.buffer_bytes(spec) + 8 * layout.size * spec.keeps_inner_state)
    if spec.audit is AuditMode.SAMPLED:
        own += spec.audit_bytes - spec.model_bytes * (spec.rounds_audited + 1)
    return JobDiskSpace(models, own, *payloads)


def require_disk_space(folder: Path, size: int, what: str = "text") -> None:
    """`UserError` unless so many bytes fit twice: a text in shards and whole, parameters as they came and as the first model. A
    full disk would end the peer.
    """
    free = shutil.disk_usage(folder).free
    if free < 2 * size + DOWNLOAD_RESERVED_BYTES:
        needs = f"this job's {what} of {format_bytes(size)} needs twice that and {DOWNLOAD_RESERVED_BYTES >> 20} MiB to spare"
        raise UserError(f"{needs}, but {folder} has {free >> 20} MiB free: free some, or leave the job to others")
