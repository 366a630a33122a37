"""How fast links are, beside plain TCP and TLS: `python -m benchmarks.transport --json FILE`.

Every end is a process of its own (`benchmarks.ends`). Unshaped cases go over loopback. Shaped ones go through the kernel's own
TCP between two private network namespaces, over a pair of virtual cards whose sending side has a rate and a queue (`tbf`); the
congestion control is pinned. Where namespaces or `tbf` are not to be had, that is said, and those cases are left out.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.ends import Plan
from benchmarks.provenance import write
from benchmarks.verdicts import conclude, verdict
from protocol.errors import UserError
from scenarios.trials import Parser

WHO = ("tcp", "tls", "ours")
SENDERS = 3  # of small messages
VOTE_EVERY_SECONDS = 0.02
SHAPED_TIMES = 2  # as long as the others: fewer bytes, and so fewer samples
IDLE, UNDER_BULK = "a vote, idle", "a vote under bulk"
SHAPED_IDLE, SHAPED_BULK = f"{IDLE}, shaped", f"{UNDER_BULK}, shaped"
MEGABIT, QUEUE_MS = 2, 50
QUEUE_BYTES = MEGABIT * 125 * QUEUE_MS
TOKENS = f"tbf rate {MEGABIT}mbit burst 3000 limit {QUEUE_BYTES}"  # two packets may leave at once
CONGESTION_CONTROL = "cubic"
CARD, OTHER_CARD, HERE, THERE = "fm0", "fm1", "10.83.0.1", "10.83.0.2"
OBJECT_BYTES = 256 << 20

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
    measured_mbit: float | None = None  # what ours says of its link
    retransmitted: float | None = None


@contextmanager
def _running(*commands: Sequence[str]) -> Iterator[list[subprocess.Popen[str]]]:
    started = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for command in commands]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def _said(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise UserError("an end of a connection has failed; what it said stands above")
    found: dict[str, Any] = json.loads(line)
    return found


def measured(case: str, plan: Plan, *, is_shaped: bool = False) -> Row:
    """One case: a receiver, and its senders."""
    command = [sys.executable, "-m", "benchmarks.ends"]
    waits = ["unshare", "--net", "sh", "-c", 'read -r line; exec "$@"', "sh"] if is_shaped else []
    with _running([*waits, *command, json.dumps(asdict(plan))]) as (receiver,):
        if is_shaped:
            _lay_cable(receiver)
        told = _said(receiver)
        plan = replace(plan, **told)
        with _running(*([*command, json.dumps(asdict(replace(plan, number=n)))] for n in range(plan.senders))) as senders:
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


# A narrow cable ---------------------------------------------------------------------------------------------------------


def _lay_cable(receiver: subprocess.Popen[str]) -> None:
    """Between this namespace, which is private, and the receiver's, which still waits for a line."""
    there = ["nsenter", "--net", "--target", str(receiver.pid)]
    for words in (
        f"ip link add {CARD} type veth peer name {OTHER_CARD}",
        f"ip link set {OTHER_CARD} netns {receiver.pid}",
        f"ip address add {HERE}/24 dev {CARD}",
        f"ip link set {CARD} up",
        f"tc qdisc add dev {CARD} root {TOKENS}",
    ):
        subprocess.run(words.split(), check=True)
    control = f"sysctl -qw net.ipv4.tcp_congestion_control={CONGESTION_CONTROL}"
    subprocess.run(control.split(), check=True)
    for words in (f"ip address add {THERE}/24 dev {OTHER_CARD}", f"ip link set {OTHER_CARD} up", "ip link set lo up", control):
        subprocess.run([*there, *words.split()], check=True)
    assert receiver.stdin is not None
    receiver.stdin.write("\n")
    receiver.stdin.flush()


def inside(seconds: float) -> None:
    """Runs in a namespace of its own: a row is a line."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    for who in WHO:
        plan = Plan(who, seconds, vote_every=VOTE_EVERY_SECONDS, host=THERE)
        for case, bulk in ((SHAPED_IDLE, False), (SHAPED_BULK, True)):
            print(json.dumps(asdict(measured(case, replace(plan, bulk=bulk), is_shaped=True))), flush=True)


def shaped(seconds: float) -> Iterator[Row]:
    command = ["unshare", "--user", "--map-root-user", "--net"]
    can = shutil.which("unshare") and shutil.which("tc") and shutil.which("nsenter")
    probe = f"ip link add {CARD} type veth peer name {OTHER_CARD} && tc qdisc add dev {CARD} root {TOKENS}"
    if not can or subprocess.run([*command, "sh", "-c", probe], capture_output=True).returncode:
        print("no private namespaces, no virtual cards or no tbf here: the shaped cases are left out", flush=True)
        return
    with _running([*command, sys.executable, "-m", "benchmarks.transport", "--inside", "--seconds", str(seconds)]) as (process,):
        for _ in range(2 * len(WHO)):
            yield Row(**_said(process))


# Report -----------------------------------------------------------------------------------------------------------------


def unshaped(seconds: float) -> Iterator[Row]:
    for who in WHO:
        yield measured("bulk", Plan(who, seconds, bulk=True))
        yield measured("small", Plan(who, seconds, small=True, senders=SENDERS))
        yield measured(IDLE, Plan(who, seconds, vote_every=VOTE_EVERY_SECONDS))
        yield measured(UNDER_BULK, Plan(who, seconds, bulk=True, vote_every=VOTE_EVERY_SECONDS))
    yield measured("object", Plan("ours", seconds, blob=OBJECT_BYTES))


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
    """Held where the median and the slowest of a hundred are."""
    held, figures = True, []
    for name in ("p50_ms", "p99_ms"):
        before, value = getattr(ours[idle], name), getattr(ours[under], name)
        held = held and value <= most(before)
        figures.append(f"{value:.1f} ({idle} {before:.1f})")
    return verdict(held, f"{under}: {bound}, p50 and p99: {', '.join(figures)}")


def main() -> int:
    parser = Parser("transport", __doc__.splitlines()[0], package="benchmarks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    parser.add_argument("--seconds", type=float, default=6.0, metavar="S", help="of each case; the first one is not counted")
    parser.add_argument("--inside", action="store_true", help="only the shaped cases, in the namespace that this runs in")
    options = parser.parse_args()
    if options.inside:
        inside(options.seconds)
        return 0
    started, rows = time.time(), list[Row]()
    about = {"shaped": {"megabit": MEGABIT, "queue_ms": QUEUE_MS, "congestion_control": CONGESTION_CONTROL}}
    for row in chain(unshaped(options.seconds), shaped(SHAPED_TIMES * options.seconds)):
        rows.append(row)
        print(f"{row.case}, {row.who}", file=sys.stderr, flush=True)
        write(options.json, started, {**about, "rows": [asdict(row) for row in rows]})
    show(rows)
    return conclude(verdicts(rows))


if __name__ == "__main__":
    sys.exit(main())
