"""Disputes about accepted proposals: how they begin, who judges them, and how they end. Decision 0033 gives the reasons.

Rewards of trainers, and suspensions of trainers and lazy auditors, are also in this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ledger.audits.audit_state import (
    CHALLENGES_OPEN_MAX,
    FALSE_CHALLENGES_MAX,
    AuditFinding,
    AuditLogEntry,
    Dispute,
    WithheldClaims,
)
from ledger.audits.audit_tables import AuditTables
from ledger.audits.transitions import AUDIT_TRANSITIONS, AuditEffect, AuditEvent, AuditStage
from ledger.core.module import Refused
from ledger.jobs import SUSPENSION_DOUBLINGS_MAX, RollbackDue
from ledger.model_anchors import UndoReason
from protocol.identity import short_id
from protocol.messages import Proposal
from protocol.verdicts import ReplayFinding

# Opening and judging ----------------------------------------------------------------------------------------------------


def require_may_challenge(tables: AuditTables, challenger: bytes) -> None:
    if tables.ignored_challengers.get(challenger, 0) > tables.job.round:
        raise Refused(f"{short_id(challenger)} cannot challenge now: too many of its challenges were refuted")
    mine = [of for of in tables.disputes.values() if challenger in map(tables.current_key, of.challenges)]
    if len(mine) >= CHALLENGES_OPEN_MAX:
        raise Refused(f"{short_id(challenger)} already has {CHALLENGES_OPEN_MAX} open challenges, the maximum")


def challenge_proposal(tables: AuditTables, auditor: bytes, report: AuditFinding) -> None:
    """Begin a dispute about a proposal, or join an open one.

    A challenge counts as a verdict unless its author gave one before. Raises `Refused`.
    """
    require_may_challenge(tables, tables.current_key(auditor))
    dispute = tables.disputes.get(report.proposal_key) or Dispute(*report.proposal_key, tables.job.round, {}, (), ())
    if auditor not in dispute.judges_heard:
        dispute = _with_verdict(dispute, auditor, report.finding)
    challenges = dict(sorted({**dispute.challenges, auditor: report.finding}.items()))
    _weigh_verdicts(tables, replace(dispute, challenges=challenges))


def apply_verdict(tables: AuditTables, author: bytes, verdict: AuditFinding) -> None:
    """Add a judge's verdict to an open dispute. Raises `Refused` if it is not due."""
    if verdict.loss is not None:
        raise Refused("a verdict must not contain a loss")
    dispute = tables.disputes.get(verdict.proposal_key)
    if dispute is None:
        raise Refused("no dispute about this proposal is open")
    judge = tables.find_key(_judges(tables, dispute), author)
    if judge is None:
        raise Refused(f"{short_id(author)} is not a judge of this dispute")
    is_second = dispute.may_judge_again(judge) and verdict.finding is not ReplayFinding.WITHHELD
    if judge in dispute.judges_heard and not is_second:
        raise Refused(f"{short_id(author)} has already given its verdict")
    others = replace(dispute, voted_withheld=tuple(key for key in dispute.voted_withheld if key != judge))
    _weigh_verdicts(tables, _with_verdict(others, judge, verdict.finding))


def _judges(tables: AuditTables, dispute: Dispute) -> list[bytes]:
    """Return the round's re-executors except the accused under any of its keys."""
    accused = tables.current_key(dispute.trainer)
    return [key for key in tables.rounds[dispute.round].reexecutors if tables.current_key(key) != accused]


def _with_verdict(dispute: Dispute, judge: bytes, finding: ReplayFinding) -> Dispute:
    if finding is ReplayFinding.MATCH:
        return replace(dispute, voted_valid=(*dispute.voted_valid, judge))
    if finding is ReplayFinding.WITHHELD:
        return replace(dispute, voted_withheld=(*dispute.voted_withheld, judge))
    return replace(dispute, voted_invalid=(*dispute.voted_invalid, judge))


def _weigh_verdicts(tables: AuditTables, dispute: Dispute) -> None:
    """Update the dispute after one more challenge or verdict. End the dispute if one side has enough verdicts."""
    tables.disputes[dispute.proposal_key] = dispute
    audits, judges = tables.rounds[dispute.round], _judges(tables, dispute)
    assert len(set(dispute.judges_heard)) == len(dispute.judges_heard), "a judge has one verdict"
    assert dispute.challenges.keys() <= set(dispute.judges_heard) <= set(audits.reexecutors), "a challenge is a verdict"
    # A side needs more than half of the judges, so that only one side can win. It also needs more than f judges, so that one of
    # them is honest.
    needed = max(len(judges) // 2 + 1, audits.faults + 1)
    assert 2 * needed > len(judges) and needed > audits.faults
    guilty, unseen = len(dispute.voted_invalid), len(dispute.voted_withheld)
    if guilty >= needed or is_shown_selectively(guilty, unseen, needed, audits.faults):
        end_dispute(tables, AuditEvent.GUILTY, dispute)
    elif unseen >= needed:
        end_dispute(tables, AuditEvent.UNSEEN, dispute)
    elif len(dispute.voted_valid) >= needed:
        end_dispute(tables, AuditEvent.SHUNNED if _is_to_be_shunned(tables, dispute) else AuditEvent.INNOCENT, dispute)
    else:
        assert AUDIT_TRANSITIONS[AuditStage.OPEN, AuditEvent.JUDGED].after is AuditStage.OPEN


def is_shown_selectively(guilty: int, unseen: int, needed: int, faults: int) -> bool:
    """Return whether a trainer sent the data of its false proposal only to some judges: one of more than f verdicts against it is
    honest.
    """
    return guilty > faults and guilty + unseen >= needed


# End of a dispute --------------------------------------------------------------------------------------------------------


def end_dispute(tables: AuditTables, event: AuditEvent, dispute: Dispute) -> None:
    """End the dispute because of this event, with the effects that `AUDIT_TRANSITIONS` lists."""
    moved, trainer = AUDIT_TRANSITIONS[AuditStage.OPEN, event], tables.current_key(dispute.trainer)
    assert moved.after is AuditStage.OVER
    del tables.disputes[dispute.proposal_key]
    # Auditors now continue with the trainer's other proposals, so the window for reports on these proposals restarts.
    for number in tables.rounds_awaiting_reports(trainer):
        audits = tables.rounds[number]
        if audits.may_renew_window:
            tables.rounds[number] = replace(audits, closed_ms=0, window_renewals=audits.window_renewals + 1)
    challengers, first = {tables.current_key(key): of for key, of in dispute.challenges.items()}, next(iter(dispute.challenges))
    finding = ReplayFinding.WITHHELD if event is AuditEvent.UNSEEN else dispute.challenges[first]
    tables.log_result(dispute.proposal_key, first, moved.result, finding)
    for effect in moved.effects:
        match effect:
            case AuditEffect.UPHOLD:
                for person in challengers:
                    tables.count(person, upheld=1)
            case AuditEffect.HOLD_AGAINST:
                for person in (person for person, finding in challengers.items() if finding is not ReplayFinding.WITHHELD):
                    hold_against(tables, person)
            case AuditEffect.NOTE_CLAIMS:
                if ReplayFinding.WITHHELD in challengers.values():
                    tables.withheld_claims[trainer] = _claims_with(tables, dispute)
            case AuditEffect.SUSPEND:
                suspend_trainer(tables, trainer, tables.log[-1])
            case AuditEffect.ROLL_BACK:
                reason = UndoReason.WITHHELD if event is AuditEvent.UNSEEN else UndoReason.FALSE
                if not tables.rounds[dispute.round].undone:
                    tables.rollbacks_due.append(RollbackDue(tables.key, dispute.round, reason, dispute.trainer))
            case _:
                raise AssertionError(f"{effect!r} of a dispute")


def hold_against(tables: AuditTables, challenger: bytes) -> None:
    tables.count(challenger, refuted=1)
    if tables.member_record(challenger).refuted % FALSE_CHALLENGES_MAX == 0:
        tables.ignored_challengers[challenger] = tables.job.round + 1 + tables.terms.suspension_rounds


# Claims -----------------------------------------------------------------------------------------------------------------
# A claim is an auditor's challenge with the finding `withheld`. If most judges disagree, no peer can tell whether the auditor
# or the trainer is dishonest. The claim therefore counts against neither of them. After three claims, the auditor is separated
# from the trainer: it is no longer drawn for the trainer's proposals. At most f auditors are faulty. A trainer that is
# separated from more than f auditors is therefore faulty itself, and is suspended (`shunned`).


def auditors_apart(claims: WithheldClaims) -> set[bytes]:
    """Return the auditors that are separated from the trainer of these claims."""
    return {auditor for auditor, rounds in claims.items() if len(rounds) == FALSE_CHALLENGES_MAX}


def _claims_with(tables: AuditTables, dispute: Dispute) -> WithheldClaims:
    """Return auditor -> rounds of its claims about the dispute's trainer, including the claims in this dispute."""
    claims = dict(tables.withheld_claims.get(tables.current_key(dispute.trainer), {}))
    for key, finding in dispute.challenges.items():
        if finding is ReplayFinding.WITHHELD:
            auditor = tables.current_key(key)
            claims[auditor] = (*claims.get(auditor, ()), tables.job.round)[-FALSE_CHALLENGES_MAX:]
    return claims


def _is_to_be_shunned(tables: AuditTables, dispute: Dispute) -> bool:
    if ReplayFinding.WITHHELD not in dispute.challenges.values():
        return False  # a challenge with another finding separates no auditor from the trainer
    audits = tables.rounds[dispute.round]
    # At most f of this round's voters are faulty. Auditors of other rounds do not count: they may be faulty voters that have
    # left.
    reexecutors = {tables.current_key(key) for key in audits.reexecutors}
    return len(auditors_apart(_claims_with(tables, dispute)) & reexecutors) > audits.faults


def forget_claims(tables: AuditTables) -> None:
    """Forget claims after `suspension_rounds` rounds.

    Otherwise occasional failures of an honest auditor would add up over years. A faulty auditor gets only three claims in that
    time.
    """
    first = tables.closed + 1 - tables.terms.suspension_rounds
    for trainer, claims in list(tables.withheld_claims.items()):
        recent = {key: tuple(number for number in rounds if number >= first) for key, rounds in claims.items()}
        tables.withheld_claims[trainer] = {key: rounds for key, rounds in recent.items() if rounds}
    tables.withheld_claims = {trainer: claims for trainer, claims in tables.withheld_claims.items() if claims}


# Rewards and suspensions ------------------------------------------------------------------------------------------------
# Each accepted proposal earns its trainer one reward. The reward vests once nothing about the round is open. Until then, the
# trainer can lose it.


def add_rewards(tables: AuditTables, number: int, accepted: Mapping[bytes, Proposal]) -> None:
    """Add one unvested reward for each accepted proposal of a closed round. `accepted` maps trainers to proposals."""
    for trainer, proposal in accepted.items() if tables.is_rewarded else ():
        if proposal.loss is not None and tables.is_trusted(trainer):
            person = tables.current_key(trainer)
            tables.unvested_rounds[person] = (*tables.unvested_rounds.get(person, ()), number)


def vest_rewards(tables: AuditTables) -> None:
    """Vest rewards of rounds without an open window, an open dispute, an awaited report or an unopened loss of the trainer."""
    current = tables.current_key
    for trainer, rounds in tables.unvested_rounds.items():
        is_open = tables.rounds_awaiting_reports(trainer)
        is_open |= {dispute.round for dispute in tables.disputes.values() if current(dispute.trainer) == trainer}
        is_open |= {number for number, of in tables.unopened_losses.items() if trainer in map(current, of)}
        waiting = tuple(number for number in rounds if tables.has_rounds(number) or number in is_open)
        tables.count(trainer, rewards=len(rounds) - len(waiting))
        tables.unvested_rounds[trainer] = waiting


def lose_reward(tables: AuditTables, number: int, trainer: bytes) -> None:
    """Cancel the reward of a trainer that did not open its loss of this round in time."""
    assert AUDIT_TRANSITIONS[AuditStage.SEALED, AuditEvent.TIME].effects == (AuditEffect.LOSE_REWARD,)
    person = tables.current_key(trainer)
    rounds = tables.unvested_rounds.get(person, ())
    if number in rounds:
        tables.count(person, rewards_lost=1)
        tables.unvested_rounds[person] = tuple(other for other in rounds if other != number)


def suspend_trainer(tables: AuditTables, trainer: bytes, cause: AuditLogEntry) -> None:
    """Suspend a trainer or auditor. One suspension covers all its earlier faults.

    Disputes and reports about its other updates continue, because each of these may find another false update in the model.
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
    """End suspensions of trainers, and exclusions of challengers, whose last round has closed."""
    assert AUDIT_TRANSITIONS[AuditStage.SUSPENDED, AuditEvent.TIME].after is AuditStage.TRAINS
    opens = tables.closed + 1
    tables.suspended = {key: until for key, until in tables.suspended.items() if until > opens}
    tables.suspension_causes = {key: tables.suspension_causes[key] for key in tables.suspended}
    tables.ignored_challengers = {key: until for key, until in tables.ignored_challengers.items() if until > opens}
