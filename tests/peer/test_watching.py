"""The view of a job in `peer watch`, messages at the prompt, and the detection of a jump of the own loss."""

from __future__ import annotations

import io
import math
import random
import re
import statistics
from collections.abc import Iterable
from dataclasses import replace

import pytest
import trio
import trio.testing
from rich.console import Console

from features.peer_names import PeerNames
from ledger.jobs import RUNNING_MAX
from peer.commands.console import LINES_A_MINUTE_MAX, NotificationFilter, print_notifications
from peer.commands.job_monitor import (
    MEASURED_SECONDS,
    JobProgress,
    choose_job,
    progress_panel,
    round_line,
    watch_job,
)
from peer.commands.table_renderer import bar_chart
from peer.runtime.audit_scheduler import CHANCE_MAX, KNOWN_MIN, LOOKBACK_ROUNDS, first_spike, most_suspect_round
from peer.runtime.round_executor import LOSS_ROUNDS_KEPT, LossHistory
from protocol.api import EventView, JobView, RoundView, RoundVotesView
from protocol.errors import UserError
from tests.peer.fake_api import JOBS, ME, OTHER, ROUNDS, VOTES, FakeApi

NAMES = {ME: "anna", OTHER: "ben"}
JOB = replace(JOBS[0], rounds=5)


def round_of(number: int, bits: float | None) -> RoundView:
    return replace(ROUNDS[0], round=number, held_out_bits_per_byte=bits)


class Training(FakeApi):
    """A job that closes a round at each query. The loss of a round is known one query later."""

    async def jobs(self) -> tuple[JobView, ...]:
        self.asked.append("jobs")
        closed = min(len(self.asked), JOB.rounds)
        return (replace(JOB, round=closed, rounds_in_model=closed, state="finished" if closed == JOB.rounds else "running"),)

    async def rounds(self, last: int) -> tuple[RoundView, ...]:
        closed = len(self.asked)
        return tuple(round_of(number, 4.0 - number if number < closed - 1 else None) for number in range(closed))[-last:]

    async def votes(self, last: int) -> tuple[RoundVotesView, ...]:
        return VOTES[-1:] if last == 0 else VOTES

    async def events(self, after: int, wait_seconds: float) -> tuple[EventView, ...]:
        return (EventView(7, 0, "warning", "too late", {"job": JOB.job}),)


def test_a_trainer_that_was_absent_is_not_called_rejected() -> None:
    view = replace(ROUNDS[0], verdicts={"a": "accept", "b": "absent", "c": "replay"})
    assert "1 accepted, absent ben, rejected carl: replay" in round_line(view, {"a": "anna", "b": "ben", "c": "carl"})
    assert "rejected" not in round_line(replace(view, verdicts={"a": "accept", "b": "absent"}), {"a": "anna", "b": "ben"})


async def test_elsewhere_each_round_is_a_line_and_the_end_is_told(autojump_clock: trio.testing.MockClock) -> None:
    shown: list[str] = []
    assert (await watch_job(Training(), "text", NAMES, shown.append, on_screen=False)).state == "finished"
    assert [line.split()[1] for line in shown if line.startswith("round ")] == list("12345")
    assert [line.split()[2] for line in shown if line.startswith("round ")] == ["4.000", "3.000", "2.000", "1.000", "not"]
    assert shown.count("too late") == 1
    assert "running, round 2 of 5" in shown[0] and "finished, round 5 of 5, 4.000 → 1.000 bits/byte" in shown[-1]


class Unmeasured(Training):
    """A job whose first round is closed without a known loss."""

    async def jobs(self) -> tuple[JobView, ...]:
        self.asked.append("jobs")
        return (replace(JOB, round=1, rounds_in_model=1, state="finished" if len(self.asked) == 30 else "running"),)

    async def rounds(self, last: int) -> tuple[RoundView, ...]:
        return (round_of(0, None),)


async def test_a_round_without_a_loss_has_its_line_before_others_are_closed(autojump_clock: trio.testing.MockClock) -> None:
    shown: list[tuple[float, str]] = []
    began = trio.current_time()
    await watch_job(Unmeasured(), "text", NAMES, lambda line: shown.append((trio.current_time() - began, line)), on_screen=False)
    (at,) = [seconds for seconds, line in shown if line.startswith("round ")]
    assert at <= MEASURED_SECONDS + 0.5


class MeasuredLater(Training):
    """A job whose second round has a loss at once, while that of the first is unknown."""

    async def rounds(self, last: int) -> tuple[RoundView, ...]:
        return tuple(round_of(number, 4.0 - number if number else None) for number in range(min(len(self.asked), JOB.rounds)))


async def test_a_round_that_waits_for_its_loss_has_its_line_before_later_ones(autojump_clock: trio.testing.MockClock) -> None:
    shown: list[str] = []
    await watch_job(MeasuredLater(), "text", NAMES, shown.append, on_screen=False)
    assert [line.split()[1] for line in shown if line.startswith("round ")] == list("12345")


@pytest.mark.parametrize(("width", "height"), [(50, 12), (80, 24), (200, 60)])
def test_the_picture_fits_and_says_who_is_waited_for(width: int, height: int) -> None:
    rounds = {number: round_of(number, 8.0 - number / 10) for number in range(70)}
    seen = JobProgress("", replace(JOB, rounds=80, round=70, rounds_in_model=70), rounds, VOTES[-1], "told")
    console = Console(file=io.StringIO(), width=width, height=height)
    console.print(progress_panel(seen, NAMES, console))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert len(lines) < height and max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "round 71 of 80" in text and "ben" in text and "replay 2" in text and "told" in text
    assert ("8.000 ┤" in text) == (height >= 24)
    assert ("0 proposals, missing anna" in text) == (width >= 80)


def test_a_re_executor_that_is_asked_last_has_a_row_with_the_reason() -> None:
    voter = "v" * 52
    seen = JobProgress("", replace(JOB, reexecution_limits={voter: "is asked last to re-execute"}), {}, VOTES[-1], "")
    console = Console(file=io.StringIO(), width=120, height=24)
    console.print(progress_panel(seen, {**NAMES, voter: "vera"}, console))
    assert isinstance(console.file, io.StringIO)
    assert re.search(r"vera +0 +is asked last to re-execute", console.file.getvalue())


def test_a_chart_goes_from_an_eighth_of_a_line_to_all_lines() -> None:
    assert bar_chart([0, 1, 2, 3], 10, 2) == ["  ▃█", "▁▆██"]
    assert bar_chart([5.0, 5.0], 10, 1) == ["▁▁"]
    assert bar_chart(list(range(9)), 3, 1) == ["▁▅█"]  # the newest value is always shown
    assert bar_chart([], 10, 2) == ["", ""]


def test_the_job_is_the_one_that_is_named_else_the_one_that_runs() -> None:
    old, running, waiting = replace(JOB, job="a" * 64, state="finished"), JOB, replace(JOB, job="b" * 64, state="waiting")
    assert choose_job((old, running, waiting), "") is running
    assert choose_job((old, running, waiting), "text") is running
    assert choose_job((old, running, waiting), "aaa") is old
    assert choose_job((old, waiting), "") is waiting
    with pytest.raises(UserError, match="unknown job 'nope': `jobs` lists all jobs"):
        choose_job((old,), "nope")
    with pytest.raises(UserError, match="no jobs yet"):
        choose_job((), "")


WATCHED = bytes(32)


def watched(losses: Iterable[float]) -> LossHistory:
    watch = LossHistory()
    for number, loss in enumerate(losses):
        watch.record_loss(WATCHED, number, loss)
    return watch


@pytest.mark.parametrize(
    ("losses", "first"),
    [
        ([], None),
        ([2.0], None),
        ([2.0] * (KNOWN_MIN - 1) + [9.0], None),
        ([2.0] * KNOWN_MIN + [2.1], None),
        ([2.0] * KNOWN_MIN + [2.3], KNOWN_MIN),
        ([5.0, 4.0, 3.0, 2.0, 4.5], None),  # it falls, and rises to a recent value
        ([5.0, 4.0, 3.0, 2.0, 1.9, 1.8, 1.8, 1.7, 9.0], 8),  # the fall at first hides nothing
        ([1.6, 1.4] * 4 + [1.8], None),  # the usual difference between rounds
        ([1.6, 1.4] * 4 + [2.4], 8),
        ([1.0, 2.0] * 4 + [1.0, 2.1], 9),  # liars cause the differences
        ([1.5] * 9 + [1.6, 1.7], 10),  # the rise takes two steps
        ([1.5] * 9 + [2.0, 9.0, 3.0], 9),
        ([1.5] * 9 + [9.0, 1.5], None),  # the rise is over
        ([1.5] * 9 + [9.0] * LOOKBACK_ROUNDS, None),  # the loss has been this high for long
        ([1.5] * 9 + [math.inf], 9),
        ([1.5] * 9 + [math.inf] * 3, 9),
    ],
)
def test_a_jump_is_far_above_the_rounds_before(losses: list[float], first: int | None) -> None:
    assert first_spike(watched(losses).losses(WATCHED, ()), len(losses)) == first


def test_a_loss_that_is_a_third_above_the_usual_one_has_jumped_whatever_came_before() -> None:
    chance = random.Random(0)
    for _ in range(100):
        before = [chance.uniform(1, 9) for _ in range(LOOKBACK_ROUNDS)]
        jumped = 1.001 * (1 + CHANCE_MAX) * statistics.median(before)
        assert first_spike(watched([*before, jumped]).losses(WATCHED, ()), 9) is not None


@pytest.mark.parametrize("deviation", [0.03, 0.07])
def test_honest_losses_hardly_ever_jump(deviation: float) -> None:
    chance, watch, jumps = random.Random(0), LossHistory(), 0
    for number in range(3_000):
        watch.record_loss(WATCHED, number, (1.5 + 2 / (number + 1)) * chance.gauss(1, deviation))
        jumps += first_spike(watch.losses(WATCHED, ()), number + 1) is not None
    assert jumps <= 3_000 / 50


def test_a_jump_of_long_ago_says_nothing() -> None:
    losses = watched([1.5] * 9 + [1.8]).losses(WATCHED, ())
    assert [first_spike(losses, opened) for opened in (9, 10, 11)] == [9, 9, None]


def test_the_round_before_a_jump_is_most_suspect_and_then_its_neighbours() -> None:
    left, order = {3, 4, 5, 6, 7}, list[int]()
    while left:
        order.append(most_suspect_round(left, 6))
        left.remove(order[-1])
    assert order == [5, 4, 6, 3, 7]


def test_losses_of_undone_rounds_do_not_count_and_those_before_them_do() -> None:
    """A lie right after a rollback is detected as any other."""
    watch = watched([1.5] * 9 + [1.8] * 3 + [1.8])
    assert first_spike(watch.losses(WATCHED, [(9, 11)]), 13) == 12
    assert first_spike(watch.losses(WATCHED, [(9, 12)]), 13) is None
    assert first_spike(watch.losses(WATCHED, [(2, 5), (6, 11)]), 13) is None, "two rounds are known"


def test_the_last_losses_of_the_last_jobs_are_kept() -> None:
    watch = watched([1.0] * 100)
    assert [*watch.losses(WATCHED, ())] == [*range(100 - LOSS_ROUNDS_KEPT, 100)]
    for job in range(1, RUNNING_MAX + 1):
        watch.record_loss(bytes([job]) * 32, 0, 1.0)
    assert not watch.losses(WATCHED, ()) and watch.losses(bytes([RUNNING_MAX]) * 32, ())


MINUTE_MS = 60_000


def event(kind: str, text: str, at_ms: int = 0, **fields: str) -> EventView:
    return EventView(1, at_ms, kind, text, fields)


def loss(at_ms: int) -> EventView:
    return event("measured", "before round 3: held-out loss 2.500 bits/byte", at_ms, name="held_out_bits_per_byte")


@pytest.mark.parametrize("kind", ["member", "job", "warning", "evidence", "serve"])
def test_what_concerns_people_is_said(kind: str) -> None:
    assert NotificationFilter().filter_event(event(kind, "something")) == event(kind, "something")


@pytest.mark.parametrize("kind", ["decided", "applied", "ballot", "proposal", "round", "audit"])
def test_what_happens_every_second_is_not(kind: str) -> None:
    assert NotificationFilter().filter_event(event(kind, "something")) is None


def test_the_loss_and_a_round_s_figures_are_said_once_a_minute() -> None:
    chosen = NotificationFilter()
    times = range(0, 3 * MINUTE_MS, 10_000)
    said = [(chosen.filter_event(loss(at)), chosen.filter_event(event("figures", "score 0.5", at))) for at in times]
    assert said == [(loss(at), event("figures", "score 0.5", at)) if at % MINUTE_MS == 0 else (None, None) for at in times]


def test_a_peer_is_said_to_be_here_once_however_often_its_link_breaks() -> None:
    chosen = NotificationFilter()
    links = [event("peer", text, peer=ME) for text in ("connected to anna", "lost the link to anna", "connected to anna")]
    assert [chosen.filter_event(link) for link in links] == [links[0], None, None]
    failed = [event("peer", f"cannot reach h:1: no route to host ({tries} tries)") for tries in (1, 3, 9)]
    assert [chosen.filter_event(dial) for dial in failed] == [failed[0], None, None]


def test_what_a_command_at_this_prompt_answers_is_no_news_there() -> None:
    chosen = NotificationFilter(ME)
    chosen.record_typed_line(f"connect h:1 {OTHER}@h:2")
    failed = [event("peer", f"cannot reach h:{port}: no route to host (1 tries)") for port in (1, 2, 3)]
    assert [chosen.filter_event(dial) for dial in failed] == [None, None, failed[2]]
    started = [event("warning", "job text: audit=sampled is not", author=author) for author in (ME, OTHER)]
    assert [chosen.filter_event(start) for start in started] == [None, started[1]], "of its own job `train` has said it"


def test_a_flood_of_warnings_does_not_fill_the_screen() -> None:
    chosen = NotificationFilter()
    said = [chosen.filter_event(event("warning", "dropped a liar", at)) for at in range(1_000)]
    shown = [line.text for line in said if line is not None]
    assert len(shown) == LINES_A_MINUTE_MAX and "`log` has further events" in shown[-1] and "see" not in shown[-2]
    assert chosen.filter_event(event("warning", "another", MINUTE_MS)) == event("warning", "another", MINUTE_MS), (
        "the next minute is new"
    )


async def test_announcements_begin_with_the_address_of_the_pages_and_speak_of_names() -> None:
    short = OTHER[:8]
    served = EventView(3, 0, "serve", "web pages are served at http://127.0.0.1:7780/", {})
    old = EventView(7, 0, "member", "old news", {})
    new = EventView(8, 0, "member", f"{short} is a voter candidate: to approve it, run `peer approve {short}`", {})

    class Api(FakeApi):
        async def events(self, after: int, wait_seconds: float) -> tuple[EventView, ...]:
            if after == new.number:
                await trio.sleep_forever()
            return (served, old) if after == 0 else (new,)

    async def names() -> PeerNames:
        return PeerNames({ME: "anna", OTHER: "erin II"})

    lines: list[str] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(print_notifications, Api(), names, lines.append, NotificationFilter())
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    pages, line = lines
    assert pages.endswith("web pages are served at http://127.0.0.1:7780/")
    assert line.endswith("member    erin II is a voter candidate: to approve it, run `peer approve 'erin II'`")
