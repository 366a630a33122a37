"""Disputes about accepted proposals: how one opens, who judges it, how it ends, and what follows. Decision 0033 says why.

And what trainers, and auditors that are lazy, gain and lose: rewards and suspensions.
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
        raise Refused(f"{short_id(challenger)} was found wrong too often to be heard for now")
    mine = [of for of in tables.disputes.values() if challenger in map(tables.current_key, of.challenges)]
    if len(mine) >= CHALLENGES_OPEN_MAX:
        raise Refused(f"{CHALLENGES_OPEN_MAX} challenges of {short_id(challenger)} are open, the most at once")


def challenge_proposal(tables: AuditTables, auditor: bytes, report: AuditFinding) -> None:
    """Opens a dispute or joins it. A challenge counts as a verdict, unless its author gave one before."""
    require_may_challenge(tables, tables.current_key(auditor))
    dispute = tables.disputes.get(report.proposal_key) or Dispute(*report.proposal_key, tables.job.round, {}, (), ())
    if auditor not in dispute.judges_heard:
        dispute = _with_verdict(dispute, auditor, report.finding)
    challenges = dict(sorted({**dispute.challenges, auditor: report.finding}.items()))
    _weigh_verdicts(tables, replace(dispute, challenges=challenges))


def apply_verdict(tables: AuditTables, author: bytes, verdict: AuditFinding) -> None:
    """A judge gives its verdict on an open dispute."""
    if verdict.loss is not None:
        raise Refused("no loss belongs here")
    dispute = tables.disputes.get(verdict.proposal_key)
    if dispute is None:
        raise Refused("no dispute about that proposal is open")
    judge = tables.find_key(_judges(tables, dispute), author)
    if judge is None:
        raise Refused(f"{short_id(author)} may not judge this dispute")
    is_second = dispute.may_judge_again(judge) and verdict.finding is not ReplayFinding.WITHHELD
    if judge in dispute.judges_heard and not is_second:
        raise Refused(f"{short_id(author)} has given its verdict")
    others = replace(dispute, voted_withheld=tuple(key for key in dispute.voted_withheld if key != judge))
    _weigh_verdicts(tables, _with_verdict(others, judge, verdict.finding))


def _judges(tables: AuditTables, dispute: Dispute) -> list[bytes]:
    """The round's re-executors but the accused, under whatever key."""
    accused = tables.current_key(dispute.trainer)
    return [key for key in tables.rounds[dispute.round].reexecutors if tables.current_key(key) != accused]


def _with_verdict(dispute: Dispute, judge: bytes, finding: ReplayFinding) -> Dispute:
    if finding is ReplayFinding.MATCH:
        return replace(dispute, voted_valid=(*dispute.voted_valid, judge))
    if finding is ReplayFinding.WITHHELD:
        return replace(dispute, voted_withheld=(*dispute.voted_withheld, judge))
    return replace(dispute, voted_invalid=(*dispute.voted_invalid, judge))


def _weigh_verdicts(tables: AuditTables, dispute: Dispute) -> None:
    """The dispute after one more challenge or verdict: it ends if one side has enough."""
    tables.disputes[dispute.proposal_key] = dispute
    audits, judges = tables.rounds[dispute.round], _judges(tables, dispute)
    assert len(set(dispute.judges_heard)) == len(dispute.judges_heard), "one verdict each"
    assert dispute.challenges.keys() <= set(dispute.judges_heard) <= set(audits.reexecutors), "a challenge is a verdict"
    # More than half of the judges, so that both sides cannot have it; and more than f, so that one of them is honest.
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
    """Whether a liar showed its false proposal to some judges alone. Of more than f that found it false one is honest."""
    return guilty > faults and guilty + unseen >= needed


# Its end ----------------------------------------------------------------------------------------------------------------


def end_dispute(tables: AuditTables, event: AuditEvent, dispute: Dispute) -> None:
    """The dispute ends by this event, with the consequences that `AUDIT_TRANSITIONS` has."""
    moved, trainer = AUDIT_TRANSITIONS[AuditStage.OPEN, event], tables.current_key(dispute.trainer)
    assert moved.after is AuditStage.OVER
    del tables.disputes[dispute.proposal_key]
    # Auditors go on with the trainer's other proposals, so the time for these begins anew.
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
# An auditor says `withheld`, most judges disagree: auditor or trainer lies, we cannot tell which. So the claim counts against
# neither. After three claims the auditor is apart from the trainer: it is not drawn for it. At most f auditors lie, so a trainer
# apart from more than f auditors is the liar: it is shunned.


def auditors_apart(claims: WithheldClaims) -> set[bytes]:
    """The auditors that are not drawn for a trainer about which they made these claims."""
    return {auditor for auditor, rounds in claims.items() if len(rounds) == FALSE_CHALLENGES_MAX}


def _claims_with(tables: AuditTables, dispute: Dispute) -> WithheldClaims:
    """The noted claims about the dispute's trainer, once its own are among them."""
    claims = dict(tables.withheld_claims.get(tables.current_key(dispute.trainer), {}))
    for key, finding in dispute.challenges.items():
        if finding is ReplayFinding.WITHHELD:
            auditor = tables.current_key(key)
            claims[auditor] = (*claims.get(auditor, ()), tables.job.round)[-FALSE_CHALLENGES_MAX:]
    return claims


def _is_to_be_shunned(tables: AuditTables, dispute: Dispute) -> bool:
    if ReplayFinding.WITHHELD not in dispute.challenges.values():
        return False  # a challenge without a claim tells nothing about who is apart
    audits = tables.rounds[dispute.round]
    # f of this round's voters may lie. An auditor outside this round may be a liar of other voters, and gone.
    reexecutors = {tables.current_key(key) for key in audits.reexecutors}
    return len(auditors_apart(_claims_with(tables, dispute)) & reexecutors) > audits.faults


def forget_claims(tables: AuditTables) -> None:
    """Claims are kept for `suspension_rounds` rounds: an honest auditor's bad days must not add up over years, and a liar gets no
    more claims in that time than three.
    """
    first = tables.closed + 1 - tables.terms.suspension_rounds
    for trainer, claims in list(tables.withheld_claims.items()):
        recent = {key: tuple(number for number in rounds if number >= first) for key, rounds in claims.items()}
        tables.withheld_claims[trainer] = {key: rounds for key, rounds in recent.items() if rounds}
    tables.withheld_claims = {trainer: claims for trainer, claims in tables.withheld_claims.items() if claims}


# Rewards and suspensions ------------------------------------------------------------------------------------------------
# There is one reward for each accepted proposal. It vests once nothing about its round is open; until then it can be lost.


def add_rewards(tables: AuditTables, number: int, accepted: Mapping[bytes, Proposal]) -> None:
    """The accepted proposals of a closed round, by trainer. A trainer that was suspended meanwhile gets no reward."""
    for trainer, proposal in accepted.items() if tables.is_rewarded else ():
        if proposal.loss is not None and tables.is_trusted(trainer):
            person = tables.current_key(trainer)
            tables.unvested_rounds[person] = (*tables.unvested_rounds.get(person, ()), number)


def vest_rewards(tables: AuditTables) -> None:
    """A reward is the trainer's own once the window of its round is over, no dispute about that round is open, no report on it is
    awaited, and none waits for the trainer's loss.
    """
    current = tables.current_key
    for trainer, rounds in tables.unvested_rounds.items():
        is_open = tables.rounds_awaiting_reports(trainer)
        is_open |= {dispute.round for dispute in tables.disputes.values() if current(dispute.trainer) == trainer}
        is_open |= {number for number, of in tables.unopened_losses.items() if trainer in map(current, of)}
        waiting = tuple(number for number in rounds if tables.has_rounds(number) or number in is_open)
        tables.count(trainer, rewards=len(rounds) - len(waiting))
        tables.unvested_rounds[trainer] = waiting


def lose_reward(tables: AuditTables, number: int, trainer: bytes) -> None:
    """The trainer did not open the loss of this round in time."""
    assert AUDIT_TRANSITIONS[AuditStage.SEALED, AuditEvent.TIME].effects == (AuditEffect.LOSE_REWARD,)
    person = tables.current_key(trainer)
    rounds = tables.unvested_rounds.get(person, ())
    if number in rounds:
        tables.count(person, rewards_lost=1)
        tables.unvested_rounds[person] = tuple(other for other in rounds if other != number)


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
