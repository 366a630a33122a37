"""Suspensions of trainers, and of auditors that are lazy: when they begin, what they cost, when they end."""

from __future__ import annotations

from ledger.audits.audit_state import AuditLogEntry
from ledger.audits.audit_tables import AuditTables
from ledger.audits.transitions import AUDIT_TRANSITIONS, AuditEffect, AuditEvent, AuditStage
from ledger.jobs import SUSPENSION_DOUBLINGS_MAX


def suspend_trainer(tables: AuditTables, trainer: bytes, cause: AuditLogEntry) -> None:
    """One suspension is enough for all that the trainer did before it.

    Its disputes and the reports on its updates go on: each of them may be about another lie in the model.
    """
    if trainer in tables.suspended:
        return
    times = min(tables.member_record(trainer).suspensions, SUSPENSION_DOUBLINGS_MAX)
    tables.suspended[trainer] = tables.job.round + 1 + (tables.terms.suspension_rounds << times)
    tables.suspension_causes[trainer] = cause
    moved = AUDIT_TRANSITIONS[AuditStage.TRAINS, AuditEvent.CONVICTED]
    assert moved.effects == (AuditEffect.LOSE_REWARDS, AuditEffect.FORGET)
    tables.count(trainer, suspensions=1, rewards_lost=len(tables.unvested_rounds.pop(trainer, ())))
    tables.withheld_claims.pop(trainer, None)
    tables.loss_comparisons.pop(trainer, None)
    for of in tables.unopened_losses.values():
        for key in [key for key in of if tables.current_key(key) == trainer]:
            del of[key]


def end_suspensions(tables: AuditTables) -> None:
    """Trainers and challengers whose round has come are suspended, and ignored, no more."""
    assert AUDIT_TRANSITIONS[AuditStage.SUSPENDED, AuditEvent.TIME].after is AuditStage.TRAINS
    opens = tables.closed + 1
    tables.suspended = {key: until for key, until in tables.suspended.items() if until > opens}
    tables.suspension_causes = {key: tables.suspension_causes[key] for key in tables.suspended}
    tables.ignored_challengers = {key: until for key, until in tables.ignored_challengers.items() if until > opens}
