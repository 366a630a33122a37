"""The state machine of sampled audits: stages and transitions of drawn proposals, disputes, sealed losses and trainers.

The rules look up or assert the transitions here, except VOID, which `suspend_trainer` does itself. An event without a transition
in its stage is a bug. `docs/protocol/audits.md` has the same table, which `python -m tests.test_docs --write` writes.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from ledger.audits.audit_state import AuditResult


class AuditStage(enum.StrEnum):
    AWAITED = "drawn proposal: an auditor's report is awaited"  # stage is stored in `AuditableProposal.pending_auditors`
    UNDISPUTED = "kept proposal: undisputed"  # no `Dispute` about the proposal is stored
    OPEN = "dispute: open"  # stage is stored in `JobAudits.disputes`
    SEALED = "report with a sealed loss"  # stage is stored in `JobAudits.unopened_losses`
    TRAINS = "trainer: trains"  # trainer is absent from `JobAudits.suspended`
    SUSPENDED = "trainer: suspended"  # trainer is stored in `JobAudits.suspended`
    OVER = "over"  # item is deleted from all tables


class AuditEvent(enum.StrEnum):
    PASSES = "the auditor reports `match`"
    FAILS = "the auditor reports any other finding"
    VOLUNTEERED = "a re-executor sends `audit/volunteer`"
    JUDGED = "a challenge or a verdict arrives, and neither side has enough verdicts"
    GUILTY = "enough re-executors find the proposal false"
    UNSEEN = "enough re-executors did not receive the proposal's data"
    INNOCENT = "enough re-executors find the proposal correct; the trainer is not to be shunned"
    SHUNNED = "enough re-executors find the proposal correct; the trainer is to be shunned"
    TIME = "its deadline has passed"
    UNDONE = "its round is undone"
    VOID = "its trainer is suspended"
    LOSS_RIGHT = "the trainer opens the loss that the auditor reported"
    LOSS_WRONG = "the trainer opens a different loss; at most f voters contradict the auditor"
    LOSS_LAZY = "the trainer opens a different loss; more than f voters contradict the auditor"
    CONVICTED = "a dispute ends as `suspended` or as `shunned`, or an auditor was lazy"


class AuditEffect(enum.StrEnum):
    """Effects of a transition beside the next stage and the log entry. They act in this order."""

    COUNT_REPORT = "the auditor's `reports` grows"
    COUNT_LAPSE = "the auditor's `lapsed` grows"
    DISPUTE = "a dispute about the proposal opens, or the author joins the open one"
    UPHOLD = "`upheld` of each challenger grows"
    HOLD_AGAINST = "each challenge that is not a claim counts against its author"
    NOTE_CLAIMS = "each claim is noted for its author and the trainer"
    SUSPEND = "the trainer is suspended, unless it already is"
    COMPARE = "the auditor's `reports` in `loss_comparisons` grow"
    COUNT_WRONG = "the auditor's `wrong_losses` grows; the trainer is noted in `loss_comparisons`"
    LOSE_REWARD = "the trainer's reward for this proposal is lost"
    SUSPEND_AUDITOR = "the auditor is suspended"
    ROLL_BACK = "the job returns to the newest anchor at or before the update's round, unless this round is already undone"
    LOSE_REWARDS = "`suspensions` grows; rewards that have not vested are lost"
    FORGET = (
        "sealed losses about the trainer are dropped; noted claims about it, and the record of its wrong reports, are forgotten"
    )


@dataclass(frozen=True, slots=True)
class AuditTransition:
    after: AuditStage
    result: AuditResult | None = None  # result that the log records; None: no entry
    effects: tuple[AuditEffect, ...] = ()


AUDIT_TRANSITIONS: Mapping[tuple[AuditStage, AuditEvent], AuditTransition] = {
    (AuditStage.AWAITED, AuditEvent.PASSES): AuditTransition(AuditStage.OVER, AuditResult.PASSED, (AuditEffect.COUNT_REPORT,)),
    (AuditStage.AWAITED, AuditEvent.FAILS): AuditTransition(
        AuditStage.OVER, AuditResult.CHALLENGED, (AuditEffect.COUNT_REPORT, AuditEffect.DISPUTE)
    ),
    (AuditStage.AWAITED, AuditEvent.TIME): AuditTransition(AuditStage.OVER, AuditResult.LAPSED, (AuditEffect.COUNT_LAPSE,)),
    (AuditStage.AWAITED, AuditEvent.UNDONE): AuditTransition(AuditStage.OVER),
    (AuditStage.UNDISPUTED, AuditEvent.VOLUNTEERED): AuditTransition(AuditStage.AWAITED),
    (AuditStage.OPEN, AuditEvent.JUDGED): AuditTransition(AuditStage.OPEN),
    (AuditStage.OPEN, AuditEvent.GUILTY): AuditTransition(
        AuditStage.OVER, AuditResult.SUSPENDED, (AuditEffect.UPHOLD, AuditEffect.SUSPEND, AuditEffect.ROLL_BACK)
    ),
    (AuditStage.OPEN, AuditEvent.UNSEEN): AuditTransition(
        AuditStage.OVER, AuditResult.SUSPENDED, (AuditEffect.UPHOLD, AuditEffect.SUSPEND, AuditEffect.ROLL_BACK)
    ),
    (AuditStage.OPEN, AuditEvent.INNOCENT): AuditTransition(
        AuditStage.OVER, AuditResult.REFUTED, (AuditEffect.HOLD_AGAINST, AuditEffect.NOTE_CLAIMS)
    ),
    (AuditStage.OPEN, AuditEvent.SHUNNED): AuditTransition(
        AuditStage.OVER, AuditResult.SHUNNED, (AuditEffect.HOLD_AGAINST, AuditEffect.SUSPEND)
    ),
    (AuditStage.OPEN, AuditEvent.TIME): AuditTransition(AuditStage.OVER, AuditResult.DROPPED),
    (AuditStage.SEALED, AuditEvent.LOSS_RIGHT): AuditTransition(AuditStage.OVER, None, (AuditEffect.COMPARE,)),
    (AuditStage.SEALED, AuditEvent.LOSS_WRONG): AuditTransition(
        AuditStage.OVER, AuditResult.WRONG_LOSS, (AuditEffect.COMPARE, AuditEffect.COUNT_WRONG)
    ),
    (AuditStage.SEALED, AuditEvent.LOSS_LAZY): AuditTransition(
        AuditStage.OVER, AuditResult.LAZY, (AuditEffect.COMPARE, AuditEffect.COUNT_WRONG, AuditEffect.SUSPEND_AUDITOR)
    ),
    (AuditStage.SEALED, AuditEvent.TIME): AuditTransition(AuditStage.OVER, None, (AuditEffect.LOSE_REWARD,)),
    (AuditStage.SEALED, AuditEvent.VOID): AuditTransition(AuditStage.OVER),
    (AuditStage.TRAINS, AuditEvent.CONVICTED): AuditTransition(
        AuditStage.SUSPENDED, None, (AuditEffect.LOSE_REWARDS, AuditEffect.FORGET)
    ),
    (AuditStage.SUSPENDED, AuditEvent.TIME): AuditTransition(AuditStage.TRAINS),
}

assert {moved.after for moved in AUDIT_TRANSITIONS.values()} >= {stage for stage, _ in AUDIT_TRANSITIONS} - {
    AuditStage.AWAITED,
    AuditStage.UNDISPUTED,
    AuditStage.SEALED,
}
assert not any(stage is AuditStage.OVER for stage, _ in AUDIT_TRANSITIONS)  # no transition leaves the stage OVER
# Every result in the log belongs to a transition. The suspension itself is no result, because the log records its cause.
assert {moved.result for moved in AUDIT_TRANSITIONS.values()} - {None} == set(AuditResult)
