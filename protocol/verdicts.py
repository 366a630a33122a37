"""Verdicts and findings: a voter's judgement of one trainer's proposal, and the result of an audit of it.

Codes below OBJECTIVE_CODES_FIRST mean the same in every job. The others belong to the job's objective, which names them (see
`verdict_label`).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

OBJECTIVE_CODES_FIRST = 16  # lowest code that the objective defines
OBJECTIVE_CODES_MAX = 8  # maximum number of codes that an objective defines


class Verdict(enum.IntEnum):
    ACCEPT = 0
    UNJUDGED = 1  # the voter could not judge in time: a payload or buffer was missing, or its worker was busy or stopped
    MALFORMED = 2  # the payload is not the canonical encoding of an update for this job, round and trainer
    STALE = 3  # the update was computed on another model root, or for another round
    NORM = 4  # the update's norm exceeds the limit in the replicated state
    COMMITMENT = 5  # the error feedback does not continue from the last accepted proposal
    REPLAY = 6  # re-execution gave another update
    EQUIVOCATION = 7  # the trainer signed two different proposals for this round
    OWN_0 = OBJECTIVE_CODES_FIRST
    OWN_1 = OBJECTIVE_CODES_FIRST + 1
    OWN_2 = OBJECTIVE_CODES_FIRST + 2
    OWN_3 = OBJECTIVE_CODES_FIRST + 3
    OWN_4 = OBJECTIVE_CODES_FIRST + 4
    OWN_5 = OBJECTIVE_CODES_FIRST + 5
    OWN_6 = OBJECTIVE_CODES_FIRST + 6
    OWN_7 = OBJECTIVE_CODES_FIRST + 7

    @property
    def label(self) -> str:
        return self.name.lower()


# Reason of a suspension for updates that were found false before the ballot.
INVALID_UPDATES_REASON = "re-execution found three of its updates false"
ABSENT = "absent"  # label of a trainer without a verdict: no ballot named a proposal of the trainer
DIVERGING = "diverging"  # label of NORM if it applies to more than f trainers in a round: honest updates are too large, too
VERDICT_MEANINGS = {  # label of a verdict -> its meaning, for people
    "unjudged": "too few voters could judge it in time",
    "malformed": "its payload is not a valid update",
    "stale": "computed on a different model or for a different round",
    "norm": "the update is far too large",
    "commitment": "its error feedback does not continue from its last accepted proposal",
    "replay": "re-execution gave a different update",
    "equivocation": "the trainer signed two different proposals for this round",
    DIVERGING: "updates of too many trainers are far too large: lower the learning rate",
    ABSENT: "no proposal arrived",
}


class ReplayFinding(enum.IntEnum):
    MATCH = 0  # re-execution gives the same update
    MISMATCH = 1  # re-execution gives another update
    MALFORMED = 2  # the declaration, or a blob that it names, is not valid in this job
    WITHHELD = 3  # data that the proposal commits to did not arrive; only a claim, because others may have received the data
    OWN_0 = OBJECTIVE_CODES_FIRST
    OWN_1 = OBJECTIVE_CODES_FIRST + 1
    OWN_2 = OBJECTIVE_CODES_FIRST + 2
    OWN_3 = OBJECTIVE_CODES_FIRST + 3
    OWN_4 = OBJECTIVE_CODES_FIRST + 4
    OWN_5 = OBJECTIVE_CODES_FIRST + 5
    OWN_6 = OBJECTIVE_CODES_FIRST + 6
    OWN_7 = OBJECTIVE_CODES_FIRST + 7

    @property
    def label(self) -> str:
        return self.name.lower()


def verdict_label(code: Verdict | ReplayFinding, own: Sequence[str]) -> str:
    """Return the label of a code, for people. `own` are the objective's labels of the codes from OBJECTIVE_CODES_FIRST on."""
    number = code - OBJECTIVE_CODES_FIRST
    return own[number] if 0 <= number < len(own) else code.label


def verdict_label_by_name(name: str, own: Sequence[str]) -> str:
    """Return the `verdict_label` of the code with this name."""
    code = Verdict.__members__.get(name.upper())
    return name if code is None else verdict_label(code, own)


def find_verdict_by_label(text: str, own: Sequence[str]) -> Verdict | None:
    """Return the verdict whose `verdict_label` is `text`. `DIVERGING` is a label of NORM.

    None: the text is no label of a verdict, such as that of an absent trainer.
    """
    return (
        Verdict.NORM if text == DIVERGING else next((verdict for verdict in Verdict if verdict_label(verdict, own) == text), None)
    )


assert len([verdict for verdict in Verdict if verdict >= OBJECTIVE_CODES_FIRST]) == OBJECTIVE_CODES_MAX
assert len([finding for finding in ReplayFinding if finding >= OBJECTIVE_CODES_FIRST]) == OBJECTIVE_CODES_MAX
