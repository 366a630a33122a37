"""Members that a job limits for now: trainers that are suspended, and re-executors that are not asked, or asked last."""

from __future__ import annotations

from ledger.audits.audit_state import JobAudits
from ledger.jobs import MISSED_VOUCHES_MAX, WRONG_VOUCH_ROUNDS, WRONG_VOUCHES_MAX, Job, VouchRecord
from protocol.identity import peer_id
from protocol.units import display_round_number


def suspended_trainers(job: Job, audits: JobAudits) -> dict[bytes, int]:
    """By member, the first round in which it trains again."""
    after_audits = {trainer: until for trainer, until in audits.suspended.items() if until > job.round}
    before_votes = job.suspended_trainers
    both = sorted(after_audits.keys() | before_votes.keys())
    return {key: max(after_audits.get(key, 0), before_votes.get(key, 0)) for key in both}


def limited_reexecutors(job: Job) -> dict[str, str]:
    """The re-executors that are not asked in the open round, or are asked last: until when, and why."""
    limits = {peer_id(key): _limit(record, job.round) for key, record in sorted(job.vouch_records.items())}
    return {peer: text for peer, text in limits.items() if text}


def _limit(record: VouchRecord, round: int) -> str:
    if record.suspended_until > round:
        why = f"it vouched falsely in {WRONG_VOUCHES_MAX} of {WRONG_VOUCH_ROUNDS} rounds"
        return f"is not asked to re-execute until round {display_round_number(record.suspended_until)}: {why}"
    if record.assigned_last_until > round:
        why = f"it gave no vouch in {MISSED_VOUCHES_MAX} closings in a row"
        return f"is asked last to re-execute until round {display_round_number(record.assigned_last_until)}: {why}"
    return ""
