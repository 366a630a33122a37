"""Rewards: one for each accepted proposal. A reward vests once nothing about its round is open; until then it can be lost."""

from __future__ import annotations

from collections.abc import Mapping

from ledger.audits.audit_tables import AuditTables
from ledger.audits.transitions import AUDIT_TRANSITIONS, AuditEffect, AuditEvent, AuditStage
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
