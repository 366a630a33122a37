"""What `peer watch` shows of a job: it fits the terminal, and elsewhere each round is a line, as soon as its loss is known."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
import trio
from rich.console import Console

from peer.commands.job_monitor import MEASURED_SECONDS, JobProgress, choose_job, progress_panel, round_line, watch_job
from peer.commands.table_renderer import bar_chart
from protocol.api import EventView, JobView, RoundView, RoundVotesView
from protocol.errors import UserError
from tests.peer.fake_api import JOBS, ME, OTHER, ROUNDS, VOTES, FakeApi

NAMES = {ME: "anna", OTHER: "ben"}
JOB = replace(JOBS[0], rounds=5)


def round_of(number: int, bits: float | None) -> RoundView:
    return replace(ROUNDS[0], round=number, held_out_bits_per_byte=bits)


class Training(FakeApi):
    """Closes a round each time that somebody asks; its loss is known one question later."""

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
    """Its first round is closed, and its loss is known to nobody."""

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
    """The loss of its first round is known to nobody, while that of the second comes at once."""

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
    assert ("0 proposals, waits for anna" in text) == (width >= 80)


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
    assert bar_chart(list(range(9)), 3, 1) == ["▁▅█"]  # the newest is always there
    assert bar_chart([], 10, 2) == ["", ""]


def test_the_job_is_the_one_that_is_named_else_the_one_that_runs() -> None:
    old, running, waiting = replace(JOB, job="a" * 64, state="finished"), JOB, replace(JOB, job="b" * 64, state="waiting")
    assert choose_job((old, running, waiting), "") is running
    assert choose_job((old, running, waiting), "text") is running
    assert choose_job((old, running, waiting), "aaa") is old
    assert choose_job((old, waiting), "") is waiting
    with pytest.raises(UserError, match="no job 'nope'; `jobs` lists them"):
        choose_job((old,), "nope")
    with pytest.raises(UserError, match="no job yet"):
        choose_job((), "")
