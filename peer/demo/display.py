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

from consensus.quorum import quorum
from features.tables import Column, Fitted, counted
from peer.commands.drawing import WIDTH_WITHOUT_TERMINAL, drawn, fitting, wrapped
from peer.commands.views import PLAIN_MEAN, milliseconds, seconds, short
from peer.demo.cast import TEXT, Demo
from peer.demo.report import Report
from protocol.api import PARTS, JobView, RoundView
from protocol.identity import peer_id
from training.objectives import registry

ROUNDS_SHOWN = 8
BARS = "▁▂▃▄▅▆▇█"
CURVE_WIDTH = 60
SCREEN_WIDTH, SCREEN_HEIGHT = 104, 40  # columns and lines of the picture for reports
FRAME_WIDTH, FRAME_HEIGHT = 4, 2  # of a panel: its border, and a blank at each side
HEAD_HEIGHT = 2  # lines over the tables


class Display:
    def __init__(self, demo: Demo) -> None:
        self._demo = demo
        self._names = {peer_id(peer.identity.public): peer.name for peer in demo.peers}
        self._console = Console(highlight=False, markup=False)
        if not self._console.is_terminal:
            self._console.width = WIDTH_WITHOUT_TERMINAL
        self._live = Live(console=self._console, refresh_per_second=4) if self._console.is_terminal else None
        self._printed = 0
        self._expelled: set[str] = set()
        self._suspended: dict[str, int] = {}
        self._last: tuple[JobView, tuple[RoundView, ...]] | None = None

    def __enter__(self) -> Display:
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

    def say(self, text: str, path: Path | None = None) -> None:
        self._print(f"{time.time() - self._demo.started:6.1f} s  {text}", path)

    def _print(self, text: str, path: Path | None = None) -> None:
        """Words stay whole. A path at the end is written as a shell wants it and never broken, so that it can be copied."""
        *lines, last = wrapped(text, self._console.width)
        if path is not None:
            quoted = shlex.quote(str(path))
            fits = cell_len(last) + 1 + cell_len(quoted) <= self._console.width
            lines, last = (lines, f"{last} {quoted}") if fits else ([*lines, last], quoted)
        self._console.print("\n".join([*lines, last]), soft_wrap=True)

    def say_who_is_expelled(self) -> None:
        seen = self._demo.watched.stats
        for key in set(seen.expelled if seen is not None else ()) - self._expelled:
            self._expelled.add(key)
            self.say(f"{self._names[key]} is expelled: every peer holds two messages of it that exclude each other")

    @property
    def _why_suspended(self) -> str:
        if self._demo.options.attack == "lazy":
            return "more trainers contradict the losses that it reports than may lie, so it replays nothing"
        return "an audit of its steps found them false or withheld"

    def _say_who_is_suspended(self, job: JobView) -> None:
        for key, until in job.suspended.items():
            if self._suspended.get(key) != until:
                self.say(f"{self._names[key]} is suspended until round {until}: {self._why_suspended}")
        self._suspended = dict(job.suspended)

    def update(self, job: JobView, rounds: tuple[RoundView, ...]) -> None:
        self._last = job, rounds
        self._say_who_is_suspended(job)
        if self._live:
            self._live.update(self._picture(job, rounds, *self._console.size))
        while not self._live and self._printed < len(rounds) and self._is_measured(rounds):
            self._console.print(self._line(rounds[self._printed]), soft_wrap=True)
            self._printed += 1

    def _is_measured(self, rounds: tuple[RoundView, ...]) -> bool:
        """Measuring runs behind the rounds; a line waits for it unless a later round was measured instead."""
        return bool(self._demo.options.rlhf) or any(view.held_out_bits_per_byte is not None for view in rounds[self._printed :])

    def _line(self, view: RoundView) -> str:
        bits = "not measured"
        if self._demo.options.rlhf:
            bits = ""
        elif view.held_out_bits_per_byte is not None:
            bits = f"{view.held_out_bits_per_byte:.3f} bits/byte"
        return (
            f"round {view.round:3d}  {bits:>16}  {self._verdicts(view)}  decided in {milliseconds(view.decision_ms)}, "
            f"round {seconds(view.seconds)}, model root {view.model_root[:12]}"
        )

    def _verdicts(self, view: RoundView) -> str:
        accepted = sum(verdict == "accept" for verdict in view.verdicts.values())
        others = [f"{self._names[peer]}: {verdict}" for peer, verdict in view.verdicts.items() if verdict != "accept"]
        return f"{accepted} accepted" + (f", rejected {'; '.join(others)}" if others else "")

    def _picture(self, job: JobView, rounds: tuple[RoundView, ...], width: int, height: int) -> RenderableType:
        """Fits the terminal: the peers have all their reasons, and the rounds what room is left."""
        room = width - FRAME_WIDTH
        values = [view.held_out_bits_per_byte for view in rounds if view.held_out_bits_per_byte is not None]
        title, newest = "held-out bits/byte  ", "  " + (f"{values[-1]:.3f}" if values else "–")
        bars = curve(values, min(CURVE_WIDTH, room - len(title) - len(newest)))
        head = Text.assemble((title, "bold"), bars, (newest, "bold green"))
        counted, taken = f"round {job.round} of {job.rounds}", f"{time.time() - self._demo.started:.0f} s"
        bar = ProgressBar(total=job.rounds, completed=job.round, width=min(CURVE_WIDTH, room - len(counted) - len(taken) - 2))
        progress = Table.grid(padding=(0, 1))
        progress.add_row(counted, bar, taken)
        peers = self._peers_table(job)
        left = height - 1 - FRAME_HEIGHT - HEAD_HEIGHT - self._height(peers, room)  # beside the line of the cursor
        shown = next(
            (
                drawn(table)
                for count in range(ROUNDS_SHOWN, 0, -1)
                if self._height(table := self._rounds_table(rounds[-count:]), room) <= left
            ),
            Text(),
        )
        return Panel(Group(progress, head, shown, drawn(peers)), title="folkmoot demo", border_style="green", width=width)

    def _height(self, table: Fitted, width: int) -> int:
        return len(self._console.render_lines(drawn(table), self._console.options.update(width=width, height=None), pad=False))

    def _rounds_table(self, rounds: tuple[RoundView, ...]) -> Fitted:
        table = Fitted(
            Column("round", is_number=True),
            Column("bits/byte", is_number=True),
            Column("accepted", is_number=True),
            Column("rejected", wraps=True, style="red"),
            Column("decided", is_number=True, spare=2),
            Column("took", is_number=True, spare=3),
            Column("model root", spare=1),
            is_live=True,
        )
        for view in rounds:
            accepted = sum(verdict == "accept" for verdict in view.verdicts.values())
            others: dict[str, list[str]] = {}
            for peer, verdict in view.verdicts.items():
                if verdict != "accept":
                    others.setdefault(verdict, []).append(self._names[peer])
            table.add_row(
                str(view.round),
                "–" if view.held_out_bits_per_byte is None else f"{view.held_out_bits_per_byte:.3f}",
                f"{accepted}{PLAIN_MEAN if view.plain_mean else ''}",
                "; ".join(f"{verdict}: {', '.join(names)}" for verdict, names in others.items()),
                milliseconds(view.decision_ms),
                seconds(view.seconds),
                short(view.model_root),
            )
        return table

    def _peers_table(self, job: JobView) -> Fitted:
        table = Fitted(
            Column("peer"),
            Column("accepted", is_number=True),
            Column("rejected", wraps=True, style="red"),
            Column("sent", is_number=True, spare=2),
            Column("memory", is_number=True, spare=1),
            is_live=True,
        )
        seen = self._demo.watched.stats
        expelled = seen.expelled if seen is not None else ()
        for peer in self._demo.peers:
            key = peer_id(peer.identity.public)
            reasons = [f"{reason} {count}" for reason, count in job.rejected.get(key, {}).items()]
            reasons += ["expelled"] * (key in expelled) + ["suspended"] * (key in job.suspended)
            stats = peer.stats
            total = 0 if stats is None else sum(count for kind, count in stats.bytes_sent.items() if kind not in PARTS)
            accepted = str(job.accepted.get(key, 0))
            table.add_row(peer.name, accepted, ", ".join(reasons), f"{total / 1e6:.1f} MB", f"{peer.memory_mb:.0f} MB")
        return table

    def summary(self, report: Report) -> None:
        width = self._console.width
        self._console.print(self._summary(report, width) if self._live else self._summary_table(report, width))
        self._print("report, curve, sample and export:", self._demo.folder)
        if self._last is not None:
            screen = self._picture(*self._last, SCREEN_WIDTH, SCREEN_HEIGHT)
            picture(self._demo.folder / "screen.svg", screen, self._summary(report, SCREEN_WIDTH))

    def _summary(self, report: Report, width: int) -> Panel:
        colour = "green" if report.passed else "red"
        return Panel(self._summary_table(report, width - FRAME_WIDTH), title="summary", border_style=colour, width=width)

    def _summary_table(self, report: Report, room: int) -> Group:
        table = Table(box=None, show_header=False, pad_edge=False)
        table.add_column(no_wrap=True)
        table.add_column()
        left = room - max(map(len, (report.accepted | report.state_roots))) - len("state root of   ")
        bits = report.heldout_bits_per_byte
        if len(bits) > 1:
            fall = f"{bits[0]:.3f} → {bits[-1]:.3f}"
            table.add_row("held-out bits/byte", f"{fall}   {curve(bits, min(CURVE_WIDTH, left - len(fall) - 3))}")
        if report.rlhf is not None:
            of = report.rlhf
            gap = f"{of.reference_value:.4f} → {of.value:.4f}"
            if of.gap_closed is not None:
                gap += f" of {of.optimum:.4f}, {of.gap_closed:.2%} of the way"
            table.add_row("value", f"{gap} (score {of.score:.4f}, {of.kl:.3f} nats from the reference)")
            if of.distinct_2 is not None:
                table.add_row("responses", f"{of.tokens:.1f} tokens, distinct-2 {of.distinct_2:.4f} in the last round")
            if of.pair_accuracy is not None:
                beside = f", by a linear model {of.linear_accuracy:.1%}" if of.linear_accuracy is not None else ""
                table.add_row("held-out preferences", f"foretold {of.pair_accuracy:.1%}{beside}")
        if report.baseline_bits_per_byte is not None and bits:
            ratio = bits[-1] / report.baseline_bits_per_byte
            table.add_row("one process alone", f"{report.baseline_bits_per_byte:.3f} bits/byte; ours is {ratio:.3f} × that")
        for name, count in report.accepted.items():
            table.add_row(name, f"{counted(count, 'proposal')} accepted")
        meanings = registry.meanings()
        for name, reasons in report.rejected.items():
            told = ", ".join(f"{reason} {count} × ({meanings.get(reason, reason)})" for reason, count in reasons.items())
            table.add_row(name, Text(f"rejected: {told}", "red"))
        for name, height in report.expelled.items():
            table.add_row(
                name, Text(f"expelled at height {height}: the chain holds two messages of it that exclude each other", "red")
            )
        for name, count in report.suspensions.items():
            table.add_row(name, Text(f"suspended {_times(count)}: {self._why_suspended}", "red"))
        for name, count in report.false_challenges.items():
            table.add_row(name, Text(f"challenged honest work {_times(count)}", "red"))
        heights = sorted(set(report.heights.values()))
        voters = report.voters - len(report.expelled)
        now = f", {quorum(voters)} of {voters} at the end" if report.expelled else ""
        table.add_row("blocks decided", ", ".join(map(str, heights)) + f" (quorum {report.quorum} of {report.voters}{now})")
        if report.decision_ms_p50 is not None and report.decision_ms_p99 is not None:
            table.add_row("decision", f"{report.decision_ms_p50:.0f} ms median, {report.decision_ms_p99:.0f} ms p99")
        if report.bytes_sent_per_peer_per_round is not None:
            table.add_row(
                "bytes sent", f"{report.bytes_sent_per_peer_per_round / 1e6:.2f} MB per peer and round, audit reveals included"
            )
        table.add_row("memory", ", ".join(f"{name} {size:.0f} MB" for name, size in report.pss_mb_per_peer.items()))
        for name, root in report.state_roots.items():
            table.add_row(f"state root of {name}", fitting(root, left) if root else "cannot be read")
        first = f"{report.seconds_to_first_decision:.1f} s" if report.seconds_to_first_decision is not None else "never"
        table.add_row("time", f"{report.seconds_total:.1f} s, first decision after {first}")
        lies = "every liar was found out" if report.audit == "sampled" else "no lie was accepted"
        lies = lies if report.malicious else "nobody lied"
        gain = "the loss fell" if report.rlhf is None else "the policy is better than its reference"
        verdict = Text(f"all honest roots are equal, {lies}, {gain}", "bold green")
        if not report.passed:
            verdict = Text("FAILED: " + "; ".join(report.failures), "bold red")
        return Group(table, Text(), verdict)


def picture(file: Path, *parts: RenderableType) -> None:
    """What the terminal showed, as an SVG that loads nothing from anywhere."""
    console = Console(record=True, width=SCREEN_WIDTH, file=io.StringIO(), highlight=False)
    for part in parts:
        console.print(part)
    without_fonts = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL).replace("Fira Code", "monospace")
    console.save_svg(str(file), title="peer demo", code_format=without_fonts)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def curve(values: list[float], width: int) -> str:
    """A line of bars, newest at the right."""
    if not values or width < 1:
        return ""
    step = max(1, -(-len(values) // width))
    picked = values[::-1][::step][::-1]
    low, high = min(picked), max(picked)
    return "".join(BARS[round((value - low) / (high - low or 1) * (len(BARS) - 1))] for value in picked)
