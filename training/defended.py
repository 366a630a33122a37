"""Which jobs statistics alone were measured to defend: what may be started with audit 'off'.

Measured were jobs with the settings `training.spec.ESTIMATES`, under the worst of the attacks of `python -m benchmarks.attacks`:
on handwritten digits (`--only digits`) and on a language model (`--only gpt`). What held is a row here. The peer that is asked to
start a job refuses all else; jobs that are on the log already go on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from training.spec import ESTIMATES, KEEP_MAX, AuditMode, Compression, JobSpec, Memory

LOST_MAX: Final = 2.0  # points of accuracy
WORSE_MAX: Final = 1.05  # times the held-out loss of a language model
OFF: Final = "audit 'off'"
NOBODY_LIES: Final = "liars 0, which says that nobody lies"
MEASURED: Final = ("memory", "local_steps", "outer", "inner_state", "beta1", "feedback_decay", "rule")  # of `ESTIMATES`


@dataclass(frozen=True, slots=True)
class Held:
    """It stood on seeds 0 to 2, with so many trainers and liars: no more liars, and no fewer trainers, are defended."""

    compression: Compression
    bits: int
    keep: int  # elements of a chunk; fewer are not defended
    trainers: int
    liars: int
    lost: float  # most points of the digits, of any attack and seed; among 13 also with 30 % of the honest absent in each round


@dataclass(frozen=True, slots=True)
class Fell:
    """The worst that was measured of payloads of this kind with error feedback."""

    compression: Compression
    bits: int
    what: str


HELD: Final = (
    Held(Compression.DENSE, 1, KEEP_MAX, 4, 1, 0.55),
    Held(Compression.DENSE, 1, KEEP_MAX, 13, 4, 0.83),
    Held(Compression.SPARSE, 1, 146, 13, 4, 1.95),
)
TEXT_FELL: Final = "with 1 liar of 4 the loss of a language model grows to 1.14 times, and at most 1.05 counts as defended"
FELL: Final = (
    Fell(Compression.DENSE, 1, "one bit with error feedback falls at 4 liars of 13, to 8 % of the digits for 97 %"),
    Fell(Compression.SPARSE, 1, "sparse payloads with error feedback fall at 4 liars of 13, to 8 % of the digits for 96 %"),
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
    kind = spec.compression, spec.bits
    for fell in FELL:
        if spec.memory is Memory.RESIDUAL and (fell.compression, fell.bits) == kind:
            return fell.what
    others = [f"{name} {getattr(spec, name)}" for name in MEASURED if getattr(spec, name) != ESTIMATES[name]]
    if others or spec.inner_rate > ESTIMATES["inner_rate"]:
        return f"{', '.join(others) or f'inner_rate {spec.inner_rate:g}'} was not measured to hold"
    rows = [row for row in HELD if (row.compression, row.bits) == kind and _says_enough(spec, row)]
    if not rows:
        return f"{spec.compression} payloads of {spec.bits} bits and keep {spec.keep} were not measured to hold"
    if spec.kind.makes_text:
        return TEXT_FELL
    if not any(spec.liars <= row.liars and trainers >= row.trainers for row in rows):
        measured = ", ".join(f"{row.liars} of {row.trainers}" for row in rows)
        return f"of {trainers} trainers that is more than was measured to hold ({measured})"
    return None


def _says_enough(spec: JobSpec, row: Held) -> bool:
    return spec.compression is Compression.DENSE or spec.keep >= row.keep
