"""The demo's summary: what was learned, who was caught, what it cost, and in one line whether it passed."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from consensus.quorum import quorum
from demo.demo_report import DemoReport
from demo.rlhf_result import RlhfResult
from features.text_tables import pluralize
from peer.commands.table_renderer import bar_chart, truncate_text
from protocol.verdicts import ABSENT
from training.objectives import registry

CURVE_WIDTH = 60

Row = tuple[str, RenderableType]


def render_summary(report: DemoReport, why_suspended: str, room: int) -> Group:
    """In `room` columns. `why_suspended`: the reason that goes with the job's kind of audits."""
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
        yield "one process alone", f"{report.baseline_bits_per_byte:.3f} bits/byte; ours is {ratio:.3f} × that"


def _tuned(rlhf: RlhfResult) -> Iterator[Row]:
    gap = f"{rlhf.reference_value:.4f} → {rlhf.value:.4f}"
    if rlhf.gap_closed is not None:
        gap += f" of {rlhf.optimum:.4f}, {rlhf.gap_closed:.2%} of the way"
    yield "value", f"{gap} (score {rlhf.score:.4f}, {rlhf.kl:.3f} nats from the reference)"
    if rlhf.distinct_2 is not None:
        yield "responses", f"{rlhf.response_tokens:.1f} tokens, distinct-2 {rlhf.distinct_2:.4f} in the last round"
    if rlhf.pair_accuracy is not None:
        beside = f", by a linear model {rlhf.linear_accuracy:.1%}" if rlhf.linear_accuracy is not None else ""
        yield "held-out preferences", f"foretold {rlhf.pair_accuracy:.1%}{beside}"


def _judged(report: DemoReport, why_suspended: str) -> Iterator[Row]:
    for name, count in report.accepted.items():
        yield name, f"{pluralize(count, 'proposal')} accepted"
    meanings = registry.rejection_meanings()
    for name, reasons in report.rejected.items():
        told = ", ".join(f"{reason} {count} × ({meanings.get(reason, reason)})" for reason, count in reasons.items())
        yield name, Text(f"{'not accepted' if ABSENT in reasons else 'rejected'}: {told}", "red")
    for name, height in report.expelled.items():
        yield name, Text(f"expelled at height {height}: the chain holds two messages of it that exclude each other", "red")
    for name, count in report.suspensions.items():
        yield name, Text(f"suspended {_times(count)}: {why_suspended}", "red")
    for told in report.undone:
        yield "model", Text(told, "red")
    for name, count in report.false_challenges.items():
        yield name, Text(f"challenged honest work {_times(count)}", "red")


def _spent(report: DemoReport, left: int) -> Iterator[Row]:
    heights = ", ".join(map(str, sorted(set(report.heights.values()))))
    voters = report.voters - len(report.expelled)
    now = f", {quorum(voters)} of {voters} at the end" if report.expelled else ""
    yield "blocks decided", f"{heights} (quorum {report.quorum} of {report.voters}{now})"
    if report.decision_ms_p50 is not None and report.decision_ms_p99 is not None:
        yield "decision", f"{report.decision_ms_p50:.0f} ms median, {report.decision_ms_p99:.0f} ms p99"
    if report.bytes_sent_per_peer_per_round is not None:
        yield "bytes sent", f"{report.bytes_sent_per_peer_per_round / 1e6:.2f} MB per peer and round, audit reveals included"
    if report.replays_per_round:
        counts = report.replays_per_round.values()
        yield "re-executions", f"{mean(counts):.2f} a machine and round, the busiest {max(counts):.2f}"
    yield "memory", ", ".join(f"{name} {size:.0f} MB" for name, size in report.pss_mb_per_peer.items())
    for name, root in report.state_roots.items():
        yield f"state root of {name}", truncate_text(root, left) if root else "cannot be read"
    first = f"{report.seconds_to_first_decision:.1f} s" if report.seconds_to_first_decision is not None else "never"
    yield "time", f"{report.seconds_total:.1f} s, first decision after {first}"


def _verdict(report: DemoReport) -> Text:
    if not report.passed:
        return Text("FAILED: " + "; ".join(report.failures), "bold red")
    lies = "every liar was found out" if report.audit == "sampled" else "no lie was accepted"
    lies = lies if report.malicious else "nobody lied"
    gain = "the loss fell" if report.rlhf is None else "the policy is better than its reference"
    return Text(f"all honest roots are equal, {lies}, {gain}", "bold green")


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
