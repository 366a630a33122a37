"""`peer watch`: the progress of a job, as a live panel on a terminal, or as a line for each round on other outputs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import trio
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from features.peer_names import PeerNames
from features.text_tables import Column, TextTable, pluralize
from peer.commands.table_renderer import TerminalOutput, bar_chart, to_renderable, truncate_text
from peer.commands.view_tables import PLAIN_MEAN, format_age, format_job_state, format_milliseconds, format_seconds, shorten_id
from protocol.api import EventView, JobView, PeerApi, RoundView, RoundVotesView
from protocol.errors import UserError
from protocol.units import display_round_number, format_round_progress
from protocol.verdicts import ABSENT

ROUNDS_KEPT = 2_000  # rounds that the loss curve of the job shows
ROUNDS_ASKED = 20  # last rounds that each refresh fetches again, because the held-out loss of a round arrives after its close
ROUNDS_SHOWN = 8
PACE_ROUNDS = 10  # number of last rounds whose durations give the estimate of the remaining time
PAUSE_SECONDS = 0.5  # seconds between two refreshes
WAIT_SECONDS = 2.0  # longest wait of one call for an event
MEASURED_SECONDS = 5.0  # longest time for which the line of a closed round waits for the held-out loss
CHART_HEIGHT, CHART_WIDTH, BAR_WIDTH = 6, 100, 4  # height in lines, widths in columns
FRAME_WIDTH, FRAME_HEIGHT = 4, 2  # columns and lines of a panel's border and padding
EVENT_KINDS_SHOWN = ("figures", "warning", "job")  # kinds of events about the job, of which the monitor shows the last

NameLookup = PeerNames | Mapping[str, str]  # peer id -> name


# Texts about rounds, which the demo uses, too
# ------------------------------------------------------------------------------------------------


def round_line(view: RoundView, names: NameLookup, has_loss: bool = True) -> str:
    bits = view.held_out_bits_per_byte
    loss = "" if not has_loss else "not measured" if bits is None else f"{bits:.3f} bits/byte"
    accepted = sum(verdict == "accept" for verdict in view.verdicts.values())
    absent = [names[peer] for peer, verdict in view.verdicts.items() if verdict == ABSENT]
    others = [f"{names[peer]}: {verdict}" for peer, verdict in view.verdicts.items() if verdict not in ("accept", ABSENT)]
    told = f"{accepted} accepted" + (f", absent {', '.join(absent)}" if absent else "")
    told += f", rejected {'; '.join(others)}" if others else ""
    return (
        f"round {display_round_number(view.round):3d}  {loss:>16}  {told}  decided in {format_milliseconds(view.decision_ms)}, "
        f"round {format_seconds(view.seconds)}, model root {view.model_root[:12]}"
    )


def rounds_table(rounds: Sequence[RoundView], names: NameLookup) -> TextTable:
    table = TextTable(
        Column("round", is_number=True),
        Column("bits/byte", is_number=True),
        Column("accepted", is_number=True),
        Column("not accepted", wraps=True, style="red"),
        Column("decision", is_number=True, drop_order=2),
        Column("duration", is_number=True, drop_order=3),
        Column("model root", drop_order=1),
        is_live=True,
    )
    for view in rounds:
        accepted = sum(verdict == "accept" for verdict in view.verdicts.values())
        others: dict[str, list[str]] = {}
        for peer, verdict in view.verdicts.items():
            if verdict != "accept":
                others.setdefault(verdict, []).append(names[peer])
        table.add_row(
            str(display_round_number(view.round)),
            "–" if view.held_out_bits_per_byte is None else f"{view.held_out_bits_per_byte:.3f}",
            f"{accepted}{PLAIN_MEAN if view.plain_mean else ''}",
            "; ".join(f"{verdict}: {', '.join(who)}" for verdict, who in others.items()),
            format_milliseconds(view.decision_ms),
            format_seconds(view.seconds),
            shorten_id(view.model_root),
        )
    return table


# Progress of a job -------------------------------------------------------------------------------------------------------


@dataclass
class JobProgress:
    wanted: str  # name of the job or first characters of its id; an empty text means the running job
    job: JobView | None = None
    rounds: dict[int, RoundView] = field(default_factory=dict)
    open: RoundVotesView | None = None
    last_event_text: str = ""  # text of the last event about the job

    @property
    def is_over(self) -> bool:
        return self.job is not None and self.job.state == "finished"

    @property
    def closed(self) -> list[RoundView]:
        return [self.rounds[number] for number in sorted(self.rounds)]

    @property
    def losses(self) -> list[float]:
        return [view.held_out_bits_per_byte for view in self.closed if view.held_out_bits_per_byte is not None]

    async def refresh(self, api: PeerApi) -> None:
        """Fetch the current state of the job. Raises `UserError` if there is no such job."""
        self.job = choose_job(await api.jobs(), self.job.job if self.job else self.wanted)
        last = ROUNDS_ASKED if self.rounds else ROUNDS_KEPT
        self.rounds |= {view.round: view for view in await api.rounds(last) if view.job == self.job.job}
        self.open = next((view for view in await api.votes(0) if view.job == self.job.job and view.height is None), None)

    def add_event(self, event: EventView) -> None:
        if self.job is not None and event.kind in EVENT_KINDS_SHOWN and event.fields.get("job") == self.job.job:
            self.last_event_text = event.text

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds until the job's end at the pace of its last rounds.

        None if the job is not running or no pace is known.
        """
        took = [view.seconds for view in self.closed[-PACE_ROUNDS:] if view.seconds is not None]
        if self.job is None or self.job.state != "running" or not took:
            return None
        return sum(took) / len(took) * (self.job.rounds - self.job.rounds_in_model)


def choose_job(jobs: Sequence[JobView], wanted: str) -> JobView:
    """Return the job with this name or id.

    A running job comes before a paused one of the same name, and a newer one before an older. Raises `UserError` if there is
    none.
    """
    fit = [job for job in jobs if job.name == wanted] or [job for job in jobs if job.job.startswith(wanted.lower())]
    if not fit:
        raise UserError(
            f"unknown job {wanted!r}: `jobs` lists all jobs" if jobs else "no jobs yet; start one with `train --rounds 80`"
        )
    busy = [job for job in fit if job.state == "running"] or [job for job in fit if job.state == "paused"]
    return (busy or fit)[-1]


# Display -----------------------------------------------------------------------------------------------------------------


async def watch_job(api: PeerApi, wanted: str, names: NameLookup, show: Callable[[str], None], on_screen: bool) -> JobView:
    """Show a job's progress until it ends, and return its last view. Raises `UserError` if there is no such job."""
    seen, of = JobProgress(wanted), _LiveProgress(names) if on_screen else _LineProgress(names, show)
    newest = await api.events(-1, 0.0)
    number = newest[-1].number if newest else 0
    with of.screen:
        while True:
            await seen.refresh(api)
            assert seen.job is not None
            of.update(seen)
            if seen.is_over:
                return seen.job
            await trio.sleep(PAUSE_SECONDS)
            for event in await api.events(number, WAIT_SECONDS):
                number = event.number
                seen.add_event(event)


class _LineProgress:
    def __init__(self, names: NameLookup, show: Callable[[str], None]) -> None:
        self._names, self._show, self.screen = names, show, contextlib.nullcontext()
        self._printed: int | None = None  # last round whose line is printed
        self._seen: dict[int, float] = {}  # round -> clock time in seconds at which this monitor first saw the round
        self._told = ""

    def update(self, of: JobProgress) -> None:
        """Print lines for new rounds and events. The first call prints only the last `ROUNDS_SHOWN` rounds."""
        closed = of.closed
        if self._printed is None:
            if not of.is_over:
                self._show(headline(of))
            self._printed = closed[-ROUNDS_SHOWN].round - 1 if len(closed) >= ROUNDS_SHOWN else -1
        for view in closed:
            since = self._seen.setdefault(view.round, trio.current_time())
            may_wait = trio.current_time() < since + MEASURED_SECONDS and not of.is_over
            if view.round <= self._printed:
                continue
            if view.held_out_bits_per_byte is None and may_wait:
                break  # the lines of later rounds wait, too: lines are printed in the order of rounds
            self._show(round_line(view, self._names, has_loss=bool(of.losses)))
            self._printed = view.round
        if of.last_event_text != self._told and not of.is_over:
            self._show(of.last_event_text)
        self._told = of.last_event_text
        if of.is_over:
            self._show(headline(of))


class _LiveProgress:
    def __init__(self, names: NameLookup) -> None:
        self._names = names
        self._console = TerminalOutput(highlight=False, markup=False)
        self.screen = Live(console=self._console, auto_refresh=False)

    def update(self, of: JobProgress) -> None:
        self.screen.update(progress_panel(of, self._names, self._console), refresh=True)


def headline(of: JobProgress) -> str:
    assert of.job is not None
    text = (
        f"job {of.job.name} ({shorten_id(of.job.job)}): {format_job_state(of.job)}, round "
        f"{format_round_progress(of.job.rounds_in_model, of.job.rounds)}"
    )
    if (left := of.seconds_left) is not None:
        text += f", {format_age(left)} left at this pace"
    return text + (f", {of.losses[0]:.3f} → {of.losses[-1]:.3f} bits/byte" if of.is_over and len(of.losses) > 1 else "")


def describe_open_round(of: JobProgress, names: NameLookup) -> str:
    """Return a text that describes the open round and its missing proposals."""
    if of.open is None:
        return {"running": "no round is open", "paused": "paused; resume it with `rlhf resume`"}.get(
            of.job.state if of.job else "", ""
        )
    view = of.open
    missing = [names[peer] for peer in view.trainers if peer not in view.proposed]
    text = (
        f"round {display_round_number(view.round)}, {view.phase} for {format_age(view.seconds or 0)}: "
        f"{pluralize(len(view.proposed), 'proposal')}"
    )
    text += f", missing {', '.join(missing)}" if missing else ""
    return f"{text}; {len(view.votes)} of {pluralize(len(view.voters), 'ballot')} (quorum {view.quorum})"


def progress_panel(of: JobProgress, names: NameLookup, console: Console) -> RenderableType:
    """Return a panel that fits the terminal.

    The lines of trainers have priority, then the loss curve, then as many rounds as fit.
    """
    assert of.job is not None
    width, height = console.size
    # Columns and lines inside the panel; the terminal keeps one line for the cursor.
    room, left = width - FRAME_WIDTH, height - 1 - FRAME_HEIGHT

    def lines_of(part: RenderableType) -> int:
        return len(console.render_lines(part, console.options.update(width=room, height=None), pad=False))

    counted_rounds = f"round {format_round_progress(of.job.rounds_in_model, of.job.rounds)}"
    pace = "" if of.seconds_left is None else f"{format_age(of.seconds_left)} left"
    bar = ProgressBar(
        total=of.job.rounds, completed=of.job.rounds_in_model, width=max(4, room - len(counted_rounds) - len(pace) - 2)
    )
    progress = Table.grid(padding=(0, 1))
    progress.add_row(counted_rounds, bar, pace)
    below: list[RenderableType] = [
        Text(truncate_text(text, room), "dim") for text in (describe_open_round(of, names), of.last_event_text) if text
    ]
    trainers = to_renderable(_trainers(of.job, names))
    left -= 1 + len(below) + lines_of(trainers)
    curve = _curve(of.losses, room) if len(of.losses) > 1 and left > CHART_HEIGHT + 2 else Text()
    left -= lines_of(curve)
    rounds = of.closed
    tables = (to_renderable(rounds_table(rounds[-count:], names)) for count in range(min(ROUNDS_SHOWN, len(rounds)), 0, -1))
    shown = next((table for table in tables if lines_of(table) <= left), Text())
    title = f"{of.job.name or shorten_id(of.job.job)}: {format_job_state(of.job)}"
    return Panel(
        Group(progress, curve, shown, trainers, *below), title=truncate_text(title, room), border_style="green", width=width
    )


def _curve(losses: Sequence[float], room: int) -> Text:
    """Return the loss curve with its title, its highest and its lowest value. Bars are wider if the curve has few rounds."""
    labels = (f"{max(losses):.3f}", f"{min(losses):.3f}")
    margin = max(map(len, labels))
    width = min(CHART_WIDTH, room - margin - 2)
    wide = min(BAR_WIDTH, max(1, width // len(losses)))
    lines = bar_chart([loss for loss in losses for _ in range(wide)], width, CHART_HEIGHT)
    beside = [labels[0], *[""] * (CHART_HEIGHT - 2), labels[1]]
    text = Text.assemble(("held-out bits/byte ", "bold"), (f"{losses[-1]:.3f}", "bold green"))
    for label, line in zip(beside, lines, strict=True):
        text.append(f"\n{label:>{margin}} ┤", "dim").append(line, "green")
    return text


def _trainers(job: JobView, names: NameLookup) -> TextTable:
    table = TextTable(
        Column("trainer"), Column("accepted", is_number=True), Column("not accepted", wraps=True, style="red"), is_live=True
    )
    for peer in dict.fromkeys((*job.accepted, *job.rejected, *job.reexecution_limits)):
        reasons = [f"{reason} {count}" for reason, count in job.rejected.get(peer, {}).items()]
        reasons += (
            [f"suspended until round {display_round_number(job.suspended_until[peer])}"] if peer in job.suspended_until else []
        )
        reasons += [job.reexecution_limits[peer]] if peer in job.reexecution_limits else []
        table.add_row(names[peer], str(job.accepted.get(peer, 0)), ", ".join(reasons))
    return table
