"""Which audits fetch, and which waiting counts against a trainer: only what it knew of when it proposed."""

from __future__ import annotations

from typing import Any, cast

from ledger.audits.state import Due
from ledger.members import MembersState
from peer.driver.turns import AT_ONCE_MAX, Key, Turns, key_of

JOB, OTHER_JOB, TRAINER, OTHER = b"j" * 32, b"k" * 32, b"t" * 32, b"o" * 32
MEMBERS = MembersState({}, (TRAINER,), (TRAINER,), (TRAINER,))


def report(number: int, trainer: bytes = TRAINER, job: bytes = JOB) -> Due:
    return Due(job, number, trainer, 0, cast("Any", None), False, number)


def dispute(number: int, opened: int) -> Due:
    return Due(JOB, number, TRAINER, 0, cast("Any", None), True, opened)


class Auditor:
    """It begins what it may, and is told when an audit needs nothing more."""

    def __init__(self) -> None:
        self.turns, self.running = Turns(), set[Key]()

    def at(self, now: float, *due: Due, round: int, idle: tuple[Due, ...] = ()) -> dict[Key, float]:
        """The audits that begin, with the seconds that they have waited as counts against their trainer."""
        self.running &= {key_of(item) for item in due}
        items = {key_of(item): item for item in sorted(due, key=lambda item: (not item.is_dispute, item.since))}
        idle_keys = {key_of(item) for item in idle}
        begins = self.turns.follow(items, idle_keys, self.running, {JOB: round, OTHER_JOB: round}, MEMBERS, now)
        self.running |= begins
        return {key: self.turns.begin(key, now) for key in begins}


def test_a_report_waits_for_the_older_one_on_its_trainer_and_that_counts() -> None:
    auditor, first, second = Auditor(), report(1), report(2)
    assert auditor.at(0.0, first, round=2) == {key_of(first): 0.0}
    assert auditor.at(10.0, first, second, report(2, OTHER), round=3) == {key_of(report(2, OTHER)): 0.0}
    auditor.at(40.0, first, second, round=4)
    assert auditor.at(70.0, second, round=4) == {key_of(second): 60.0}


def test_what_is_fetched_keeps_nobody_waiting() -> None:
    auditor, first, second = Auditor(), report(1), report(2)
    auditor.at(0.0, first, round=2)
    assert auditor.at(10.0, first, second, round=3, idle=(first,)) == {key_of(second): 0.0}


def test_waiting_for_a_dispute_does_not_count() -> None:
    auditor, judged, waits = Auditor(), dispute(1, opened=3), report(2)
    auditor.at(0.0, judged, waits, round=3)
    auditor.at(50.0, judged, waits, round=3)
    assert auditor.at(60.0, waits, round=4) == {key_of(waits): 10.0}, "since this peer looked the last time"


def test_reports_that_are_drawn_late_all_have_their_whole_time_and_keep_none_from_others() -> None:
    """The ballots of this peer had missed rounds 2 and 3, so it draws for rounds 2, 3 and 4 at once. No trainer could know."""
    auditor, late = Auditor(), [report(2), report(3)]
    drawn_in_time = report(4)
    assert auditor.at(0.0, *late, drawn_in_time, round=5) == {key_of(late[0]): 0.0}
    auditor.at(60.0, *late, drawn_in_time, round=6)
    assert auditor.at(60.0, late[1], drawn_in_time, round=6) == {key_of(late[1]): 0.0}
    auditor.at(120.0, late[1], drawn_in_time, round=7)
    assert auditor.at(120.0, drawn_in_time, round=7) == {key_of(drawn_in_time): 0.0}


def test_what_waits_for_a_report_that_was_drawn_in_time_waits_at_its_trainers_cost_whatever_else_was_late() -> None:
    auditor = Auditor()
    auditor.at(0.0, report(2), round=4)  # late
    auditor.at(30.0, report(3), round=4)
    auditor.at(40.0, report(3), report(4), round=5)
    assert auditor.at(100.0, report(4), round=5) == {key_of(report(4)): 60.0}


def test_what_was_drawn_late_does_not_wait_at_its_trainers_cost_for_what_was_not() -> None:
    auditor, first, late = Auditor(), report(1), report(3)
    auditor.at(0.0, first, round=2)
    auditor.at(10.0, first, late, round=5)
    auditor.at(50.0, first, late, round=5)
    assert auditor.at(60.0, late, round=5) == {key_of(late): 10.0}, "since this peer looked the last time"


def test_after_an_absence_it_is_not_known_who_waited_for_what() -> None:
    auditor, first, second = Auditor(), report(1), report(2)
    auditor.at(0.0, first, round=2)
    auditor.at(10.0, first, second, round=3)
    auditor.turns.forget()
    auditor.at(30.0, first, second, round=3)
    assert auditor.at(30.0, second, round=3) == {key_of(second): 0.0}


def test_jobs_do_not_wait_for_one_another_and_not_too_many_audits_fetch_at_once() -> None:
    auditor = Auditor()
    assert len(auditor.at(0.0, report(1), report(1, job=OTHER_JOB), round=2)) == 2
    many = [report(1, bytes([number]) * 32) for number in range(2 * AT_ONCE_MAX)]
    assert len(Auditor().at(0.0, *many, round=2)) == AT_ONCE_MAX
