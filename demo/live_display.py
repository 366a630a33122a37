"""Output of the demo: a live table on a terminal, otherwise a line for each round, and a summary."""

from __future__ import annotations

import io
import re
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from types import TracebackType

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from consensus.voter_set import quorum
from demo.demo_peers import TEXT, Demo, count_bytes_sent
from demo.demo_report import DemoReport, RlhfResult
from features.text_tables import Column, TextTable, pluralize
from peer.commands.job_monitor import round_line, rounds_table
from peer.commands.table_renderer import (
    WIDTH_WITHOUT_TERMINAL,
    TerminalOutput,
    bar_chart,
    to_renderable,
    truncate_text,
    wrap_text,
)
from protocol.api import JobView, RoundView
from protocol.identity import peer_id
from protocol.units import display_round_number, format_round_progress
from protocol.verdicts import ABSENT, INVALID_UPDATES_REASON
from training.engine_implementations import USUAL_ENGINE
from training.objectives import registry

ROUNDS_SHOWN = 8
SCREEN_WIDTH, SCREEN_HEIGHT = 104, 40  # columns and lines of the picture in the demo's report
FRAME_WIDTH, FRAME_HEIGHT = 4, 2  # border of a panel, and one space at each side
HEAD_HEIGHT = 2  # lines above the tables


class DemoDisplay:
    def __init__(self, demo: Demo) -> None:
        self._demo = demo
        self._names = {peer_id(peer.identity.public): peer.name for peer in demo.peers}
        self._console = TerminalOutput(highlight=False, markup=False)
        if not self._console.is_terminal:
            self._console.width = WIDTH_WITHOUT_TERMINAL
        self._live = Live(console=self._console, refresh_per_second=4) if self._console.is_terminal else None
        self._printed = 0
        self._expelled: set[str] = set()
        self._suspended: dict[str, int] = {}
        self._undone = 0
        self._last: tuple[JobView, tuple[RoundView, ...]] | None = None

    def __enter__(self) -> DemoDisplay:
        options = self._demo.options
        liars = f"{options.malicious} of them dishonest ({options.attack})" if options.malicious else "all honest"
        begins = f"folkmoot demo: {options.peers} peers, {liars}, training on"
        if options.rlhf == TEXT:
            self._print(f"folkmoot demo: {options.peers} peers, {liars}, training a base model, a reward model and a policy")
        elif options.rlhf:
            self._print(f"folkmoot demo: {options.peers} peers, {liars}, tuning a toy with a known best policy")
        elif options.data:
            self._print(begins, Path(options.data))
        else:
            self._print(f"{begins} the built-in text")
        trainers = [peer for peer in self._demo.peers if peer.trains]
        if {peer.engine for peer in trainers} != {USUAL_ENGINE}:
            self._print("engines: " + ", ".join(f"{peer.name} {peer.engine}" for peer in trainers))
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live:
            self._live.stop()

    def print_line(self, text: str, path: Path | None = None) -> None:
        self._print(f"{time.time() - self._demo.started:6.1f} s  {text}", path)

    def _print(self, text: str, path: Path | None = None) -> None:
        """Print a text that wraps between words. A path is appended to the text, quoted for a shell and without wraps."""
        *lines, last = wrap_text(text, self._console.width)
        if path is not None:
            quoted = shlex.quote(str(path))
            fits = cell_len(last) + 1 + cell_len(quoted) <= self._console.width
            lines, last = (lines, f"{last} {quoted}") if fits else ([*lines, last], quoted)
        self._console.print("\n".join([*lines, last]), soft_wrap=True)

    def print_expulsions(self) -> None:
        seen = self._demo.watched.stats
        for key in set(seen.expelled if seen is not None else ()) - self._expelled:
            self._expelled.add(key)
            self.print_line(f"{self._names[key]} is expelled: it signed two statements that exclude each other")

    @property
    def _why_suspended(self) -> str:
        if not self._demo.is_sampled:
            return INVALID_UPDATES_REASON
        if self._demo.options.attack == "lazy":
            return "more trainers contradict its reported losses than can be faulty"
        return "its updates were false, or it withheld its buffers"

    def _say_who_is_suspended(self, job: JobView) -> None:
        for key, until in job.suspended_until.items():
            if self._suspended.get(key) != until:
                self.print_line(
                    f"{self._names[key]} is suspended until round {display_round_number(until)}: {self._why_suspended}"
                )
        self._suspended = dict(job.suspended_until)
        for told in job.undone_rounds[self._undone :]:
            self.print_line(f"{told}; the job continues from an earlier model")
        self._undone = len(job.undone_rounds)

    def update(self, job: JobView, rounds: tuple[RoundView, ...]) -> None:
        self._last = job, rounds
        self._say_who_is_suspended(job)
        if self._live:
            self._live.update(self._picture(job, rounds, *self._console.size))
        while not self._live and self._printed < len(rounds) and self._is_measured(rounds):
            self._console.print(round_line(rounds[self._printed], self._names, not self._demo.options.rlhf), soft_wrap=True)
            self._printed += 1

    def _is_measured(self, rounds: tuple[RoundView, ...]) -> bool:
        """Return True if a round that is not printed yet has a measured loss. Measurements are later than rounds."""
        return bool(self._demo.options.rlhf) or any(view.held_out_bits_per_byte is not None for view in rounds[self._printed :])

    def _picture(self, job: JobView, rounds: tuple[RoundView, ...], width: int, height: int) -> RenderableType:
        """Render the panel of the live display.

        The table of peers is complete, and the newest rounds fill the remaining height.
        """
        room = width - FRAME_WIDTH
        values = [view.held_out_bits_per_byte for view in rounds if view.held_out_bits_per_byte is not None]
        title, newest = "held-out bits/byte  ", "  " + (f"{values[-1]:.3f}" if values else "–")
        [bars] = bar_chart(values, min(CURVE_WIDTH, room - len(title) - len(newest)), 1)
        head = Text.assemble((title, "bold"), bars, (newest, "bold green"))
        counted, taken = (
            f"round {format_round_progress(job.rounds_in_model, job.rounds)}",
            f"{time.time() - self._demo.started:.0f} s",
        )
        bar = ProgressBar(
            total=job.rounds, completed=job.rounds_in_model, width=min(CURVE_WIDTH, room - len(counted) - len(taken) - 2)
        )
        progress = Table.grid(padding=(0, 1))
        progress.add_row(counted, bar, taken)
        peers = self._peers_table(job)
        # Lines for the table of rounds; the terminal keeps one line for the cursor.
        left = height - 1 - FRAME_HEIGHT - HEAD_HEIGHT - self._height(peers, room)
        shown = next(
            (
                to_renderable(table)
                for count in range(ROUNDS_SHOWN, 0, -1)
                if self._height(table := rounds_table(rounds[-count:], self._names), room) <= left
            ),
            Text(),
        )
        return Panel(Group(progress, head, shown, to_renderable(peers)), title="folkmoot demo", border_style="green", width=width)

    def _height(self, table: TextTable, width: int) -> int:
        return len(
            self._console.render_lines(to_renderable(table), self._console.options.update(width=width, height=None), pad=False)
        )

    def _peers_table(self, job: JobView) -> TextTable:
        table = TextTable(
            Column("peer"),
            Column("accepted", is_number=True),
            Column("not accepted", wraps=True, style="red"),
            Column("sent", is_number=True, drop_order=2),
            Column("memory", is_number=True, drop_order=1),
            is_live=True,
        )
        seen = self._demo.watched.stats
        expelled = seen.expelled if seen is not None else ()
        for peer in self._demo.peers:
            key = peer_id(peer.identity.public)
            reasons = [f"{reason} {count}" for reason, count in job.rejected.get(key, {}).items()]
            reasons += ["expelled"] * (key in expelled) + ["suspended"] * (key in job.suspended_until)
            sent, memory = f"{count_bytes_sent(peer) / 1e6:.1f} MB", f"{peer.memory_mb:.0f} MB"
            table.add_row(peer.name, str(job.accepted.get(key, 0)), ", ".join(reasons), sent, memory)
        return table

    def print_summary(self, report: DemoReport) -> None:
        width = self._console.width
        self._console.print(self._summary(report, width) if self._live else render_summary(report, self._why_suspended, width))
        self._print("report, curve, sample and export:", self._demo.folder)
        if self._last is not None:
            screen = self._picture(*self._last, SCREEN_WIDTH, SCREEN_HEIGHT)
            save_picture(self._demo.folder / "screen.svg", screen, self._summary(report, SCREEN_WIDTH))

    def _summary(self, report: DemoReport, width: int) -> Panel:
        return Panel(
            render_summary(report, self._why_suspended, width - FRAME_WIDTH),
            title="summary",
            border_style="green" if report.passed else "red",
            width=width,
        )


def save_picture(file: Path, *parts: RenderableType) -> None:
    """Save the screen as an SVG without external fonts."""
    console = Console(record=True, width=SCREEN_WIDTH, file=io.StringIO(), highlight=False)
    for part in parts:
        console.print(part)
    without_fonts = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL).replace("Fira Code", "monospace")
    console.save_svg(str(file), title="peer demo", code_format=without_fonts)


# The summary ------------------------------------------------------------------------------------------------------------

CURVE_WIDTH = 60

Row = tuple[str, RenderableType]


def render_summary(report: DemoReport, why_suspended: str, room: int) -> Group:
    """Render the summary of the demo for a width of `room` columns.

    `why_suspended` is the reason for suspensions in this demo.
    """
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column()
    left = room - max(map(len, (report.accepted | report.state_roots))) - len("state root of   ")
    for row in (*_learned(report, left), *_judged(report, why_suspended), *_spent(report, left)):
        table.add_row(*row)
    return Group(table, Text(), _verdict(report))


def _learned(report: DemoReport, left: int) -> Iterator[Row]:
    bits = report.heldout_bits_per_byte
    if len(bits) > 1:
        fall = f"{bits[0]:.3f} → {bits[-1]:.3f}"
        [bars] = bar_chart(bits, min(CURVE_WIDTH, left - len(fall) - 3), 1)
        yield "held-out bits/byte", f"{fall}   {bars}"
    if report.rlhf is not None:
        yield from _tuned(report.rlhf)
    if report.baseline_bits_per_byte is not None and bits:
        ratio = bits[-1] / report.baseline_bits_per_byte
        yield "one process alone", f"{report.baseline_bits_per_byte:.3f} bits/byte; the network's loss is {ratio:.3f} × that"


def _tuned(rlhf: RlhfResult) -> Iterator[Row]:
    gap = f"{rlhf.reference_value:.4f} → {rlhf.value:.4f}"
    if rlhf.gap_closed is not None:
        gap += f" of {rlhf.optimum:.4f}, {rlhf.gap_closed:.2%} of the way"
    yield "value", f"{gap} (score {rlhf.score:.4f}, {rlhf.kl:.3f} nats from the reference)"
    if rlhf.distinct_2 is not None:
        yield "responses", f"{rlhf.response_tokens:.1f} tokens, distinct-2 {rlhf.distinct_2:.4f} in the last round"
    if rlhf.pair_accuracy is not None:
        beside = f", {rlhf.linear_accuracy:.1%} by a linear model" if rlhf.linear_accuracy is not None else ""
        yield "held-out preferences", f"{rlhf.pair_accuracy:.1%} predicted correctly{beside}"


def _judged(report: DemoReport, why_suspended: str) -> Iterator[Row]:
    for name, count in report.accepted.items():
        yield name, f"{pluralize(count, 'proposal')} accepted"
    meanings = registry.rejection_meanings()
    for name, reasons in report.rejected.items():
        told = ", ".join(f"{count} × {reason} ({meanings.get(reason, reason)})" for reason, count in reasons.items())
        yield name, Text(f"{'not accepted' if ABSENT in reasons else 'rejected'}: {told}", "red")
    for name, height in report.expelled.items():
        yield name, Text(f"expelled at height {height}: it signed two statements that exclude each other", "red")
    for name, count in report.suspensions.items():
        yield name, Text(f"suspended {_times(count)}: {why_suspended}", "red")
    for told in report.undone:
        yield "model", Text(told, "red")
    for name, count in report.false_challenges.items():
        yield name, Text(f"challenged honest proposals {_times(count)}", "red")


def _spent(report: DemoReport, left: int) -> Iterator[Row]:
    heights = ", ".join(map(str, sorted(set(report.heights.values()))))
    voters = report.voters - len(report.expelled)
    now = f", {quorum(voters)} of {voters} at the end" if report.expelled else ""
    yield "blocks decided", f"{heights} (quorum {report.quorum} of {report.voters}{now})"
    if report.decision_ms_p50 is not None and report.decision_ms_p99 is not None:
        yield "decision time", f"{report.decision_ms_p50:.0f} ms median, {report.decision_ms_p99:.0f} ms p99"
    if report.bytes_sent_per_peer_per_round is not None:
        yield "bytes sent", f"{report.bytes_sent_per_peer_per_round / 1e6:.2f} MB per peer and round, audit reveals included"
    if report.replays_per_round:
        counts = report.replays_per_round.values()
        yield "re-executions", f"{mean(counts):.2f} per peer and round, at most {max(counts):.2f}"
    yield "memory", ", ".join(f"{name} {size:.0f} MB" for name, size in report.pss_mb_per_peer.items())
    for name, root in report.state_roots.items():
        yield f"state root of {name}", truncate_text(root, left) if root else "cannot be read"
    first = f"{report.seconds_to_first_decision:.1f} s" if report.seconds_to_first_decision is not None else "never"
    yield "time", f"{report.seconds_total:.1f} s, first decision after {first}"


def _verdict(report: DemoReport) -> Text:
    if not report.passed:
        return Text("FAILED: " + "; ".join(report.failures), "bold red")
    lies = "each dishonest peer was found" if report.audit == "sampled" else "no false update was accepted"
    lies = lies if report.malicious else "all peers were honest"
    gain = "the loss fell" if report.rlhf is None else "the policy is better than its reference"
    return Text(f"all honest peers have equal state roots, {lies}, {gain}", "bold green")


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
