"""Speed of links, beside plain TCP and TLS: `python -m benchmarks.transport --json FILE`.

Every end is a process of its own (`benchmarks.ends`). Unshaped cases use loopback. Shaped ones use the kernel's TCP and TUN
devices (`scenarios.tun`), at 2 Mbit/s behind a queue of 50 ms. Where namespaces are not available, they are left out with a
message.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.ends import Plan
from benchmarks.provenance import write
from benchmarks.verdicts import conclude, verdict
from protocol.errors import UserError
from scenarios.emulation.link_profiles import CONGESTION_CONTROL, MEGABIT_BYTES, QUEUE_SECONDS, AccessProfile, ProfileSegment
from scenarios.trials import Parser
from scenarios.tun import refusal, running_router

WHO = ("tcp", "tls", "ours")
SENDERS = 3  # of small messages
VOTE_EVERY_SECONDS = 0.02
SHAPED_TIMES = 2  # duration relative to the others, because fewer bytes give fewer samples
IDLE, UNDER_BULK = "a vote, idle", "a vote under bulk"
SHAPED_IDLE, SHAPED_BULK = f"{IDLE}, shaped", f"{UNDER_BULK}, shaped"
MEGABIT = 2
NARROW = AccessProfile("narrow", (ProfileSegment(up=MEGABIT * MEGABIT_BYTES, down=MEGABIT * MEGABIT_BYTES),))
OBJECT_BYTES = 256 << 20

Place = Callable[..., tuple[list[str], dict[str, str]]]  # a module and its arguments: the command, and its environment

BULK_MB_LEAST, SMALL_LEAST = 150.0, 5_000.0
UNDER_BULK_MS, SHAPED_MS = 10.0, 150.0


@dataclass
class Row:
    case: str
    who: str
    mb_per_second: float | None = None
    messages_per_second: float | None = None
    p50_ms: float | None = None  # of votes, one way
    p99_ms: float | None = None
    votes: int = 0
    processor: float | None = None  # of the receiver, in cores
    measured_mbit: float | None = None  # our own measurement of the link
    retransmitted: float | None = None


@contextmanager
def _running(place: Place, plans: Sequence[Plan]) -> Iterator[list[subprocess.Popen[str]]]:
    started = []
    try:
        for plan in plans:
            command, environment = place("benchmarks.ends", json.dumps(asdict(plan)))
            started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def _said(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise UserError("an end of a connection has failed: its error is above")
    found: dict[str, Any] = json.loads(line)
    return found


def _here(module: str, *arguments: str) -> tuple[list[str], dict[str, str]]:
    return [sys.executable, "-m", module, *arguments], dict(os.environ)


def measured(case: str, plan: Plan, sends: Place = _here, receives: Place = _here) -> Row:
    """Measure one case: a receiver and its senders."""
    with _running(receives, [plan]) as (receiver,):
        plan = replace(plan, **_said(receiver))
        with _running(sends, [replace(plan, number=number) for number in range(plan.senders)]) as senders:
            said = [_said(sender) for sender in senders]
        if plan.blob:
            return Row(case, plan.who, mb_per_second=plan.blob / 1e6 / said[0]["seconds"])
        return _row(case, plan, _said(receiver), said[0])


def _row(case: str, plan: Plan, came: dict[str, Any], said: dict[str, Any]) -> Row:
    seconds, waits = came["seconds"], sorted(came["waits"])
    if came["wrong"] or seconds <= 0:
        raise UserError(f"{case}, {plan.who}: {came['wrong']} messages had a bad signature, and it took {seconds:.1f} s")
    rate = said.get("rate")
    return Row(
        case,
        plan.who,
        mb_per_second=came["bytes"] / 1e6 / seconds if plan.bulk else None,
        messages_per_second=came["messages"] / seconds if plan.small else None,
        p50_ms=1e3 * statistics.median(waits) if waits else None,
        p99_ms=1e3 * waits[min(len(waits) - 1, int(0.99 * len(waits)))] if waits else None,
        votes=len(waits),
        processor=came["processor"] / seconds,
        measured_mbit=8e-6 * rate if rate else None,
        retransmitted=said.get("retransmitted"),
    )


# Report -----------------------------------------------------------------------------------------------------------------


def unshaped(seconds: float) -> Iterator[Row]:
    for who in WHO:
        yield measured("bulk", Plan(who, seconds, bulk=True))
        yield measured("small", Plan(who, seconds, small=True, senders=SENDERS))
        yield measured(IDLE, Plan(who, seconds, vote_every=VOTE_EVERY_SECONDS))
        yield measured(UNDER_BULK, Plan(who, seconds, bulk=True, vote_every=VOTE_EVERY_SECONDS))
    yield measured("object", Plan("ours", seconds, blob=OBJECT_BYTES))


def shaped(seconds: float) -> Iterator[Row]:
    if why := refusal():
        print(f"the shaped cases are left out: {why}", flush=True)
        return
    with running_router(NARROW) as router:
        sends, receives = (partial(router.command, router.host(name)) for name in ("sender", "receiver"))
        for who in WHO:
            for case, bulk in ((SHAPED_IDLE, False), (SHAPED_BULK, True)):
                plan = Plan(who, seconds, bulk, VOTE_EVERY_SECONDS, host=router.host("receiver"))
                yield measured(case, plan, sends, receives)


def show(rows: Sequence[Row]) -> None:
    table = Table(title="links: ours, and what it is of plain TCP's")
    for heading in (
        "case",
        "who",
        "MB/s",
        "of TCP's",
        "messages/s",
        "of TCP's",
        "vote p50 ms",
        "p99",
        "cores",
        "Mbit/s it says",
        "sent again",
    ):
        table.add_column(heading, justify="left" if heading in ("case", "who") else "right")
    plain = {row.case: row for row in rows if row.who == "tcp"}
    for row in rows:
        base = plain.get(row.case)
        table.add_row(
            row.case,
            row.who,
            _text(row.mb_per_second, ".3g"),
            _ratio(row.mb_per_second, base and base.mb_per_second),
            _text(row.messages_per_second, ",.0f"),
            _ratio(row.messages_per_second, base and base.messages_per_second),
            *(_text(value, ".2f") for value in (row.p50_ms, row.p99_ms, row.processor)),
            _text(row.measured_mbit, ".3g"),
            _text(row.retransmitted, ".1%"),
        )
    Console(width=130).print(table)


def _text(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def _ratio(value: float | None, of: float | None) -> str:
    return f"{value / of:.0%}" if value and of else ""


def verdicts(rows: Sequence[Row]) -> Iterator[str]:
    ours = {row.case: row for row in rows if row.who == "ours"}
    bulk, small = ours["bulk"].mb_per_second or 0.0, ours["small"].messages_per_second or 0.0
    yield verdict(bulk >= BULK_MB_LEAST, f"between two processes: ≥ {BULK_MB_LEAST:g} MB/s: {bulk:.0f}")
    yield verdict(small >= SMALL_LEAST, f"signed small messages into one: ≥ {SMALL_LEAST:,.0f} a second: {small:,.0f}")
    yield _of_votes(ours, IDLE, UNDER_BULK, lambda idle: 2 * idle + UNDER_BULK_MS, f"≤ 2 × idle + {UNDER_BULK_MS:g} ms")
    if SHAPED_BULK in ours:
        yield _of_votes(ours, SHAPED_IDLE, SHAPED_BULK, lambda idle: idle + SHAPED_MS, f"≤ idle + {SHAPED_MS:g} ms")


def _of_votes(ours: dict[str, Row], idle: str, under: str, most: Callable[[float], float], bound: str) -> str:
    """Check the median and the slowest of a hundred votes."""
    held, figures = True, []
    for name in ("p50_ms", "p99_ms"):
        before, value = getattr(ours[idle], name), getattr(ours[under], name)
        held = held and value <= most(before)
        figures.append(f"{value:.1f} ({idle} {before:.1f})")
    return verdict(held, f"{under}: {bound}, p50 and p99: {', '.join(figures)}")


def main() -> int:
    parser = Parser("transport", __doc__.splitlines()[0], package="benchmarks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument(
        "--seconds", type=float, default=6.0, metavar="S", help="seconds of each case; the first one is not counted"
    )
    options = parser.parse_args()
    started, rows = time.time(), list[Row]()
    about = {"megabit": MEGABIT, "queue_ms": 1e3 * QUEUE_SECONDS, "congestion_control": CONGESTION_CONTROL}
    for row in chain(unshaped(options.seconds), shaped(SHAPED_TIMES * options.seconds)):
        rows.append(row)
        print(f"{row.case}, {row.who}", file=sys.stderr, flush=True)
        write(options.json, started, {"shaped": about, "rows": [asdict(row) for row in rows]})
    show(rows)
    return conclude(verdicts(rows))


if __name__ == "__main__":
    sys.exit(main())
