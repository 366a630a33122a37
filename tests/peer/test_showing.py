"""What a trainer still owes its auditors, and when it proposes again."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from peer.runtime.rounds import audit_backpressure as showing_module
from peer.runtime.rounds.audit_backpressure import (
    GRACE_SECONDS,
    QUEUED_BYTES,
    RATE_SECONDS,
    AuditBacklog,
    AuditBackpressure,
    Audits,
)
from tests.ledger.court import A, B, C, Court, D
from training.job_spec import AuditMode, JobSpec

LEAST = 100.0  # bytes a second
AUDIT = 9_000  # bytes
FIRST, BOTH = {"first": AUDIT}, {"first": AUDIT, "second": AUDIT}


def noted(uplink: AuditBacklog, seconds: int, rates: Mapping[bytes, int], awaited: Mapping[bytes, Audits]) -> None:
    """So many seconds in which auditors get what they ask for at these rates."""
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
    """Or a trainer on a slow link would propose again before anybody has asked for anything."""
    noted(uplink, 1, {}, {B: FIRST})
    assert uplink.backlog_seconds(LEAST) == pytest.approx(AUDIT / LEAST)
    noted(uplink, GRACE_SECONDS, {}, {B: FIRST})
    assert uplink.backlog_seconds(LEAST) == 0
    noted(uplink, 1, {}, {B: BOTH})
    noted(uplink, 1, {}, {B: {"second": AUDIT}})  # the first one lapsed
    assert uplink.backlog_seconds(LEAST) == 0
    noted(uplink, 1, {B: AUDIT}, {B: {"second": AUDIT}})
    noted(uplink, 1, {}, {B: {"third": AUDIT}})  # it has reported
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
