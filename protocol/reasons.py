"""Verdicts: what a voter says of one trainer's proposal, and why."""

from __future__ import annotations

import enum


class Verdict(enum.IntEnum):
    ACCEPT = 0
    UNJUDGED = 1  # the voter could not judge in time: payload or buffer not there, worker busy or gone
    MALFORMED = 2  # the payload is not the canonical encoding of any update for this job, round and trainer
    STALE = 3  # computed on another model root, or for another round
    NORM = 4  # the update's norm is beyond the limit in the replicated state
    COMMITMENT = 5  # the error-feedback chain does not continue what was decided before
    REPLAY = 6  # re-execution gave another update
    EQUIVOCATION = 7  # the trainer signed two different proposals for this round

    @property
    def label(self) -> str:
        return self.name.lower()
