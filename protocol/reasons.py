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


MEANINGS = {  # for people, by label; `absent` is no verdict: no ballot named a proposal of that trainer
    "unjudged": "too few could judge it in time",
    "malformed": "not the encoding of any update",
    "stale": "computed on another model",
    "norm": "far too large",
    "commitment": "its error feedback does not follow from what was decided",
    "replay": "re-executing it gave another update",
    "equivocation": "two different proposals for one round",
    "absent": "no proposal came",
}
