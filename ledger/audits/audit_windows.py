"""Windows: how long reports and verdicts are awaited. A window ends once its rounds have closed and its time is over."""

from __future__ import annotations

from dataclasses import replace

from ledger.audits.assignments import lapse_reports
from ledger.audits.audit_tables import LATER_THAN_ANY_ROUND, AuditTables
from ledger.audits.disputes import end_dispute
from ledger.audits.transitions import AuditEvent


def end_windows(tables: AuditTables, now_ms: int | None) -> None:
    """Reports lapse, and disputes end, where the window is over. `now_ms` is the time of the parent block; None: no times."""
    if now_ms is not None:
        _date_windows(tables, max(1, now_ms))
    # Reports on these trainers wait for a dispute: time does not run for them.
    held_up = frozenset(tables.current_key(dispute.trainer) for dispute in tables.disputes.values())
    for number, audits in list(tables.rounds.items()):
        if not tables.has_rounds(number) and not _has_time(tables, number, audits.closed_ms, now_ms):
            lapse_reports(tables, number, held_up if now_ms is not None and audits.may_renew_window else frozenset())
    for dispute in list(tables.disputes.values()):
        # A judge that did not see the proposal gets it from those that did.
        windows = 2 if dispute.voted_invalid and dispute.voted_withheld else 1
        has_time = _has_time(tables, dispute.round, dispute.opened_ms, now_ms, windows)
        if not tables.has_rounds(dispute.opened) and not has_time:
            end_dispute(tables, AuditEvent.TIME, dispute)


def _date_windows(tables: AuditTables, now_ms: int) -> None:
    """Notes a time for each round that closed, and each dispute that opened, before the parent block.

    The block that closes a round does not know its own time, and its parent may be much older: a window that began then would be
    too short. So the window begins at the parent of the block that closes the next round. Judges fetch one disputed proposal of a
    trainer at a time (`first_duty_of_each_trainer`), so the window of the next dispute begins when the one before it ends.
    """
    for number, audits in tables.rounds.items():
        if not audits.closed_ms:
            tables.rounds[number] = replace(audits, closed_ms=now_ms)
    first = {tables.current_key(dispute.trainer): dispute for dispute in reversed(tables.disputes.values())}
    for dispute in first.values():
        if not dispute.opened_ms and dispute.opened < tables.closed:  # others may have opened in this very block
            tables.disputes[dispute.proposal_key] = replace(dispute, opened_ms=now_ms)


def _has_time(tables: AuditTables, number: int, since_ms: int, now_ms: int | None, windows: int = 1) -> bool:
    """Whether time is left of so many windows that began then, for re-executors of that round."""
    window_ms = tables.terms.window_ms(len(tables.rounds[number].reexecutors))
    if tables.closed == LATER_THAN_ANY_ROUND:  # no rounds close in which re-executors work
        window_ms += tables.window_rounds_ms
    return now_ms is not None and (not since_ms or now_ms < since_ms + windows * window_ms)
