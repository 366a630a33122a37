"""Which jobs statistics alone were measured to defend: what may be started with audit 'off'.

A row is what `python -m benchmarks.attacks --only digits` found: under the worst attack at most `LOST_MAX` points are lost
to a run without liars. Of models of text the loss must also grow at most to `WORSE_MAX` times (`--only gpt`), and none held that.
What was not measured is refused, by the peer that is asked to start the job; jobs that are on the log already go on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from training.spec import KEEP_MAX, AuditMode, Compression, JobSpec, Memory, Outer, Rule

LOST_MAX: Final = 2.0  # points of accuracy
WORSE_MAX: Final = 1.05
OFF: Final = "audit 'off'"
NOBODY_LIES: Final = "liars 0, which says that nobody lies"


@dataclass(frozen=True, slots=True)
class Held:
    """What was measured to stand, with so many trainers and liars."""

    memory: Memory
    compression: Compression
    bits: int
    keep: int
    local_steps: int
    outer: Outer
    feedback_decay: float
    trainers: int
    liars: int


@dataclass(frozen=True, slots=True)
class Fell:
    """The worst that was measured of payloads of this kind."""

    memory: Memory
    compression: Compression
    bits: int
    what: str


ESTIMATES: Final = (Memory.ESTIMATES, Compression.DENSE, 1, KEEP_MAX, 1, Outer.ADAMW, 0.8)
HELD: Final = tuple(Held(*ESTIMATES, trainers, liars) for trainers, liars in ((4, 1), (13, 4)))
TEXT_FELL: Final = "at 1 liar of 4 the language model's loss grows to 1.14 times, and at most 1.05 counts as defended"
FELL: Final = (
    Fell(
        Memory.RESIDUAL, Compression.DENSE, 1, "one bit with error feedback falls at 4 liars of 13, to 8 % of the digits for 97 %"
    ),
    Fell(
        Memory.RESIDUAL,
        Compression.SPARSE,
        1,
        "sparse payloads with error feedback fall at 4 liars of 13, to 8 % of the digits for 96 %",
    ),
)


def undefended(spec: JobSpec, trainers: int) -> str | None:
    """Why a job that so many trainers would begin may not be started as it is, and the way out; None if it may."""
    if spec.audit is not AuditMode.OFF or not spec.liars:
        return None
    if spec.data is None and spec.kind.reads_text:
        return f"{OFF} with liars {spec.liars}: where each has its own text no rule was measured to hold; take {NOBODY_LIES}"
    why = _why(spec, trainers)
    return None if why is None else f"{OFF} with liars {spec.liars}: {why}; take audit 'full', or {NOBODY_LIES}"


def _why(spec: JobSpec, trainers: int) -> str | None:
    if spec.rule is not Rule.ARC_NNM_TRIM:
        return f"rule {spec.rule.value!r} was not measured to hold"
    rows = [row for row in HELD if _is_like(row, spec)]
    if not rows:
        ours = spec.memory, spec.compression, spec.bits
        fell = (row.what for row in FELL if (row.memory, row.compression, row.bits) == ours)
        kind = f"{spec.compression.value} payloads of {spec.bits} bits, memory {spec.memory.value!r}"
        how = f"local_steps {spec.local_steps}, outer {spec.outer.value!r}, feedback_decay {spec.feedback_decay:g}"
        return next(fell, f"{kind}, {how}, were not measured to hold")
    if not any(spec.liars <= row.liars and trainers >= row.trainers for row in rows):
        measured = ", ".join(f"{row.liars} of {row.trainers}" for row in rows)
        return f"of {trainers} trainers that is more than was measured to hold ({measured})"
    return TEXT_FELL if spec.kind.makes_text else None


def _is_like(row: Held, spec: JobSpec) -> bool:
    said = spec.compression is Compression.DENSE or spec.keep >= row.keep
    ours = spec.memory, spec.compression, spec.bits, spec.local_steps, spec.outer, spec.feedback_decay
    return said and ours == (row.memory, row.compression, row.bits, row.local_steps, row.outer, row.feedback_decay)
