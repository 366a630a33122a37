"""The state machine of sampled audits: what can become of a drawn proposal, of a dispute, and of a trainer.

`ledger.audits.docket` looks up every transition here, and an event that a stage does not know is a bug of ours. The page
docs/protocol/audits.md has the same table: `python -m tests.test_docs --write` writes it from this one.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from ledger.audits.state import Result


class Stage(enum.StrEnum):
    AWAITED = "drawn proposal: an auditor's report is awaited"  # in `Drawn.pending`
    UNDISPUTED = "proposal that is kept: undisputed"  # in no `Dispute`
    OPEN = "dispute: open"  # in `JobAudits.disputes`
    SEALED = "report with a sealed loss"  # in `JobAudits.unopened`
    TRAINS = "trainer: trains"  # not in `JobAudits.suspended`
    SUSPENDED = "trainer: suspended"  # there
    OVER = "over"  # in no table any more


class Event(enum.StrEnum):
    PASSES = "the auditor reports `match`"
    FAILS = "the auditor reports any other finding"
    VOLUNTEERED = "a re-executor says `audit/volunteer`"
    JUDGED = "a challenge or a verdict, and neither side has enough"
    GUILTY = "enough re-executors say guilty"
    UNSEEN = "enough could not see the proposal"
    INNOCENT = "enough say innocent; the trainer is not to be shunned"
    SHUNNED = "enough say innocent; the trainer is to be shunned"
    TIME = "its time is over"
    UNDONE = "its round is undone"
    VOID = "its trainer is suspended"
    LOSS_RIGHT = "the trainer opens the same loss"
    LOSS_WRONG = "the trainer opens another loss; no more voters than may lie contradict the auditor"
    LOSS_LAZY = "the trainer opens another loss; more voters contradict the auditor than may lie"
    CONVICTED = "a dispute ends as `suspended` or as `shunned`, or an auditor was lazy"


class Effect(enum.StrEnum):
    """What else happens, in this order."""

    COUNT_REPORT = "the auditor's `reports` grows"
    COUNT_LAPSE = "the auditor's `lapsed` grows"
    DISPUTE = "a dispute about the proposal opens, or the author joins the one that is open"
    UPHOLD = "`upheld` of each challenger grows"
    HOLD_AGAINST = "each challenge that is no claim counts against its author"
    NOTE_CLAIMS = "each claim is noted for its author and the trainer"
    SUSPEND = "the trainer is suspended, unless it is"
    COMPARE = "the auditor's `reports` in `compared` grow"
    COUNT_WRONG = "the auditor's `wrong` grows; the trainer is noted in `compared`"
    LOSE_REWARD = "the trainer's reward for this proposal is lost"
    SUSPEND_AUDITOR = "the auditor is suspended"
    ROLL_BACK = "the job goes back to the newest anchor at or before the update's round, unless that is undone already"
    LOSE_REWARDS = "`suspensions` grows; rewards that have not vested are lost"
    FORGET = (
        "sealed losses about the trainer are over; noted claims about it, and which of its own reports were wrong, are forgotten"
    )


@dataclass(frozen=True, slots=True)
class Transition:
    after: Stage
    result: Result | None = None  # as the log says it
    effects: tuple[Effect, ...] = ()


TRANSITIONS: Mapping[tuple[Stage, Event], Transition] = {
    (Stage.AWAITED, Event.PASSES): Transition(Stage.OVER, Result.PASSED, (Effect.COUNT_REPORT,)),
    (Stage.AWAITED, Event.FAILS): Transition(Stage.OVER, Result.CHALLENGED, (Effect.COUNT_REPORT, Effect.DISPUTE)),
    (Stage.AWAITED, Event.TIME): Transition(Stage.OVER, Result.LAPSED, (Effect.COUNT_LAPSE,)),
    (Stage.AWAITED, Event.UNDONE): Transition(Stage.OVER),
    (Stage.UNDISPUTED, Event.VOLUNTEERED): Transition(Stage.AWAITED),
    (Stage.OPEN, Event.JUDGED): Transition(Stage.OPEN),
    (Stage.OPEN, Event.GUILTY): Transition(Stage.OVER, Result.SUSPENDED, (Effect.UPHOLD, Effect.SUSPEND, Effect.ROLL_BACK)),
    (Stage.OPEN, Event.UNSEEN): Transition(Stage.OVER, Result.SUSPENDED, (Effect.UPHOLD, Effect.SUSPEND, Effect.ROLL_BACK)),
    (Stage.OPEN, Event.INNOCENT): Transition(Stage.OVER, Result.REFUTED, (Effect.HOLD_AGAINST, Effect.NOTE_CLAIMS)),
    (Stage.OPEN, Event.SHUNNED): Transition(Stage.OVER, Result.SHUNNED, (Effect.HOLD_AGAINST, Effect.SUSPEND)),
    (Stage.OPEN, Event.TIME): Transition(Stage.OVER, Result.DROPPED),
    (Stage.SEALED, Event.LOSS_RIGHT): Transition(Stage.OVER, None, (Effect.COMPARE,)),
    (Stage.SEALED, Event.LOSS_WRONG): Transition(Stage.OVER, Result.WRONG_LOSS, (Effect.COMPARE, Effect.COUNT_WRONG)),
    (Stage.SEALED, Event.LOSS_LAZY): Transition(
        Stage.OVER, Result.LAZY, (Effect.COMPARE, Effect.COUNT_WRONG, Effect.SUSPEND_AUDITOR)
    ),
    (Stage.SEALED, Event.TIME): Transition(Stage.OVER, None, (Effect.LOSE_REWARD,)),
    (Stage.SEALED, Event.VOID): Transition(Stage.OVER),
    (Stage.TRAINS, Event.CONVICTED): Transition(Stage.SUSPENDED, None, (Effect.LOSE_REWARDS, Effect.FORGET)),
    (Stage.SUSPENDED, Event.TIME): Transition(Stage.TRAINS),
}

assert {moved.after for moved in TRANSITIONS.values()} >= {stage for stage, _ in TRANSITIONS} - {
    Stage.AWAITED,
    Stage.UNDISPUTED,
    Stage.SEALED,
}
assert not any(stage is Stage.OVER for stage, _ in TRANSITIONS)  # what is over stays over
# Whatever is found or ends is in the log for people, but what follows from a suspension that is there itself.
assert {moved.result for moved in TRANSITIONS.values()} - {None} == set(Result)
