"""Which audits fetch, and which waiting counts against a trainer: only what it knew of when it proposed."""

from __future__ import annotations

from typing import Any, cast

from ledger.audits.audit_state import AuditDuty
from ledger.members import MembersState
from peer.runtime.audits.audit_scheduler import FETCHING_AUDITS_MAX, AuditKey, AuditScheduler, audit_key

JOB, OTHER_JOB, TRAINER, OTHER = b"j" * 32, b"k" * 32, b"t" * 32, b"o" * 32
MEMBERS = MembersState({}, (TRAINER,), (TRAINER,), (TRAINER,))


def report(number: int, trainer: bytes = TRAINER, job: bytes = JOB) -> AuditDuty:
    return AuditDuty(job, number, trainer, cast("Any", None), False, number)


def dispute(number: int, opened: int) -> AuditDuty:
    return AuditDuty(JOB, number, TRAINER, cast("Any", None), True, opened)


class Auditor:
    """It begins what it may, asks all the time, and is told when an audit needs nothing more."""

    def __init__(self) -> None:
        self.turns, self.running, self.looked = AuditScheduler(), set[AuditKey](), 0.0

    def at(self, now: float, *due: AuditDuty, round: int, idle: tuple[AuditDuty, ...] = ()) -> dict[AuditKey, float]:
        """The audits that begin, with the seconds that they have waited as counts against their trainer."""
        for key in self.turns.fetching:
            self.turns.add_waited_seconds(key, now - self.looked)
        self.looked = now
        self.running &= {audit_key(item) for item in due}
        items = {audit_key(item): item for item in sorted(due, key=lambda item: (not item.is_dispute, item.since))}
        begins = self.turns.schedule_audits(
            items, {audit_key(item) for item in idle}, self.running, {JOB: round, OTHER_JOB: round}, MEMBERS
        )
        self.running |= begins
        return {key: self.turns.take_waited_seconds(key) for key in begins}


def test_a_report_waits_for_the_older_one_on_its_trainer_and_that_counts() -> None:
    auditor, first, second = Auditor(), report(1), report(2)
    assert auditor.at(0.0, first, round=2) == {audit_key(first): 0.0}
    assert auditor.at(10.0, first, second, report(2, OTHER), round=3) == {audit_key(report(2, OTHER)): 0.0}
    auditor.at(40.0, first, second, round=4)
    assert auditor.at(70.0, second, round=4) == {audit_key(second): 60.0}


def test_what_is_fetched_keeps_nobody_waiting() -> None:
    auditor, first, second = Auditor(), report(1), report(2)
    auditor.at(0.0, first, round=2)
    assert auditor.at(10.0, first, second, round=3, idle=(first,)) == {audit_key(second): 0.0}


def test_who_rests_waits_for_itself() -> None:
    auditor, first, second = Auditor(), report(1), report(2)
    auditor.at(0.0, first, round=2)
    auditor.at(10.0, first, second, round=3, idle=(second,))
    auditor.at(60.0, first, second, round=3)
    assert auditor.at(70.0, second, round=3) == {audit_key(second): 10.0}


def test_waiting_for_a_dispute_does_not_count_and_takes_nothing_back() -> None:
    auditor, judged, first, waits = Auditor(), dispute(1, opened=3), report(1), report(2)
    auditor.at(0.0, first, round=2)
    auditor.at(0.0, first, waits, round=3)
    auditor.at(10.0, judged, first, waits, round=3)
    auditor.at(50.0, first, waits, round=3)
    assert auditor.at(60.0, waits, round=4) == {audit_key(waits): 20.0}


def test_waiting_for_a_dispute_does_not_count_however_old_that_is() -> None:
    auditor, judged, waits = Auditor(), dispute(1, opened=3), report(4)
    auditor.at(0.0, judged, round=3)
    auditor.at(10.0, judged, waits, round=5)
    assert auditor.at(60.0, waits, round=5) == {audit_key(waits): 0.0}


def test_what_is_not_due_any_more_is_forgotten() -> None:
    auditor, first, second = Auditor(), report(1), report(2)
    auditor.at(0.0, first, round=2)
    auditor.at(10.0, first, second, round=3)
    auditor.at(60.0, first, round=3)
    assert auditor.at(70.0, second, round=3) == {audit_key(second): 0.0}


def test_reports_that_are_drawn_late_keep_none_waiting_that_was_proposed_before_they_were_drawn() -> None:
    """The ballots of this peer had missed rounds 2 and 3, so it draws for rounds 2, 3 and 4 at once. No trainer could know."""
    auditor, late, in_time, later = Auditor(), [report(2), report(3)], report(4), report(5)
    assert auditor.at(0.0, *late, in_time, round=5) == {audit_key(late[0]): 0.0}
    auditor.at(30.0, *late, in_time, later, round=6)
    assert auditor.at(60.0, late[1], in_time, later, round=6) == {audit_key(late[1]): 0.0}
    assert auditor.at(120.0, in_time, later, round=7) == {audit_key(in_time): 0.0}
    assert auditor.at(160.0, later, round=7) == {audit_key(later): 130.0}, "its trainer knew of all that when it proposed"


def test_a_look_that_comes_late_costs_a_trainer_nothing_and_saves_it_no_more_than_that_round() -> None:
    auditor, first, second, third = Auditor(), report(1), report(2), report(3)
    auditor.at(0.0, first, second, round=3)  # `first` has been due since round 2
    auditor.at(10.0, first, second, third, round=4)
    assert auditor.at(60.0, second, third, round=4) == {audit_key(second): 0.0}
    assert auditor.at(70.0, third, round=4) == {audit_key(third): 60.0}


def test_an_auditor_that_comes_back_charges_nothing_for_what_it_first_sees_then() -> None:
    auditor, missed, later = Auditor(), [report(5), report(6), report(7)], report(9)
    auditor.at(0.0, *missed, round=9)
    auditor.at(10.0, *missed, later, round=10)
    assert auditor.at(60.0, *missed[1:], later, round=10) == {audit_key(missed[1]): 0.0}
    assert auditor.at(110.0, missed[2], later, round=10) == {audit_key(missed[2]): 0.0}
    assert auditor.at(160.0, later, round=11) == {audit_key(later): 150.0}


def test_seconds_in_which_nothing_was_asked_for_count_for_nobody() -> None:
    """Nor is more counted than for the audit itself, where jobs share what a trainer's uplink shows."""
    auditor, first, second, of_other = Auditor(), report(1), report(2), report(2, OTHER)
    auditor.at(0.0, first, round=2)
    auditor.at(0.0, first, second, of_other, round=3)
    auditor.turns.add_waited_seconds(audit_key(first), 7.0)
    auditor.looked = 100.0
    assert auditor.at(100.0, second, of_other, round=3) == {audit_key(second): 7.0}


def test_what_fails_and_begins_again_has_waited_for_nothing() -> None:
    auditor, first, second = Auditor(), report(1), report(2)
    auditor.at(0.0, first, round=2)
    auditor.at(10.0, first, second, round=3)
    assert auditor.at(70.0, second, round=3) == {audit_key(second): 60.0}
    auditor.at(80.0, dispute(1, opened=3), second, round=3)  # it goes on to run
    auditor.running.discard(audit_key(second))
    assert auditor.at(90.0, second, round=3) == {audit_key(second): 0.0}


def test_what_runs_and_is_pushed_aside_by_an_older_report_waits_for_nothing() -> None:
    auditor, first, second = Auditor(), report(1), report(2)
    auditor.at(0.0, first, round=2)
    auditor.at(10.0, first, second, round=3, idle=(first,))
    auditor.at(20.0, first, second, round=3)
    auditor.running.discard(audit_key(second))
    assert auditor.at(70.0, second, round=3) == {audit_key(second): 0.0}


def test_jobs_do_not_wait_for_one_another_and_who_waits_for_all_the_others_waits_at_no_trainers_cost() -> None:
    auditor = Auditor()
    assert len(auditor.at(0.0, report(1), report(1, job=OTHER_JOB), round=2)) == 2
    many, auditor = [report(1, bytes([number]) * 32) for number in range(2 * FETCHING_AUDITS_MAX)], Auditor()
    assert len(auditor.at(0.0, *many, round=2)) == FETCHING_AUDITS_MAX
    assert set(auditor.at(90.0, *many[FETCHING_AUDITS_MAX:], round=2).values()) == {0.0}
