"""Models of a job to which it may roll back, and rounds that rollbacks have undone."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

from protocol.codec import Count, Digest, Key, Length
from protocol.identity import short_id
from protocol.units import display_round_number

ANCHORS_MAX = 16  # anchors of one job: each is a model on every disk, and further ones only shorten a rollback
UNDONE_KEPT = 32  # the last rollbacks of one job, kept for people


@dataclass(frozen=True, slots=True)
class ModelAnchor:
    """A model that a job may return to."""

    round: Count  # the round that began with it
    rounds_in_model: Count  # rounds in the model
    root: Digest


class UndoReason(enum.StrEnum):
    FALSE = "false"  # an update was found false
    WITHHELD = "withheld"  # an update could not be audited, because its trainer showed nothing
    STOPPED = "stopped"  # the job ended during audits of these rounds
    VOTED = "voted"  # a quorum of voters asked for it


@dataclass(frozen=True, slots=True)
class UndoneRounds:
    """Rounds whose steps a rollback removed from the model."""

    first: Count
    last: Count  # last undone round, which may have been open
    height: Count
    reason: UndoReason
    trainer: Key | None = None  # the convicted trainer


ModelAnchors = Annotated[tuple[ModelAnchor, ...], Length(0, ANCHORS_MAX)]  # ascending


def newest_anchor_up_to(anchors: Sequence[ModelAnchor], number: int) -> ModelAnchor:
    """Return the newest anchor at or before this round. Normally there is one for each round that an audit can reach.

    If a step of the audits failed, those rounds are unknown and the anchor may be missing: the result is then the oldest anchor.
    """
    return max((anchor for anchor in anchors if anchor.round <= number), key=lambda anchor: anchor.round, default=anchors[0])


def anchors_to_keep(anchors: Sequence[ModelAnchor], doubtful: int) -> tuple[ModelAnchor, ...]:
    """Return the newest anchor at or before the first doubtful round and those after it, with room for one more.

    If there are too many, those with the closest neighbours are removed: this lengthens the longest rollback by the least.
    """
    first = newest_anchor_up_to(anchors, doubtful)
    left = [anchor for anchor in anchors if anchor.round >= first.round]
    while len(left) >= ANCHORS_MAX:
        del left[min(range(1, len(left) - 1), key=lambda at: left[at + 1].rounds_in_model - left[at - 1].rounds_in_model)]
    return tuple(left)


UNDO_REASON_TEXTS = {
    UndoReason.FALSE: "an update of {} is false",
    UndoReason.WITHHELD: "{} withheld an update from its auditors",
    UndoReason.STOPPED: "the job ended before their audits",
    UndoReason.VOTED: "a quorum of the voters requested a rollback",
}


def format_undone_rounds(undone: UndoneRounds, name: Callable[[bytes], str] = short_id) -> str:
    """Return a sentence for people. `name` gives the name of the trainer with this key."""
    which = f"rounds {display_round_number(undone.first)} to {display_round_number(undone.last)} are"
    if undone.first == undone.last:
        which = f"round {display_round_number(undone.first)} is"
    return f"{which} undone: {UNDO_REASON_TEXTS[undone.reason].format(name(undone.trainer or b''))}"
