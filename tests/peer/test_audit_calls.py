"""Audits on request of a person, and a trainer's unfinished uploads to auditors before its next proposal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from ledger.audits.audit_state import (
    FALSE_CHALLENGES_MAX,
    AuditLogEntry,
    AuditResult,
    AuditVolunteering,
    MemberAuditRecord,
)
from ledger.jobs import StopJob
from peer.api.handlers import audit_handler
from peer.api.handlers.audit_handler import AuditRpcHandler, audit_record_view
from peer.runtime import audit_backpressure as showing_module
from peer.runtime.audit_backpressure import GRACE_SECONDS, QUEUED_BYTES, RATE_SECONDS, AuditBacklog, AuditBackpressure, Audits
from protocol.api import AuditRecordView
from protocol.errors import UserError
from protocol.identity import peer_id, short_id
from protocol.verdicts import ReplayFinding
from tests.ledger.court import LONG, MATCH, MISMATCH, WITHHELD, A, B, C, Court, D
from tests.ledger.test_audits import NEW, accused, rotated, volunteered
from tests.ledger.world import AUDITS, PEOPLE
from training.job_spec import AuditMode, JobSpec

REASON = SimpleNamespace(label="rollout", meaning="it trained on other responses")
JUDGED = "the other auditors judge the challenge: see `peer audits`"
SPEC = SimpleNamespace(
    replay_tolerance=1e-3, resolved_objective=SimpleNamespace(reason_labels=("rollout",), rejection_reasons=(REASON,))
)


class AskedPeer(SimpleNamespace):
    @property
    def state(self) -> Any:
        return self.driver.state


class Asked:
    """A person's peer on a court's ledger. Each wait for a block calls `each_wait`."""

    def __init__(self, court: Court, person: int = 1) -> None:
        self.court, self.me = court, PEOPLE[person]
        self.each_wait: Callable[[], None] = court.report
        self.volunteered: list[int] = []
        self.participant = SimpleNamespace(worker_client=object())
        self.first: list[Any] = []
        peer: Any = AskedPeer(
            driver=self, me=self.me.public, submitter=self, require_member=lambda: None, auditor=SimpleNamespace(asked=self.first)
        )
        self._answers = AuditRpcHandler(peer)
        self.round_executor, self.rules, self.block_applied = self, court.rules, self

    @property
    def state(self) -> Any:
        return self.court.state

    async def wait(self) -> None:
        await trio.lowlevel.checkpoint()
        assert self.first or self.court.due(), "nothing that it waits for can come"
        self.each_wait()

    async def submit(self, kind: str, content: AuditVolunteering, seconds_max: float) -> None:
        await trio.lowlevel.checkpoint()  # others may request audits meanwhile
        signed = self.court.tx(self.me, kind, content)
        if refusal := self.court.problem(signed):
            raise UserError(refusal)
        self.court.decide(signed)
        self.volunteered.append(content.round)

    async def __call__(self, trainer: bytes | str, number: int | None = None) -> str:
        with trio.fail_after(10):
            return await self._answers.challenge_trainer(trainer if isinstance(trainer, str) else peer_id(trainer), number)


@pytest.fixture(autouse=True)
def known_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode every specification as that of the court's jobs."""
    monkeypatch.setattr(JobSpec, "decode", lambda data: SPEC)


@pytest.fixture
def court() -> Court:
    """Return a court with four closed rounds, three of them in the window. Nothing was drawn."""
    made = Court(rate=0.0, suspension_rounds=50)
    made.round(AUDITS.window + 1)
    return made


def saying(court: Court, trainer: bytes, finding: ReplayFinding) -> Callable[[], None]:
    """Return a report of the drawn auditors: this finding about that trainer, and no fault of the others."""

    def said() -> None:
        for person, due in court.due():
            court.say(person, due, finding if due.trainer == trainer else MATCH)

    return said


@pytest.fixture
def ask(court: Court) -> Asked:
    return Asked(court)


async def test_a_person_is_told_that_a_round_passes_and_has_it_re_executed_once(ask: Asked) -> None:
    told = f"{short_id(B)} re-executed {short_id(A)} in round 5: passed"
    told += "; the re-executed update differs by 0.0007 % of its length (tolerance 0.2 %)"
    assert await ask(A) == told and ask.volunteered == [4]
    assert await ask(A) == told and await ask(A, 4) == told and ask.volunteered == [4], "it was reported already"
    assert short_id(C) in await ask(C) and ask.volunteered == [4]
    assert "round 4" in await ask(A, 3) and ask.volunteered == [4, 3]
    assert not ask.first


@pytest.mark.parametrize("has_volunteered", [False, True])
async def test_what_a_person_asked_for_is_replayed_first(court: Court, has_volunteered: bool, ask: Asked) -> None:
    if has_volunteered:
        court.decide(volunteered(court, ask.me, 4))
    places = list[object]()
    ask.each_wait = lambda: (places.extend(ask.first), court.report())  # type: ignore[func-returns-value,assignment]
    assert "in round 5: passed" in await ask(A)
    assert places == [(court.key, (4, A))] and ask.volunteered == [4] * (not has_volunteered)


@pytest.mark.parametrize(
    ("finding", "told"),
    [
        (MISMATCH, "(mismatch); the re-executed update differs by 0.0007 % of its length (tolerance 0.2 %)"),
        (ReplayFinding.OWN_0, "(rollout): it trained on other responses"),
    ],
)
async def test_a_person_is_told_what_is_false(court: Court, finding: ReplayFinding, told: str, ask: Asked) -> None:
    said = saying(court, A, finding)
    ask.each_wait = lambda: (said(), court.judge(finding, 1))  # type: ignore[func-returns-value,assignment]
    assert await ask(A) == f"{short_id(B)} challenges {short_id(A)} in round 5 {told}; {JUDGED}"
    assert court.suspended(A), "which is the newer line of the log"


@pytest.mark.parametrize("finding", [WITHHELD, ReplayFinding.MALFORMED])
async def test_of_what_was_not_replayed_no_deviation_is_told(court: Court, finding: ReplayFinding, ask: Asked) -> None:
    assert audit_handler._told(AuditLogEntry(1, court.key, 4, A, B, AuditResult.CHALLENGED, finding, 0), ask.state).endswith(
        f"({finding.label}); {JUDGED}"
    )


async def test_who_was_drawn_anyway_does_not_volunteer() -> None:
    court = Court(rate=1.5)
    court.until_drawn(A)
    auditor, due = court.due(A)[0]
    ask = Asked(court, PEOPLE.index(auditor))
    assert "passed" in await ask(A) and not ask.volunteered
    assert f"round {due.round + 1}:" in await ask(A)


async def test_a_report_that_lapsed_is_an_error_and_may_be_asked_for_again(court: Court, ask: Asked) -> None:
    ask.each_wait = court.round
    with pytest.raises(UserError, match=r"did not report on \w+ in round 5 in time"):
        await ask(A)
    ask.each_wait = court.report
    assert "passed" in await ask(A) and len(ask.volunteered) == 2


async def test_a_round_that_is_undone_meanwhile_is_an_error(court: Court, ask: Asked) -> None:
    accused(court, PEOPLE[2], D, 3)
    ask.each_wait = lambda: court.judge(MISMATCH, 1)
    with pytest.raises(UserError, match="the round was undone before this peer reported"):
        await ask(A)


@pytest.mark.parametrize("number", [None, 6])
async def test_who_has_not_reported_yet_waits_before_it_volunteers_again(court: Court, number: int | None, ask: Asked) -> None:
    """It has reported on the requested trainer, but not on the others of that round."""
    await ask(A)
    court.round()
    court.decide(volunteered(court, ask.me, 5))
    (due,) = [due for person, due in court.due(C) if person is ask.me]
    court.say(ask.me, due)
    court.round()
    assert "round 7" in await ask(C, number) and ask.volunteered == [4, 6]


async def test_two_people_may_ask_at_once(court: Court) -> None:
    ask, told = Asked(court), list[str]()

    async def asks(trainer: bytes) -> None:
        told.append(await ask(trainer))

    async with trio.open_nursery() as nursery:
        for trainer in (A, A, C):
            nursery.start_soon(asks, trainer)
    assert len(told) == 3 and all("in round 5: passed" in line for line in told)
    assert court.audits.rounds[4].volunteers == (ask.me.public,) and not ask.first


async def test_what_cannot_be_re_executed_is_said(court: Court, ask: Asked) -> None:
    for trainer, number, why in (
        (A, 99, "in round 100 can be audited"),
        (A, 0, "in round 1 can be audited"),
        (PEOPLE[7].public, None, " can be audited"),
        (ask.me.public, None, "its own proposals"),
    ):
        with pytest.raises(UserError, match=why):
            await ask(trainer, number)
    accused(court, PEOPLE[2], A, 4)
    with pytest.raises(UserError, match="in round 5: it needs an undisputed proposal"):
        await ask(A, 4)
    assert "in round 4:" in await ask(A), "the one before is not disputed"
    ask.participant.worker_client = None
    with pytest.raises(UserError, match="without a worker"):
        await ask(A)


async def test_who_was_found_wrong_too_often_is_told_so(court: Court) -> None:
    for _ in range(FALSE_CHALLENGES_MAX):
        accused(court, PEOPLE[1], A, court.job(court.key).round - 2)
        court.judge(MATCH, 2)
        court.round()
    with pytest.raises(UserError, match="in good standing"):
        await Asked(court)(A, court.job(court.key).round - 1)


async def test_the_report_in_another_job_is_not_taken_for_one_in_this(court: Court) -> None:
    ask, first = Asked(court), court.key
    assert "passed" in await ask(A, 4)
    court.decide(court.tx(PEOPLE[0], "job/stop", StopJob(first)))
    court.key = court.start(PEOPLE[0], LONG)
    court.round(5)
    ask.each_wait = saying(court, A, MISMATCH)
    assert "mismatch" in await ask(A, 4) and court.audits.disputes and court.key != first


async def test_a_trainer_is_found_by_its_former_key_and_when_it_changes_that_meanwhile(court: Court, ask: Asked) -> None:

    def changed() -> None:
        if A in court.people:
            rotated(court, PEOPLE[0])
        court.report()

    ask.each_wait = changed
    assert f"{short_id(NEW.public)} in round 5: passed" in await ask(A)
    assert f"{short_id(NEW.public)} in round 4: passed" in await ask(A, 3)


async def test_a_report_that_the_log_has_lost_is_told_as_lost(court: Court, ask: Asked) -> None:

    def lost() -> None:
        court.report()
        court.ledger.applied.current = court.state.with_modules(audits=replace(court.state.audits, log=()))

    ask.each_wait = lost
    with pytest.raises(UserError, match="no longer has the report of this peer"):
        await ask(A)


def test_each_count_of_a_members_audits_is_told_under_its_name() -> None:
    record = MemberAuditRecord(rewards=1, rewards_lost=2, suspensions=3, reports=4, lapsed=5, upheld=6, refuted=7, wrong_losses=8)
    assert audit_record_view(A, record) == AuditRecordView(
        peer_id(A),
        rewards=1,
        rewards_lost=2,
        suspensions=3,
        reports=4,
        reports_lapsed=5,
        challenges_upheld=6,
        challenges_refuted=7,
        wrong_losses=8,
    )


LEAST = 100.0  # bytes a second
AUDIT = 9_000  # bytes
FIRST, BOTH = {"first": AUDIT}, {"first": AUDIT, "second": AUDIT}


def noted(uplink: AuditBacklog, seconds: int, rates: Mapping[bytes, int], awaited: Mapping[bytes, Audits]) -> None:
    """Record some seconds in which auditors receive data at these rates."""
    sent = dict(uplink._sent[-1])
    for _ in range(seconds):
        sent = {key: sent.get(key, 0) + rates.get(key, 0) for key in {*sent, *rates}}
        uplink.record_second(sent, awaited)


@pytest.fixture
def uplink() -> AuditBacklog:
    return AuditBacklog()


def test_what_auditors_have_got_is_owed_no_more_and_the_rest_takes_as_long_as_the_link(uplink: AuditBacklog) -> None:
    noted(uplink, 1, {}, {B: FIRST, C: FIRST})
    noted(uplink, RATE_SECONDS, {B: 300, C: 300}, {B: FIRST, C: FIRST})
    assert uplink.backlog_seconds(LEAST) == pytest.approx(2 * (9_000 - 300 * RATE_SECONDS) / 600, rel=0.05)
    noted(uplink, 20, {B: 300, C: 300}, {B: FIRST, C: FIRST})
    assert uplink.backlog_seconds(LEAST) == 0


def test_audits_add_up_and_a_report_ends_what_was_got_for_it(uplink: AuditBacklog) -> None:
    noted(uplink, 1, {}, {B: BOTH})
    noted(uplink, RATE_SECONDS, {B: 600}, {B: BOTH})
    assert uplink.backlog_seconds(LEAST) == pytest.approx((18_000 - 600 * RATE_SECONDS) / 600, rel=0.05)
    noted(uplink, 1, {B: 600}, {B: {"second": AUDIT}})
    assert uplink.backlog_seconds(LEAST) == pytest.approx((18_000 - 600 * (RATE_SECONDS + 1)) / 600, rel=0.05)


def test_a_report_of_an_auditor_that_had_all_it_needed_leaves_the_next_audit_whole(uplink: AuditBacklog) -> None:
    noted(uplink, RATE_SECONDS, {B: 300}, {B: BOTH})
    noted(uplink, 1, {}, {B: {"second": AUDIT}})
    assert uplink.backlog_seconds(LEAST) == pytest.approx(9_000 / 300, rel=0.05)


def test_what_was_drawn_and_got_between_two_looks_is_not_owed(uplink: AuditBacklog) -> None:
    noted(uplink, 1, {}, {})
    noted(uplink, 1, {B: AUDIT}, {B: FIRST})
    assert uplink.backlog_seconds(LEAST) == 0
    uplink.update_owed({B: AUDIT + AUDIT // 3}, {B: BOTH})
    assert uplink.backlog_seconds(LEAST) == pytest.approx(2 / 3 * RATE_SECONDS)


@pytest.mark.parametrize(("rate", "owes"), [(0, False), (20, False), (300, True)])
def test_a_liar_that_asks_for_nothing_or_slowly_holds_up_nobody(rate: int, owes: bool, uplink: AuditBacklog) -> None:
    noted(uplink, RATE_SECONDS, {C: 600}, {C: FIRST})
    noted(uplink, RATE_SECONDS + 1, {B: rate}, {B: {"third": 10**6}})
    assert bool(uplink.backlog_seconds(LEAST)) is owes


def test_an_auditor_whose_audits_have_just_begun_is_waited_for_and_a_silent_one_once(uplink: AuditBacklog) -> None:
    """Otherwise a trainer on a slow link could propose again before any auditor has requested data."""
    noted(uplink, 1, {}, {B: FIRST})
    assert uplink.backlog_seconds(LEAST) == pytest.approx(AUDIT / LEAST)
    noted(uplink, GRACE_SECONDS, {}, {B: FIRST})
    assert uplink.backlog_seconds(LEAST) == 0
    noted(uplink, 1, {}, {B: BOTH})
    noted(uplink, 1, {}, {B: {"second": AUDIT}})  # the first audit lapsed
    assert uplink.backlog_seconds(LEAST) == 0
    noted(uplink, 1, {B: AUDIT}, {B: {"second": AUDIT}})
    noted(uplink, 1, {}, {B: {"third": AUDIT}})  # the auditor has reported
    noted(uplink, RATE_SECONDS, {C: 600}, {})
    noted(uplink, 1, {}, {B: {"fourth": AUDIT}})
    assert uplink.backlog_seconds(LEAST) > 0


def test_a_link_of_which_little_is_asked_is_as_fast_as_in_the_seconds_in_which_something_was() -> None:
    uplink, audit = AuditBacklog(), 8 * QUEUED_BYTES
    noted(uplink, RATE_SECONDS - 1, {}, {})
    noted(uplink, 1, {B: audit}, {B: {"first": audit}})
    uplink.update_owed(uplink._seen, {B: {"second": 7 * QUEUED_BYTES}})
    assert uplink.backlog_seconds(LEAST) == pytest.approx(2), "a second for seven parts, of two in which they may have come"


def test_what_fills_queues_at_once_says_nothing_of_a_link(uplink: AuditBacklog) -> None:
    noted(uplink, 1, {B: QUEUED_BYTES, C: QUEUED_BYTES}, {})
    assert uplink._fastest == 0 < uplink._best


def test_a_link_that_became_slower_is_known_by_and_by(uplink: AuditBacklog) -> None:
    noted(uplink, RATE_SECONDS, {C: 1_000}, {C: FIRST})
    before = uplink._best
    noted(uplink, 700, {}, {})
    assert before / 5 < uplink._best < before / 3


async def test_a_trainer_proposes_when_it_has_shown_enough_and_silent_auditors_stop_nobody(
    autojump_clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(showing_module, "audit_bytes_of", lambda spec: 6_000_000)
    court, spec, sent = Court(auditors=3), JobSpec(name="slow", audit=AuditMode.SAMPLED), dict[bytes, int]()
    court.round()
    network: Any = SimpleNamespace(audit_bytes_sent_by_peer=lambda: sent)
    showing = AuditBackpressure(A, network, court.ledger.applied)

    async def asking(auditor: bytes, rate: int) -> None:
        while sent.get(auditor, 0) < 6_000_000:
            await trio.sleep(1.0)
            sent[auditor] = sent.get(auditor, 0) + rate

    async with trio.open_nursery() as nursery:
        nursery.start_soon(showing.run)
        await trio.sleep(30)
        start = trio.current_time()
        await showing.wait_to_propose(spec, 160.0)
        assert trio.current_time() == start, "nobody asks"
        for auditor in (B, C, D):
            nursery.start_soon(asking, auditor, 80_000)
        await trio.sleep(10)
        await showing.wait_to_propose(spec, 160.0)
        assert 30 < trio.current_time() - start < 60, "75 s for everything, and 40 s of it may be owed"
        nursery.cancel_scope.cancel()
