"""Results of audits and suspensions in words, and as events of this peer."""

from __future__ import annotations

from collections.abc import Iterator

from ledger.audits.audit_state import AuditLogEntry, AuditResult
from ledger.ledger_state import LedgerState
from peer.runtime.driver import Driver
from protocol.identity import short_id
from protocol.units import display_round_number
from protocol.verdicts import INVALID_UPDATES_REASON, OBJECTIVE_CODES_FIRST, verdict_label
from training.job_spec import JobSpec


class AuditEventLog:
    """Adds an event for each new entry of the decided log, and for each suspension of this peer."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._height = driver.state.height  # entries up to here have been shown to people
        self._suspended: dict[bytes, int] = {}

    def log_results(self) -> None:
        state, events, me = self._driver.state, self._driver.events, self._driver.signer.public
        for entry in state.audits.log:
            if entry.height > self._height:
                tell = events.add_detail if entry.result is AuditResult.PASSED else events.add
                tell("audit", describe_audit_entry(entry, state), job=entry.job, round=entry.round, peer=entry.trainer)
        self._height = state.height
        suspended = dict(_suspensions(me, state))
        for job, until in suspended.items():
            if self._suspended.get(job) != until:
                text = f"{suspension_reason(me, state)}; this peer does not train {state.jobs.jobs[job].name!r} until then"
                events.add("warning", text, job=job)
        self._suspended = suspended


def describe_audit_entry(entry: AuditLogEntry, state: LedgerState) -> str:
    """One result of an audit, as a line."""
    auditor, trainer = (short_id(state.members.current_key(key)) for key in (entry.auditor, entry.trainer))
    where = f"{trainer} in round {display_round_number(entry.round)}"
    found = f" ({finding_label(entry, state)})" if entry.finding is not None else ""
    match entry.result:
        case AuditResult.PASSED:
            return f"{auditor} replayed {where}: passed"
        case AuditResult.CHALLENGED:
            return f"{auditor} challenges {where}{found}"
        case AuditResult.LAPSED:
            return f"{auditor} did not report on {where} in time"
        case AuditResult.SUSPENDED:
            return f"{trainer} is suspended: most re-executors confirm what {auditor} found{found}"
        case AuditResult.REFUTED:
            return f"most re-executors find nothing wrong with {where}, which {auditor} challenged{found}"
        case AuditResult.SHUNNED:
            return f"{trainer} is suspended: too many could not get what it commits to, though most find nothing wrong"
        case AuditResult.DROPPED:
            return f"too few judged {where}, which {auditor} challenged{found}: nothing follows"
        case AuditResult.WRONG_LOSS:
            return f"{auditor} reported another loss of {where} than {trainer} opened: one of the two is wrong"
        case AuditResult.LAZY:
            return (
                f"{auditor} is suspended: more trainers contradict the losses that it reports than may lie, the last is {where}"
            )


def finding_label(entry: AuditLogEntry, state: LedgerState) -> str:
    """Empty if it has no finding."""
    if entry.finding is None or entry.finding < OBJECTIVE_CODES_FIRST:
        return entry.finding.label if entry.finding is not None else ""
    job = state.jobs.jobs.get(entry.job)
    return verdict_label(entry.finding, JobSpec.decode(job.spec).resolved_objective.reason_labels if job else ())


def _suspensions(person: bytes, state: LedgerState) -> Iterator[tuple[bytes, int]]:
    """(running job, the first round in which this member trains again)."""
    for key, job in state.jobs.running().items():
        until = max(state.audits.suspensions_in(key).get(person, 0), job.suspended_trainers.get(person, 0))
        if until > job.round:
            yield key, until


def suspension_reason(person: bytes, state: LedgerState) -> str:
    """Until when and why this member does not train; empty if it may."""
    for job, until in _suspensions(person, state):
        since = f"suspended until round {display_round_number(until)}"
        if state.audits.suspensions_in(job).get(person) != until:
            return f"{since}: {INVALID_UPDATES_REASON}"
        cause = state.audits.jobs[job].suspension_causes[person]
        if cause.result is AuditResult.SHUNNED:
            return f"{since}: too many could not get what it commits to"
        if cause.result is AuditResult.LAZY:
            return f"{since}: it reported other losses than the trainers had, as if it replayed nothing"
        found = finding_label(cause, state) or "failed"
        return f"{since}: replay {found} found by {short_id(state.members.current_key(cause.auditor))}"
    return ""
