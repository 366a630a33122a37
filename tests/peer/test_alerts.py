"""What an operator is told: each cause once, as long as it holds."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from ledger.jobs import NO_PROGRESS_ROUNDS
from peer.api.alerts import DISK_CRITICAL_BYTES, EXPULSION_ALERT_HEIGHTS, HOLD_MS, AlertInputs, AlertTracker, find_alerts
from protocol.api import AlertCause, AlertView, PeerState
from protocol.verdicts import Verdict
from tests.peer.chain import LANGUAGE, Chain
from tests.peer.fake_api import ME, OTHER, STATUS
from tests.peer.network import network, service_of
from tests.waiting import patience
from training.api.job_notes import FAILURE_ALERT_HEIGHTS, find_stalled_jobs
from training.job_spec import InnerOptimizerKind

WELL = AlertInputs(STATUS, "pytorch, 1 threads", 1 << 40, {}, {})
WAITING = "waiting for a quorum: 2 of 4 voters are here, 3 are needed"


def of(look: AlertInputs) -> list[tuple[str, str, str]]:
    return [(alert.cause, alert.about, alert.severity) for alert in find_alerts(look)]


@pytest.mark.parametrize(
    ("look", "expected"),
    [
        (WELL, []),
        (replace(WELL, worker=""), []),
        (replace(WELL, worker="starting"), []),
        (replace(WELL, worker="starting, restarted 2 times"), [("worker-gone", "", "warning")]),
        (replace(WELL, worker="pytorch, 1 threads, restarted 2 times"), []),
        (replace(WELL, worker="starting", status=replace(STATUS, uptime_seconds=999.0)), [("worker-gone", "", "warning")]),
        (replace(WELL, free_bytes=DISK_CRITICAL_BYTES), [("disk-low", "", "warning")]),
        (replace(WELL, free_bytes=DISK_CRITICAL_BYTES - 1), [("disk-low", "", "critical")]),
        (replace(WELL, status=replace(STATUS, waiting=WAITING)), [("no-quorum", "", "critical")]),
        (replace(WELL, unheard=[OTHER]), [("no-spare", "", "warning")]),
        (replace(WELL, unheard=[OTHER], status=replace(STATUS, waiting=WAITING)), [("no-quorum", "", "critical")]),
        (replace(WELL, unheard=[OTHER], status=replace(STATUS, voter=False)), []),
        (replace(WELL, unheard=[OTHER], status=replace(STATUS, voters=7, quorum=5)), []),
        (replace(WELL, status=replace(STATUS, voters=1, quorum=1)), []),
        (replace(WELL, status=replace(STATUS, waiting="waiting for a trainer of round 3")), [("stalled", "", "warning")]),
        (replace(WELL, status=replace(STATUS, halted="HALTED: a copy", state=PeerState.HALTED)), [("halted", "", "critical")]),
        (replace(WELL, status=replace(STATUS, halted="not a member: wait", state=PeerState.JOINING)), []),
        (replace(WELL, status=replace(STATUS, fork="DISPUTED: two")), [("disputed", "", "critical")]),
        (replace(WELL, status=replace(STATUS, module_failure="FAILED: height 4")), [("module-failed", "", "critical")]),
        (replace(WELL, status=replace(STATUS, state=PeerState.BEHIND, heights_behind=9)), [("behind", "", "warning")]),
        (replace(WELL, failed=["job a: no update"]), [("training-failed", "", "warning")]),
        (replace(WELL, without_progress=["job a ended", "job b ended"]), [("no-progress", "", "warning")]),
        (replace(WELL, expelled={OTHER: 9}, suspended={OTHER: "demo"}), [("liar-found", OTHER, "info")]),
        (replace(WELL, expelled={OTHER: STATUS.height - EXPULSION_ALERT_HEIGHTS}), []),
        (replace(WELL, suspended={OTHER: "demo", ME: "demo"}), [("liar-found", OTHER, "info"), ("liar-found", ME, "warning")]),
    ],
)
def test_each_cause_is_told_once(look: AlertInputs, expected: list[tuple[str, str, str]]) -> None:
    assert of(look) == expected


@pytest.mark.parametrize(
    ("inner", "rate", "lower"),
    [
        (InnerOptimizerKind.ADAMW, 10.0, "0.003"),
        (InnerOptimizerKind.ADAMW, 0.003, "0.0003"),
        (InnerOptimizerKind.ADAMW, 2e-6, "1e-06"),
        (InnerOptimizerKind.MUON, 10.0, "0.03"),
        (InnerOptimizerKind.MUON, 0.03, "0.003"),
    ],
)
def test_a_job_without_progress_is_told_with_its_end_verdicts_and_way_out(
    tmp_path: Path, inner: InnerOptimizerKind, rate: float, lower: str
) -> None:
    with closing(Chain(tmp_path)) as chain:
        key = chain.start(replace(LANGUAGE, rounds=30, inner=inner, inner_rate=rate))
        chain.play(key, rejected=1)
        for _ in range(NO_PROGRESS_ROUNDS):
            assert not list(find_stalled_jobs(chain.ledger.state, chain.ledger.state.height))
            chain.play(key, rejected=4, reason=Verdict.NORM)
        state = chain.ledger.state
    began = "job tiny ended after round 9: no update was accepted in its last 8 rounds"
    began += " (of all its updates: 32 diverging, 1 replay)"
    again = f"start it again, from its newest model and with a lower learning rate than {rate:g}"
    (told,) = find_stalled_jobs(state, state.height)
    way = f"`peer train --from {key.hex()[:8]} --set inner={inner.value} inner_rate={lower}`"
    assert told == f"{began}; {again}: {way}; without --from, if `peer rounds` shows that the loss of that model has grown"
    assert not list(find_stalled_jobs(state, state.height + FAILURE_ALERT_HEIGHTS))


def test_a_lower_rate_is_no_way_out_for_updates_that_are_false(tmp_path: Path) -> None:
    with closing(Chain(tmp_path)) as chain:
        key = chain.start(replace(LANGUAGE, rounds=30))
        for _ in range(NO_PROGRESS_ROUNDS):
            chain.play(key, rejected=4, reason=Verdict.STALE)
        (told,) = find_stalled_jobs(chain.ledger.state, chain.ledger.state.height)
    assert told.endswith("(of all its updates: 32 stale); `peer rounds` says who was refused, and why")


def test_an_alert_keeps_its_date_while_it_holds_and_is_a_new_one_when_it_comes_again() -> None:
    book, liar, disk = AlertTracker(), AlertView("liar-found", OTHER, "info", "a"), AlertView("disk-low", "", "critical", "b")
    assert book.update_alerts([liar], 1) == (replace(liar, since_ms=1),)
    assert book.update_alerts([replace(liar, text="more"), disk], 2) == (
        replace(disk, since_ms=2),
        replace(liar, text="more", since_ms=1),
    ), "the gravest first"
    assert book.update_alerts([], 3) == ()
    assert book.update_alerts([liar], 4) == (replace(liar, since_ms=4),)


def test_links_that_come_and_go_are_no_alert() -> None:
    book, lost = AlertTracker(), AlertView("no-quorum", "", "critical", WAITING)
    patience = HOLD_MS[AlertCause.NO_QUORUM]
    assert (
        book.update_alerts([lost], 0)
        == book.update_alerts([lost], patience - 1)
        == book.update_alerts([], patience)
        == book.update_alerts([lost], 9_999)
        == ()
    )
    assert book.update_alerts([lost], 9_999 + patience) == (replace(lost, since_ms=9_999),)


async def test_a_peer_that_loses_the_others_says_so_until_they_are_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peer.api.alerts.HOLD_MS", {})
    monkeypatch.setattr("peer.api.alerts.DISK_WARNING_BYTES", 0)
    async with network(tmp_path, founders=4) as made:
        api, others = service_of(made.seats[0]), made.seats[1:]

        async def until_told(*causes: str) -> None:
            with patience():
                while tuple(alert.cause for alert in await api.alerts()) != causes:  # noqa: ASYNC110 - links tell nobody
                    await trio.sleep(0.01)

        await until_told()
        for seat in others[:2]:
            await seat.stop()
        await until_told("no-quorum")
        (alert,) = await api.alerts()
        assert (alert,) == await api.alerts() and "2 of 4 voters are here" in alert.text
        for seat in others[:2]:
            await made.start(seat)
        await until_told()
