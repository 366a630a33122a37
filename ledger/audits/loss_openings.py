"""The opening of losses by trainers: its conditions and consequences. `ledger.audits.loss_commitments` seals and compares losses.

A wrong loss convicts only an auditor, and only if more than f voters contradict it (decision 0061).
"""

from __future__ import annotations

from dataclasses import replace

from consensus.voter_set import faults_tolerated
from ledger.audits import loss_commitments
from ledger.audits.audit_state import AuditFinding
from ledger.audits.audit_tables import LATER_THAN_ANY_ROUND, AuditTables
from ledger.audits.disputes import lose_reward, suspend_trainer
from ledger.audits.transitions import AUDIT_TRANSITIONS, AuditEffect, AuditEvent, AuditStage
from ledger.core.module import Refused
from protocol.identity import short_id
from protocol.messages import Proposal
from protocol.units import display_round_number
from protocol.verdicts import ReplayFinding


def keep_sealed_loss(tables: AuditTables, auditor: bytes, report: AuditFinding, proposal: Proposal) -> None:
    """Keep the sealed loss of a report. Raises `Refused` if the report lacks a required loss, or has one that is not required."""
    is_bound = tables.is_rewarded and report.finding is ReplayFinding.MATCH and proposal.loss is not None
    if is_bound != (report.loss is not None):
        raise Refused("a match must contain a sealed loss" if is_bound else "this report must not contain a loss")
    if report.loss is not None and proposal.loss is not None:
        of = tables.unopened_losses.setdefault(report.round, {})
        new = loss_commitments.UnopenedLosses(proposal.loss, {}, len(tables.rounds[report.round].reexecutors))
        known = of.get(report.trainer, new)
        of[report.trainer] = replace(known, reports={**known.reports, auditor: report.loss})


def may_open_loss(tables: AuditTables, number: int, trainer: bytes) -> bool:
    """Return whether no further report on this proposal is possible.

    A re-executor whose ballot was omitted may draw for this round whenever a later round of the window closes. The last draws
    are in the block that ends the job, because this block may also close a round.
    """
    drawn = tables.find_proposal((number, trainer))
    is_awaited = drawn is not None and bool(drawn.pending_auditors)
    has_ended = tables.job.is_trained and tables.job.opened_height < tables.height
    return not is_awaited and (has_ended or not tables.has_rounds(number))


def apply_loss_opening(tables: AuditTables, author: bytes, opening: loss_commitments.LossOpening) -> None:
    """Open the loss that a trainer's proposal committed to, and compare each report with it.

    Raises `Refused` if it may not be opened now.
    """
    of, trainer = tables.unopened_losses.get(opening.round, {}), opening.trainer
    known = of.get(trainer)
    if known is None or tables.current_key(trainer) != author:
        raise Refused(
            f"{short_id(author)} has no loss of {short_id(trainer)} to open in round {display_round_number(opening.round)}"
        )
    if not may_open_loss(tables, opening.round, trainer):
        raise Refused("the loss cannot be opened yet: reports on its proposal are still possible")
    if not loss_commitments.is_valid_opening(known.commitment, opening):
        raise Refused("the opened loss does not match the proposal's commitment")
    del of[trainer]
    for auditor, report in known.reports.items():
        if tables.is_trusted(auditor):
            _compare_loss(tables, auditor, report, opening)


def _compare_loss(
    tables: AuditTables, auditor: bytes, report: loss_commitments.SealedLoss, opening: loss_commitments.LossOpening
) -> None:
    current, faults, place = tables.current_key, faults_tolerated(len(tables.job.voters)), (opening.round, opening.trainer)
    said = loss_commitments.unseal_loss(report, tables.key, *place, auditor, opening.secret)
    wrong, person = loss_commitments.is_wrong_loss(said, opening.loss), current(auditor)
    before = tables.loss_comparisons.get(person, loss_commitments.LossComparisons())
    known = loss_commitments.add_comparison(before, current(opening.trainer), wrong, faults)
    if not wrong:
        event = AuditEvent.LOSS_RIGHT
    elif loss_commitments.is_lazy_auditor(known, set(map(current, tables.job.voters)), faults):
        event = AuditEvent.LOSS_LAZY
    else:
        event = AuditEvent.LOSS_WRONG
    moved = AUDIT_TRANSITIONS[AuditStage.SEALED, event]
    if moved.result is not None:
        tables.log_result(place, auditor, moved.result, ReplayFinding.MATCH)
    for effect in moved.effects:
        match effect:
            case AuditEffect.COMPARE:
                tables.loss_comparisons[person] = known
            case AuditEffect.COUNT_WRONG:
                tables.count(person, wrong_losses=1)
            case AuditEffect.SUSPEND_AUDITOR:
                suspend_trainer(tables, person, tables.log[-1])
            case _:
                raise AssertionError(f"{effect!r} of a sealed loss")


def end_unopened_losses(tables: AuditTables, now_ms: int | None) -> None:
    """Drop sealed losses whose trainer did not open its own loss in time. The trainer loses its reward for that round.

    A trainer has as much time as auditors had for reports. After the job's end a trainer loses no reward, because its peer may
    have stopped.
    """
    if tables.closed == LATER_THAN_ANY_ROUND:
        tables.unopened_losses.clear()
    for number, of in tables.unopened_losses.items():
        for trainer, known in list(of.items()):
            if known.since is None:
                if may_open_loss(tables, number, trainer):
                    of[trainer] = replace(known, since=tables.closed, since_ms=now_ms or 0)
                continue
            has_time = (now_ms or 0) < known.since_ms + tables.terms.window_ms(known.reexecutors)
            if not tables.has_rounds(known.since) and not has_time:
                del of[trainer]
                lose_reward(tables, number, trainer)
