"""How many bytes a job takes on a peer's disk, as far as its specification says. Its text comes on top of that."""

from __future__ import annotations

from dataclasses import dataclass

from training.host import ROUNDS_KEPT
from training.replicated.codec import Mode, payload_bytes_max
from training.replicated.layout import layout_of
from training.spec import AuditMode, JobSpec

BESIDE = 2  # models beside those of the last rounds: the last durable one, and the next one while it is written
BUFFERS = 2  # of a trainer's last accepted proposal, and of the next one


@dataclass(frozen=True, slots=True)
class Room:
    models: int  # those that are there side by side
    own: int  # what trainers go on from, and what audits may ask for
    round: int  # payloads, which stay, of each round

    def bytes(self, rounds: int) -> int:
        return self.models + self.own + self.round * rounds


def room_of(spec: JobSpec, trainers: int, trains: bool) -> Room:
    """At most, for a valid job with so many trainers, at a peer that trains it, or votes only."""
    layout = layout_of(spec)
    models = (max(ROUNDS_KEPT, spec.rounds_audited + 1) + BESIDE) * spec.model_bytes
    payloads = trainers * payload_bytes_max(layout, Mode.of(spec))
    if not trains:
        return Room(models, 0, payloads)
    shown = trainers if spec.audit is AuditMode.FULL else 1  # those of others are fetched by whoever re-executes them
    own = BUFFERS * shown * 4 * layout.size * (1 + 2 * spec.keeps_inner_state)
    if spec.audit is AuditMode.SAMPLED:
        own += spec.audit_bytes - spec.model_bytes * (spec.rounds_audited + 1)
    return Room(models, own, payloads)
