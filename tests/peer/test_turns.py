"""Audits that fetch, delays that count against a trainer, and the lock that is passed on by lot."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import pytest
import trio
import trio.testing

from ledger.audits.audit_state import AuditDuty
from ledger.members import MembersState
from peer.runtime.audit_scheduler import FETCHING_AUDITS_MAX, AuditKey, AuditScheduler, audit_key
from peer.runtime.auditor import LotteryLock

JOB, OTHER_JOB, TRAINER, OTHER = b"j" * 32, b"k" * 32, b"t" * 32, b"o" * 32
MEMBERS = MembersState({}, (TRAINER,), (TRAINER,), (TRAINER,))


def report(number: int, trainer: bytes = TRAINER, job: bytes = JOB) -> AuditDuty:
    return AuditDuty(job, number, trainer, cast("Any", None), False, number)


def dispute(number: int, opened: int) -> AuditDuty:
    return AuditDuty(JOB, number, TRAINER, cast("Any", None), True, opened)


class Auditor:
    """An auditor that begins all audits it may, requests data all the time, and is notified when an audit is done."""

    def __init__(self) -> None:
        self.turns, self.running, self.looked = AuditScheduler(), set[AuditKey](), 0.0

    def at(self, now: float, *due: AuditDuty, round: int, idle: tuple[AuditDuty, ...] = ()) -> dict[AuditKey, float]:
        """Return the audits that begin, with the seconds of delay that count against their trainers."""
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


class Look(NamedTuple):
    now: float
    due: tuple[AuditDuty, ...]
    round: int
    begins: tuple[AuditDuty, float] | None = None  # the only audit that begins, and its delay in seconds
    idle: tuple[AuditDuty, ...] = ()


FIRST, SECOND, THIRD, OF_OTHER = report(1), report(2), report(3), report(2, OTHER)
FOURTH, FIFTH, SIXTH, SEVENTH, NINTH = report(4), report(5), report(6), report(7), report(9)
JUDGED = dispute(1, opened=3)


@pytest.mark.parametrize(
    "looks",
    [
        pytest.param(
            [
                Look(0.0, (FIRST,), 2, (FIRST, 0.0)),
                Look(10.0, (FIRST, SECOND, OF_OTHER), 3, (OF_OTHER, 0.0)),
                Look(40.0, (FIRST, SECOND), 4),
                Look(70.0, (SECOND,), 4, (SECOND, 60.0)),
            ],
            id="a report waits for the older one on its trainer, and that counts",
        ),
        pytest.param(
            [Look(0.0, (FIRST,), 2), Look(10.0, (FIRST, SECOND), 3, (SECOND, 0.0), idle=(FIRST,))],
            id="what is fetched keeps nobody waiting",
        ),
        pytest.param(
            [
                Look(0.0, (FIRST,), 2),
                Look(10.0, (FIRST, SECOND), 3, idle=(SECOND,)),
                Look(60.0, (FIRST, SECOND), 3),
                Look(70.0, (SECOND,), 3, (SECOND, 10.0)),
            ],
            id="who rests waits for itself",
        ),
        pytest.param(
            [
                Look(0.0, (FIRST,), 2),
                Look(0.0, (FIRST, SECOND), 3),
                Look(10.0, (JUDGED, FIRST, SECOND), 3),
                Look(50.0, (FIRST, SECOND), 3),
                Look(60.0, (SECOND,), 4, (SECOND, 20.0)),
            ],
            id="waiting for a dispute does not count, and takes nothing back",
        ),
        pytest.param(
            [
                Look(0.0, (JUDGED,), 3),
                Look(10.0, (JUDGED, FOURTH), 5),
                Look(60.0, (FOURTH,), 5, (FOURTH, 0.0)),
            ],
            id="waiting for a dispute does not count, however old that is",
        ),
        pytest.param(
            [
                Look(0.0, (FIRST,), 2),
                Look(10.0, (FIRST, SECOND), 3),
                Look(60.0, (FIRST,), 3),
                Look(70.0, (SECOND,), 3, (SECOND, 0.0)),
            ],
            id="what is not due any more is forgotten",
        ),
        # This peer's ballots were missing in rounds 2 and 3, so it draws for rounds 2, 3 and 4 at once. No trainer could know.
        pytest.param(
            [
                Look(0.0, (SECOND, THIRD, FOURTH), 5, (SECOND, 0.0)),
                Look(30.0, (SECOND, THIRD, FOURTH, FIFTH), 6),
                Look(60.0, (THIRD, FOURTH, FIFTH), 6, (THIRD, 0.0)),
                Look(120.0, (FOURTH, FIFTH), 7, (FOURTH, 0.0)),
                Look(160.0, (FIFTH,), 7, (FIFTH, 130.0)),  # its trainer knew of all that when it proposed
            ],
            id="reports that are drawn late keep none waiting that was proposed before they were drawn",
        ),
        pytest.param(
            [
                Look(0.0, (FIRST, SECOND), 3),  # the first has been due since round 2
                Look(10.0, (FIRST, SECOND, THIRD), 4),
                Look(60.0, (SECOND, THIRD), 4, (SECOND, 0.0)),
                Look(70.0, (THIRD,), 4, (THIRD, 60.0)),
            ],
            id="a look that comes late costs a trainer nothing, and saves it no more than that round",
        ),
        pytest.param(
            [
                Look(0.0, (FIFTH, SIXTH, SEVENTH), 9),
                Look(10.0, (FIFTH, SIXTH, SEVENTH, NINTH), 10),
                Look(60.0, (SIXTH, SEVENTH, NINTH), 10, (SIXTH, 0.0)),
                Look(110.0, (SEVENTH, NINTH), 10, (SEVENTH, 0.0)),
                Look(160.0, (NINTH,), 11, (NINTH, 150.0)),
            ],
            id="an auditor that comes back charges nothing for what it first sees then",
        ),
    ],
)
def test_reports_wait_for_older_ones_on_their_trainer_alone(looks: list[Look]) -> None:
    auditor = Auditor()
    for now, due, round, begins, idle in looks:
        found = auditor.at(now, *due, round=round, idle=idle)
        assert begins is None or found == {audit_key(begins[0]): begins[1]}, now


def test_seconds_in_which_nothing_was_asked_for_count_for_nobody() -> None:
    """Where jobs share a trainer's uplink, a waiting audit counts no more seconds than the audit before it."""
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
    auditor.at(80.0, dispute(1, opened=3), second, round=3)  # it continues to run
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


async def order_of(waiting: list[bool], cancelled: frozenset[int] = frozenset()) -> list[int]:
    """Return the order in which waiters get the lock. Each flag of `waiting` tells whether that waiter has priority."""
    lottery, served, held = LotteryLock(), list[int](), 0
    scopes = [trio.CancelScope() for _ in waiting]

    async def wait(number: int, is_first: bool) -> None:
        nonlocal held
        with scopes[number]:
            async with lottery.hold(lambda: is_first):
                held += 1
                assert held == 1, "one at a time"
                served.append(number)
                await trio.testing.wait_all_tasks_blocked()
                held -= 1

    async with trio.open_nursery() as nursery:
        async with lottery.hold(lambda: False):
            for number, is_first in enumerate(waiting):
                nursery.start_soon(wait, number, is_first)
                await trio.testing.wait_all_tasks_blocked()  # in this order
            for number in cancelled:
                scopes[number].cancel()
        async with lottery.hold(lambda: False):  # a newcomer does not overtake
            assert not held
            held += 1
            await trio.testing.wait_all_tasks_blocked()
            held -= 1
    return served


async def test_each_gets_its_turn_and_the_order_is_chance() -> None:
    orders = [await order_of([False] * 4) for _ in range(50)]
    assert {tuple(sorted(order)) for order in orders} == {(0, 1, 2, 3)}
    assert {order[0] for order in orders} == {order[-1] for order in orders} == {0, 1, 2, 3}


async def test_those_that_go_first_go_first() -> None:
    for _ in range(20):
        assert set((await order_of([False, True, False, True]))[:2]) == {1, 3}


@pytest.mark.parametrize("cancelled", [frozenset({0}), frozenset({0, 1, 2}), frozenset({0, 1, 2, 3})], ids=str)
async def test_who_gives_up_holds_up_nobody(cancelled: frozenset[int]) -> None:
    for _ in range(20):
        assert set(await order_of([False] * 4, cancelled)) == {0, 1, 2, 3} - cancelled


async def test_who_fails_passes_its_turn_on() -> None:
    lottery = LotteryLock()
    with pytest.raises(ValueError, match="bad"):
        async with lottery.hold(lambda: False):
            raise ValueError("bad")
    with trio.fail_after(1):
        async with lottery.hold(lambda: False):
            pass
