"""Rewards and suspensions: what trainers, and auditors that are lazy, gain and lose.

There is one reward for each accepted proposal. It vests once nothing about its round is open; until then it can be lost.
"""

from __future__ import annotations

from collections.abc import Mapping

from ledger.audits.audit_state import AuditLogEntry
from ledger.audits.audit_tables import AuditTables
from ledger.audits.transitions import AUDIT_TRANSITIONS, AuditEffect, AuditEvent, AuditStage
from ledger.jobs import SUSPENSION_DOUBLINGS_MAX
from protocol.messages import Proposal


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
