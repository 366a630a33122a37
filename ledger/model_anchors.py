"""Models of a job that a rollback may go to, and the rounds that rollbacks have undone."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

from protocol.codec import Count, Digest, Key, Length
from protocol.identity import short_id
from protocol.units import display_round_number

ANCHORS_MAX = 16  # of one job: each is a model on every disk, and more only make a rollback shorter
UNDONE_KEPT = 32  # of one job, the last rollbacks, for people


@dataclass(frozen=True, slots=True)
class ModelAnchor:
    """A model that a rollback may go to."""

    round: Count  # that began with it
    rounds_in_model: Count  # rounds of the model's line before it
    root: Digest


class UndoReason(enum.StrEnum):
    FALSE = "false"  # an update was found false
    WITHHELD = "withheld"  # an update could not be audited: its trainer showed nothing
    STOPPED = "stopped"  # the job ended while audits of these rounds went on
    VOTED = "voted"  # a quorum of voters wanted it


@dataclass(frozen=True, slots=True)
class UndoneRounds:
    """Rounds whose steps a rollback took out of the model."""

    first: Count
    last: Count  # it may have been open
    height: Count
    reason: UndoReason
    trainer: Key | None = None  # the convicted one


ModelAnchors = Annotated[tuple[ModelAnchor, ...], Length(0, ANCHORS_MAX)]  # ascending


def newest_anchor_up_to(anchors: Sequence[ModelAnchor], number: int) -> ModelAnchor:
    """The newest anchor at or before this round. There is one for each round that an audit may reach.

    If a step of the audits failed, nobody said which rounds these are, and the anchor may be forgotten: then the oldest one.
    """
    return max((anchor for anchor in anchors if anchor.round <= number), key=lambda anchor: anchor.round, default=anchors[0])


def anchors_to_keep(anchors: Sequence[ModelAnchor], doubtful: int) -> tuple[ModelAnchor, ...]:
    """The newest anchor at or before the first doubtful round, and those after it, with room for one more.

    Where there are too many, the one goes whose neighbours are closest: that makes the longest rollback longer by the least.
    """
    first = newest_anchor_up_to(anchors, doubtful)
    left = [anchor for anchor in anchors if anchor.round >= first.round]
    while len(left) >= ANCHORS_MAX:
        del left[min(range(1, len(left) - 1), key=lambda at: left[at + 1].rounds_in_model - left[at - 1].rounds_in_model)]
    return tuple(left)


UNDO_REASON_TEXTS = {
    UndoReason.FALSE: "an update of {} is false",
    UndoReason.WITHHELD: "{} did not show an update to its auditors",
    UndoReason.STOPPED: "the job ended before they were audited",
    UndoReason.VOTED: "a quorum of the voters wanted the model before them",
}


def format_undone_rounds(undone: UndoneRounds, name: Callable[[bytes], str] = short_id) -> str:
    """For people. `name`: of the trainer with this key."""
    which = f"rounds {display_round_number(undone.first)} to {display_round_number(undone.last)} are"
    if undone.first == undone.last:
        which = f"round {display_round_number(undone.first)} is"
    return f"{which} undone: {UNDO_REASON_TEXTS[undone.reason].format(name(undone.trainer or b''))}"
