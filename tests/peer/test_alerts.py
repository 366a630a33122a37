"""Alerts for operators and trainers: one for each cause, for as long as it holds, with advice."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from ledger.jobs import NO_PROGRESS_ROUNDS, RequestRollback, StopJob
from ledger.ledger_state import LedgerState
from ledger.members import ApproveVoter, RenameMember, ResignAsVoter, StandAsVoter
from peer.api.alerts import (
    ALERT_KINDS,
    DISK_CRITICAL_BYTES,
    EXPULSION_ALERT_HEIGHTS,
    HOLD_MS,
    AlertInputs,
    AlertTracker,
    find_alerts,
)
from peer.commands.command_line_parser import help_text
from peer.commands.definitions import all_commands
from peer.node.node import RoundEnded
from peer.runtime.telemetry.event_log import EventLog
from peer.runtime.telemetry.health import LATE_ROUNDS_MIN, LATE_SECONDS_MIN, StragglerDetector
from peer.runtime.telemetry.node_observer import NodeObserver, block_events, member_names
from protocol.api import AlertCause, AlertView, PeerState
from protocol.identity import short_id
from protocol.verdicts import Verdict
from rounds.round_state import RoundResult
from tests.ledger.world import PEOPLE, UNAUDITED, World
from tests.peer.chain import LANGUAGE, Chain
from tests.peer.fake_api import ME, OTHER, STATUS
from tests.peer.network import network, one_root, poll, service_of
from tests.sim.keys import FastSigner
from tests.waiting import patience
from training.api.job_notes import FAILURE_ALERT_HEIGHTS, find_stalled_jobs
from training.job_spec import InnerOptimizerKind

WELL = AlertInputs(STATUS, "pytorch, 1 threads", 1 << 40, {}, {})
WAITING = "waiting for a quorum: 2 of 4 voters are connected, 3 are needed"


def of(look: AlertInputs) -> list[tuple[str, str, str]]:
    return [(alert.cause, alert.about, alert.severity) for alert in find_alerts(look)]


def test_the_help_explains_each_cause() -> None:
    explained = " ".join(help_text(all_commands(), "alerts").split())
    assert all(f"- `{cause}`: {kind.meaning}" in explained for cause, kind in ALERT_KINDS.items())


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
    assert all(severity in ALERT_KINDS[AlertCause(cause)].severities for cause, _, severity in expected)


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
    began += " (verdicts on all its updates: 32 diverging, 1 replay)"
    again = f"start it again from its newest model with a learning rate below {rate:g}"
    (told,) = find_stalled_jobs(state, state.height)
    way = f"`peer train --from {key.hex()[:8]} --set inner={inner.value} inner_rate={lower}`"
    assert told == f"{began}; {again}: {way}; leave out --from if `peer rounds` shows that the loss of that model has grown"
    assert not list(find_stalled_jobs(state, state.height + FAILURE_ALERT_HEIGHTS))


def test_a_lower_rate_is_no_way_out_for_updates_that_are_false(tmp_path: Path) -> None:
    with closing(Chain(tmp_path)) as chain:
        key = chain.start(replace(LANGUAGE, rounds=30))
        for _ in range(NO_PROGRESS_ROUNDS):
            chain.play(key, rejected=4, reason=Verdict.STALE)
        (told,) = find_stalled_jobs(chain.ledger.state, chain.ledger.state.height)
    assert told.endswith(
        "(verdicts on all its updates: 32 stale); run `peer rounds` to see the rejected trainers and the reasons"
    )


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
                while tuple(alert.cause for alert in await api.alerts()) != causes:  # noqa: ASYNC110 - no event announces links
                    await trio.sleep(0.01)

        await until_told()
        for seat in others[:2]:
            await seat.stop()
        await until_told("no-quorum")
        (alert,) = await api.alerts()
        assert (alert,) == await api.alerts() and "2 of 4 voters are connected" in alert.text
        for seat in others[:2]:
            await made.start(seat)
        await until_told()


FOUNDERS, NEW = PEOPLE[:4], PEOPLE[8]
NAMES = [short_id(person.public) for person in PEOPLE]


class Telling(World):
    """A world that records the alerts of every block."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def decide_body(self, body: bytes) -> LedgerState:
        before = self.state
        self.told += [item.text for item in block_events(before, super().decide_body(body))]
        return self.state


@pytest.fixture
def world() -> Telling:
    return Telling()


def test_who_comes_stands_and_goes_is_told(world: Telling) -> None:
    world.decide(world.admission(NEW))
    assert world.told == [f"{NAMES[8]} was admitted as a member, invited by {NAMES[0]}"]
    world.decide(world.tx(NEW, "member/rename", RenameMember("erin")))
    assert world.told[1:] == [f"{NAMES[8]} is called erin, renamed from newcomer"]
    height = world.state.height - 1
    world.decide(world.tx(NEW, "member/stand", StandAsVoter(height, world.state.certified_roots[height])))
    world.decide(*(world.tx(person, "member/approve", ApproveVoter(NEW.public)) for person in FOUNDERS[:3]))
    world.decide(world.tx(FOUNDERS[3], "member/resign", ResignAsVoter()))
    for _ in range(3):
        world.decide()
    assert world.told[2:] == [
        f"{NAMES[8]} is now one of 5 voters",
        f"{NAMES[3]} has lost its vote; 4 voters are left",
    ]


def test_a_new_key_of_a_member_is_nobody_new(world: Telling) -> None:
    world.decide(world.admission(NEW))
    world.told.clear()
    world.decide(world.rotation(NEW, PEOPLE[9]), world.rotation(PEOPLE[0], PEOPLE[10]))
    for _ in range(3):
        world.decide()
    assert world.told == []


def test_jobs_that_begin_and_end_are_told(world: Telling) -> None:
    job = world.start()
    assert world.told == [f"job language of {NAMES[0]} started: 2 rounds"]
    world.decide(world.tx(PEOPLE[0], "job/stop", StopJob(job)))
    assert world.told[1:] == ["job language ended early after 0 rounds"]


def test_a_job_of_one_round_is_told_in_the_singular(world: Telling) -> None:
    key = world.start(spec=UNAUDITED + b":99")
    world.decide(closings=(world.closing(key, dict.fromkeys(world.job(key).trainers, Verdict.NORM)),))
    world.decide(world.tx(PEOPLE[0], "job/stop", StopJob(key)))
    assert world.told[1:] == ["job unaudited ended early after 1 round"]


def test_a_job_that_ends_without_progress_is_told_as_such(world: Telling) -> None:
    key = world.start(spec=UNAUDITED + b":99")
    for _ in range(8):
        world.decide(closings=(world.closing(key, dict.fromkeys(world.job(key).trainers, Verdict.NORM)),))
    assert world.told[1:] == ["job unaudited ended early after 8 rounds: its last 8 rounds accepted no update"]


def test_who_asks_for_a_rollback_is_told_with_the_command_for_the_others(world: Telling) -> None:
    key = world.start(spec=UNAUDITED + b":99")
    for _ in range(9):
        world.decide(closings=(world.closing(key, dict.fromkeys(world.job(key).trainers, Verdict.ACCEPT)),))
    for _ in range(2):
        world.decide(world.tx(FOUNDERS[1], "job/rollback", RequestRollback(key, 8)))
    asks = f"{NAMES[1]} voted to roll back job unaudited to @8: to agree, run `peer rollback {key.hex()[:8]} 8`"
    assert world.told[1:] == [asks]


def test_a_founder_says_its_name_for_the_first_time_and_its_id_stays_beside_it() -> None:
    dora, world = FOUNDERS[3], World()
    before, after = world.state, world.decide(world.tx(dora, "member/rename", RenameMember("dora")))
    unnamed = replace(before.members.members[dora.public], name=NAMES[3])
    (told,) = block_events(
        before.with_modules(members=replace(before.members, members=before.members.members | {dora.public: unnamed})), after
    )
    assert told.text == f"{NAMES[3]} is called dora"
    assert member_names(after.members).replace_ids(told.text) == told.text, "nobody reads that dora is called dora"


LATE, IN_TIME, JOB = FastSigner("me").public, FastSigner("other").public, bytes(32)
NO_VOUCHES: Any = ({}, frozenset(), frozenset())
ABSENT = RoundResult({IN_TIME: bytes(32)}, {}, frozenset({LATE}), frozenset(), *NO_VOUCHES)
ACCEPTED = RoundResult({LATE: bytes(32)}, {}, frozenset({IN_TIME}), frozenset(), *NO_VOUCHES)
UNJUDGED = RoundResult(
    {}, {LATE: Verdict.UNJUDGED}, frozenset(), frozenset({LATE}), *NO_VOUCHES
)  # the voters were late, not this trainer
ELSEWHERE = RoundResult({IN_TIME: bytes(32)}, {}, frozenset(), frozenset(), *NO_VOUCHES)  # it did not train in this round


def after(*proposed: bool, seconds: float = 20.0) -> StragglerDetector:
    """Record rounds that were closed without its update. Each flag tells whether it had proposed by then."""
    late = StragglerDetector()
    for said in proposed:
        late.record_round(ABSENT, LATE, said, seconds)
    return late


def test_a_few_rounds_or_seconds_say_nothing() -> None:
    assert after(*[False] * (LATE_ROUNDS_MIN - 1)).describe_cause("text") == ""
    assert after(*[False] * 9, seconds=LATE_SECONDS_MIN / 10).describe_cause("text") == "", "a worker that has just been started"
    assert after(*[False] * LATE_ROUNDS_MIN).describe_cause("text") != ""


def test_who_is_absent_nearly_always_is_late_although_it_comes_in_time_now_and_then() -> None:
    late = StragglerDetector()
    told = []
    for number in range(40):
        if late.record_round(ACCEPTED if number in (0, 1, 32) else ABSENT, LATE, False, 1.5):
            told.append(number)
        assert bool(late.describe_cause("text")) == (number >= 21), "after half a minute, and from then on"
    assert told == [21], "and not again when it was in time once"


@pytest.mark.parametrize("outcome", [ACCEPTED, UNJUDGED])
def test_who_comes_in_time_in_half_of_the_rounds_is_not_late(outcome: RoundResult) -> None:
    late = after(*[False] * LATE_ROUNDS_MIN)
    for _ in range(LATE_ROUNDS_MIN - 1):
        late.record_round(outcome, LATE, True, 20.0)
    assert late.describe_cause("text") != "", "it was late in most of the last rounds"
    late.record_round(outcome, LATE, True, 20.0)
    assert late.describe_cause("text") == ""


def test_rounds_in_which_it_does_not_train_count_for_nothing() -> None:
    late = after(*[False] * LATE_ROUNDS_MIN)
    for _ in range(100):
        assert not late.record_round(ELSEWHERE, LATE, True, 20.0)
    assert "in 3 of the last 3 rounds" in late.describe_cause("text")


def test_what_was_late_long_ago_is_forgotten() -> None:
    late = after(*[False] * 100, seconds=1.0)
    assert "in 60 of the last 60 rounds" in late.describe_cause("text")
    assert not any(late.record_round(ACCEPTED, LATE, True, 1.0) for _ in range(60))
    assert not any(late.record_round(ABSENT, LATE, True, 1.0) for _ in range(30)) and late.describe_cause("text") == ""
    assert late.record_round(ABSENT, LATE, True, 1.0), "late again, told again"


def test_who_computes_too_slowly_is_told_of_threads_and_steps() -> None:
    why = after(False, False, True).describe_cause("text")
    assert "missing in 3 of the last 3 rounds of 'text'" in why and "closes after 20.0 s, before they are computed" in why
    assert "`threads`" in why and "`local_steps`" in why and "`proposal_seconds`" in why and "link" not in why


def test_who_proposes_and_is_not_heard_is_told_of_its_link() -> None:
    why = after(True, False, True).describe_cause("text")
    assert "link is too slow, or interrupted" in why and "more `local_steps`" in why and "`proposal_seconds`" in why


def test_it_is_told_ever_more_rarely() -> None:
    late = StragglerDetector()
    assert [number for number in range(1, 100) if late.record_round(ABSENT, LATE, False, 20.0)] == [3, 6, 12, 24, 48, 96]


async def test_the_log_says_it_once_in_a_while_and_the_status_as_long_as_it_lasts() -> None:
    now = 0.0
    witness = NodeObserver(EventLog(), lambda: now)
    running = {JOB: SimpleNamespace(name="text")}
    state: Any = SimpleNamespace(jobs=SimpleNamespace(running=lambda: running))
    for number in range(5):
        assert bool(witness.straggler_text(running)) == (number >= 3)
        opened, now = now, now + 20.0
        closed: Any = SimpleNamespace(job=JOB, round=number, outcome=ABSENT)
        witness.check_straggling(closed, state, LATE, RoundEnded((JOB, number), opened, False))
    (event,) = await witness.events.wait_for_events(0, 0.0)
    assert event.kind == "warning" and event.fields["round"] == "2" and "last 3 rounds" in event.text
    assert "last 5 rounds" in witness.straggler_text(running)
    assert witness.straggler_text({}) == "", "the job has ended"
    for number in range(5, 9):
        closed = SimpleNamespace(job=JOB, round=number, outcome=ACCEPTED)
        witness.check_straggling(closed, state, LATE, RoundEnded((JOB, number), now - 20.0, True))
    assert witness.straggler_text(running) == ""


async def test_a_peer_looks_at_every_round_that_closes_and_knows_whether_it_proposed_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[bytes, bool] = {}

    def took_part(witness: NodeObserver, closed: Any, state: Any, me: bytes, round: RoundEnded) -> None:
        seen[me] = round.has_proposed

    monkeypatch.setattr(NodeObserver, "check_straggling", took_part)
    async with network(tmp_path, founders=2) as made:
        await one_root(made.seats, await made.seats[0].start_job())
        await poll(lambda: len(seen) == 2)
    assert seen == {made.seats[0].public: True, made.seats[1].public: False}
