"""What a person sees of the demo: a live table on a terminal, one line for each round elsewhere, and a summary."""

from __future__ import annotations

import io
import re
import shlex
import time
from pathlib import Path
from types import TracebackType

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from demo.demo_peers import TEXT, Demo
from demo.demo_report import DemoReport
from demo.report_summary import CURVE_WIDTH, render_summary
from features.text_tables import Column, TextTable
from peer.commands.job_monitor import round_line, rounds_table
from peer.commands.table_renderer import WIDTH_WITHOUT_TERMINAL, TerminalOutput, bar_chart, to_renderable, wrap_text
from protocol.api import BULK_TRAFFIC_KINDS, JobView, RoundView
from protocol.identity import peer_id
from protocol.units import display_round_number, format_round_progress
from protocol.verdicts import INVALID_UPDATES_REASON

ROUNDS_SHOWN = 8
SCREEN_WIDTH, SCREEN_HEIGHT = 104, 40  # columns and lines of the picture for reports
FRAME_WIDTH, FRAME_HEIGHT = 4, 2  # of a panel: its border, and a blank at each side
HEAD_HEIGHT = 2  # lines over the tables


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
        liars = f"{options.malicious} of them lying ({options.attack})" if options.malicious else "all honest"
        begins = f"folkmoot demo: {options.peers} peers, {liars}, training on"
        if options.rlhf == TEXT:
            self._print(f"folkmoot demo: {options.peers} peers, {liars}: a base, a reward model, a policy that is tuned by it")
        elif options.rlhf:
            self._print(f"folkmoot demo: {options.peers} peers, {liars}, tuning a toy whose best policy is known")
        elif options.data:
            self._print(begins, Path(options.data))
        else:
            self._print(f"{begins} the language reference inside Python")
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live:
            self._live.stop()

    def print_line(self, text: str, path: Path | None = None) -> None:
        self._print(f"{time.time() - self._demo.started:6.1f} s  {text}", path)

    def _print(self, text: str, path: Path | None = None) -> None:
        """Words stay whole. A path at the end is written as a shell wants it and never broken, so that it can be copied."""
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
            self.print_line(f"{self._names[key]} is expelled: every peer holds two messages of it that exclude each other")

    @property
    def _why_suspended(self) -> str:
        if not self._demo.is_sampled:
            return INVALID_UPDATES_REASON
        if self._demo.options.attack == "lazy":
            return "more trainers contradict the losses that it reports than may lie, so it replays nothing"
        return "an audit, or re-execution before the vote, found its update false or withheld"

    def _say_who_is_suspended(self, job: JobView) -> None:
        for key, until in job.suspended_until.items():
            if self._suspended.get(key) != until:
                self.print_line(
                    f"{self._names[key]} is suspended until round {display_round_number(until)}: {self._why_suspended}"
                )
        self._suspended = dict(job.suspended_until)
        for told in job.undone_rounds[self._undone :]:
            self.print_line(f"{told}; the model goes on from before them")
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
        """Measuring runs behind the rounds; a line waits for it unless a later round was measured instead."""
        return bool(self._demo.options.rlhf) or any(view.held_out_bits_per_byte is not None for view in rounds[self._printed :])

    def _picture(self, job: JobView, rounds: tuple[RoundView, ...], width: int, height: int) -> RenderableType:
        """Fits the terminal: the peers have all their reasons, and the rounds what room is left."""
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
        left = height - 1 - FRAME_HEIGHT - HEAD_HEIGHT - self._height(peers, room)  # beside the line of the cursor
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
            stats = peer.stats
            total = (
                0 if stats is None else sum(count for kind, count in stats.bytes_sent.items() if kind not in BULK_TRAFFIC_KINDS)
            )
            accepted = str(job.accepted.get(key, 0))
            table.add_row(peer.name, accepted, ", ".join(reasons), f"{total / 1e6:.1f} MB", f"{peer.memory_mb:.0f} MB")
        return table

    def print_summary(self, report: DemoReport) -> None:
        width = self._console.width
        self._console.print(self._summary(report, width) if self._live else render_summary(report, self._why_suspended, width))
        self._print("report, curve, sample and export:", self._demo.folder)
        if self._last is not None:
            screen = self._picture(*self._last, SCREEN_WIDTH, SCREEN_HEIGHT)
            save_picture(self._demo.folder / "screen.svg", screen, self._summary(report, SCREEN_WIDTH))

    def _summary(self, report: DemoReport, width: int) -> Panel:
        colour = "green" if report.passed else "red"
        return Panel(
            render_summary(report, self._why_suspended, width - FRAME_WIDTH), title="summary", border_style=colour, width=width
        )


def save_picture(file: Path, *parts: RenderableType) -> None:
    """What the terminal showed, as an SVG that loads nothing from anywhere."""
    console = Console(record=True, width=SCREEN_WIDTH, file=io.StringIO(), highlight=False)
    for part in parts:
        console.print(part)
    without_fonts = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL).replace("Fira Code", "monospace")
    console.save_svg(str(file), title="peer demo", code_format=without_fonts)
