"""Models of a job to which it may roll back, and rounds that rollbacks have undone."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

from protocol.codec import Count, Digest, Key, Length
from protocol.identity import short_id
from protocol.units import display_round_number

ANCHORS_MAX = 16  # anchors of one job: each costs every disk a model, and more would only shorten rollbacks
SAVED_MODELS_MAX = 64  # saved models of one job: each costs every disk a model
UNDONE_KEPT = 32  # last rollbacks of one job that are listed, for people


@dataclass(frozen=True, slots=True)
class ModelAnchor:
    """A model that a job may return to."""

    round: Count  # round that began with this model
    rounds_in_model: Count  # number of rounds in the model's history
    root: Digest


class UndoReason(enum.StrEnum):
    FALSE = "false"  # an update was found false
    WITHHELD = "withheld"  # an update could not be audited, because its trainer did not serve the data
    STOPPED = "stopped"  # the job ended while audits of these rounds were open
    VOTED = "voted"  # a quorum of voters requested the rollback


@dataclass(frozen=True, slots=True)
class UndoneRounds:
    """Rounds whose steps a rollback removed from the model."""

    first: Count
    last: Count  # last undone round, which may have been open at the time
    height: Count
    reason: UndoReason
    trainer: Key | None = None  # trainer that was convicted; None: the rollback has another reason


ModelAnchors = Annotated[tuple[ModelAnchor, ...], Length(0, ANCHORS_MAX)]  # in ascending order of rounds


def newest_anchor_up_to(anchors: Sequence[ModelAnchor], number: int) -> ModelAnchor:
    """Return the newest anchor at or before this round.

    Normally there is one for each round that an audit can undo. If a step of the module of audits failed, these rounds are
    unknown and such an anchor may be missing. The oldest anchor is then returned.
    """
    return max((anchor for anchor in anchors if anchor.round <= number), key=lambda anchor: anchor.round, default=anchors[0])


def anchors_to_keep(anchors: Sequence[ModelAnchor], doubtful: int) -> tuple[ModelAnchor, ...]:
    """Return the anchors to keep: the newest one at or before the first doubtful round, and all later ones.

    There is always room for one more anchor. If there are too many, anchors with the closest neighbours are dropped, because this
    lengthens the longest rollback least.
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
    """Return a sentence for people: the rounds that a rollback undid, and its reason. `name` maps a trainer's key to its name."""
    which = f"rounds {display_round_number(undone.first)} to {display_round_number(undone.last)} are"
    if undone.first == undone.last:
        which = f"round {display_round_number(undone.first)} is"
    return f"{which} undone: {UNDO_REASON_TEXTS[undone.reason].format(name(undone.trainer or b''))}"
