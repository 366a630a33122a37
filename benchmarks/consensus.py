"""Speed of decisions: `python -m benchmarks.consensus --json FILE`.

Small networks are real: processes on loopback, light voters, scratch rounds without torch. Large ones are real nodes in virtual
time (`benchmarks.virtual`), with this machine's costs of a signature, a frame and a durable write, a delay, and an uplink per
peer. Both close rounds, so every block has n ballots.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import trio
from rich.console import Console
from rich.table import Table

from benchmarks.provenance import write
from benchmarks.verdicts import conclude, verdict
from benchmarks.virtual import Costs, Height, Network, limit
from consensus.voter_set import faults_tolerated
from demo.demo_peers import Demo, DemoPeer
from demo.network_demo import assign_roles
from demo.shutdown_signals import map_signals_to_interrupt
from protocol.api import BULK_TRAFFIC_KINDS
from scenarios import network as scenario
from scenarios.trials import COUNT, Parser

REAL = (4, 7, 10, 16)
VIRTUAL = (*REAL, 31, 64, 100)
ROUND_TRIPS_MS = (1, 50, 100, 200, 300)
SILENT_ROUND_TRIPS_MS = (100, 150)
UPLINK_BITS = 100e6
HEIGHTS_WARM = 2  # not counted; n with silent voters, so that each has had its turn and is skipped afterwards
ROUND_SECONDS_MAX = 120.0
HEADINGS = (
    *("", "n", "silent", "RTT ms", "p50 ms", "p99 ms", "limit ms"),
    *("CPU ms", "kB sent", "verified", "block kB", "sent as kB", "first turn ms"),
)
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Row:
    kind: str
    n: int
    silent: int
    round_trip_ms: float  # 0: loopback
    decisions: int
    p50_ms: float  # virtual: from the verdicts to the decision, at every peer; real: from the preparation of the block
    p99_ms: float
    processor_ms: float  # per peer and decision
    kilobytes: float  # sent by one peer per decision
    limit_ms: float | None = None
    from_proposal_ms: float | None = None  # median
    round_ms: float | None = None  # median of a whole scratch round at its author: two decisions, proposal and audit
    views_max: int | None = None  # most views of a decision
    verified: float | None = None  # signatures per peer and decision
    block_kilobytes: float | None = None
    proposal_kilobytes: float | None = None  # the same block in its leader's message
    processor_parts_ms: dict[str, float] | None = None
    first_turn_ms: float | None = None  # lost at a silent voter's first turn; later turns cost nothing


@dataclass(frozen=True)
class Aim:
    text: str
    concerns: Callable[[Row], bool]
    figure: Callable[[Row], float]
    most: float

    def verdict(self, rows: list[Row]) -> str:
        figures = [self.figure(row) for row in rows if self.concerns(row)]
        if not figures:
            return f"not measured  {self.text}"
        return verdict(max(figures) <= self.most, f"{self.text}: {max(figures):.1f}")


AIMS = (
    Aim("n=4 on loopback: p50 ≤ 30 ms", lambda row: row.kind == "real" and row.n == 4, lambda row: row.p50_ms, 30),
    Aim(
        "n=100 at 100 ms RTT and 100 Mbit/s: p50 ≤ 700 ms",
        lambda row: (row.n, row.round_trip_ms, row.silent) == (100, 100, 0),
        lambda row: row.p50_ms,
        700,
    ),
    Aim(
        "RTT ≤ 150 ms, also with f silent: p50 ≤ 1000 ms",
        lambda row: row.kind == "virtual" and row.round_trip_ms <= 150,
        lambda row: row.p50_ms,
        1_000,
    ),
    Aim("n=100: processor time of a peer ≤ 60 ms a decision", lambda row: row.n == 100, lambda row: row.processor_ms, 60),
)


def _percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


# Real processes -------------------------------------------------------------------------------------------------------


class Voters(Demo):
    """A network of light voters only. The first one executes the commands."""

    @property
    def watched(self) -> DemoPeer:
        return self.peers[0]


async def real(n: int, rounds: int) -> Row:
    place = Path(tempfile.mkdtemp(prefix="folkmoot-bench-"))
    options = argparse.Namespace(peers=n, malicious=0, seed=0, attack="", mixed=False)
    peers = assign_roles(options, place)
    for peer in peers:
        peer.trains = False
    network = scenario.Network(Voters(options, place, peers))
    try:
        await network.start()
        return await _measure(network, rounds)
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(network.stop)
        shutil.rmtree(place, ignore_errors=True)


async def _measure(network: scenario.Network, rounds: int) -> Row:
    first = network.peers[0]
    with trio.fail_after(ROUND_SECONDS_MAX):
        while (await first.client.status()).links < len(network.peers) - 1:  # noqa: ASYNC110 - it is another process
            await trio.sleep(0.1)
    await scratch_round(first)
    before = await _figures(network)
    seconds = [await scratch_round(first) for _ in range(rounds)]
    after = await _figures(network)
    decisions = after["decisions"] - before["decisions"]
    peers = len(network.peers)
    stats = [await peer.client.stats() for peer in network.peers]
    return Row(
        kind="real",
        n=peers,
        silent=0,
        round_trip_ms=0,
        decisions=decisions,
        p50_ms=statistics.median(view.decision_ms_p50 or 0.0 for view in stats),
        p99_ms=max(view.decision_ms_p99 or 0.0 for view in stats),
        processor_ms=1e3 * (after["processor"] - before["processor"]) / peers / decisions,
        kilobytes=(after["bytes"] - before["bytes"]) / 1e3 / peers / decisions,
        round_ms=1e3 * statistics.median(seconds),
    )


async def scratch_round(peer: DemoPeer) -> float:
    """Return the seconds from the command to the applied round: the job's block, proposal, ballots, the closing block."""
    started = trio.current_time()
    log = await peer.client.events(-1, 0.0)
    last = log[-1].number if log else 0
    job = await peer.client.run_test_round()
    with trio.fail_after(ROUND_SECONDS_MAX):
        while True:
            events = await peer.client.events(last, 5.0)
            if any(event.kind == "round" and event.fields.get("job") == job for event in events):
                return trio.current_time() - started
            last = events[-1].number if events else last


async def _figures(network: scenario.Network) -> dict[str, Any]:
    stats = [await peer.client.stats() for peer in network.peers]
    sent = sum(count for view in stats for kind, count in view.bytes_sent.items() if kind not in BULK_TRAFFIC_KINDS)
    return {"decisions": stats[0].decisions, "bytes": sent, "processor": sum(map(_processor_seconds, network.peers))}


def _processor_seconds(peer: DemoPeer) -> float:
    assert peer.process is not None
    fields = Path(f"/proc/{peer.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


# Virtual time ---------------------------------------------------------------------------------------------------------


def virtual(n: int, round_trip_ms: float, silent: int, heights: int, costs: Costs) -> Row:
    network = Network(n, round_trip_ms / 1e3, UPLINK_BITS, costs, silent)
    network.begin()
    warm = n if silent else HEIGHTS_WARM
    rounds = [network.round(number) for number in range(warm + heights)]
    row = _row(network, rounds[warm:])
    slow = [statistics.median(height.from_verdicts) for height in rounds[:warm] if height.views > 1]
    row.first_turn_ms = 1e3 * statistics.mean(slow) - row.p50_ms if slow else None
    return row


def _row(network: Network, heights: list[Height]) -> Row:
    seconds = [value for height in heights for value in height.from_verdicts]
    peers = len(network.peers) * len(heights)
    parts = {
        name: round(1e3 * sum(getattr(height.spent, name) for height in heights) / peers, 3)
        for name in ("turns", "applying", "signatures", "frames", "writes")
    }
    return Row(
        kind="virtual",
        n=network.n,
        silent=network.silent,
        round_trip_ms=1e3 * network.round_trip,
        decisions=len(heights),
        p50_ms=1e3 * statistics.median(seconds),
        p99_ms=1e3 * _percentile(seconds, 0.99),
        processor_ms=sum(parts.values()),
        kilobytes=sum(sum(height.bytes_sent) for height in heights) / 1e3 / peers,
        limit_ms=1e3 * statistics.mean(limit(network, height) for height in heights),
        from_proposal_ms=1e3 * statistics.median(value for height in heights for value in height.from_proposal),
        views_max=max(height.views for height in heights),
        verified=sum(height.spent.verified for height in heights) / peers,
        block_kilobytes=statistics.mean(height.block_bytes for height in heights) / 1e3,
        proposal_kilobytes=statistics.mean(height.proposal_bytes for height in heights) / 1e3,
        processor_parts_ms=parts,
    )


# Report ---------------------------------------------------------------------------------------------------------------


def show(rows: list[Row], costs: Costs) -> None:
    console = Console(width=130)
    micro = {name: f"{1e6 * value:.3g} µs" for name, value in asdict(costs).items()}
    console.print(f"measured here: {', '.join(f'{name} {value}' for name, value in micro.items())}")
    table = Table(title="decisions")
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    for row in rows:
        figures: tuple[float | None, ...] = (
            row.round_trip_ms,
            row.p50_ms,
            row.p99_ms,
            row.limit_ms,
            row.processor_ms,
            row.kilobytes,
            row.verified,
        )
        figures += (row.block_kilobytes, row.proposal_kilobytes, row.first_turn_ms)
        table.add_row(row.kind, str(row.n), str(row.silent), *("" if value is None else f"{value:.1f}" for value in figures))
    console.print(table)


def main() -> int:
    parser = Parser("consensus", __doc__.splitlines()[0], package="benchmarks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--real", type=int, nargs="*", default=REAL, metavar="N", help="sizes of networks of real processes")
    parser.add_argument("--virtual", type=int, nargs="*", default=VIRTUAL, metavar="N", help="sizes of networks in virtual time")
    parser.add_argument(
        "--round-trips", type=float, nargs="*", default=ROUND_TRIPS_MS, metavar="MS", help="round trips in virtual time in ms"
    )
    parser.add_argument(
        "--heights", type=COUNT, default=5, metavar="N", help="measured decisions of each network in virtual time"
    )
    parser.add_argument(
        "--rounds", type=COUNT, default=30, metavar="N", help="rounds of each real network, with two or three decisions each"
    )
    options = parser.parse_args()
    if not options.real and not (options.virtual and options.round_trips):
        parser.error("nothing to measure: give values to --real, or to --virtual and --round-trips")
    map_signals_to_interrupt()
    started, costs, rows = time.time(), Costs.measured(), list[Row]()

    def measured(row: Row) -> None:
        rows.append(row)
        case = f"{row.kind} n={row.n} RTT {row.round_trip_ms:g} ms, {row.silent} silent"
        print(f"{case}: p50 {row.p50_ms:.1f} ms", file=sys.stderr, flush=True)
        about = {"uplink_bits": UPLINK_BITS, "costs_seconds": asdict(costs)}
        write(options.json, started, {**about, "rows": [asdict(row) for row in rows]})

    for n in options.real:
        measured(trio.run(partial(real, n, options.rounds)))
    for n in options.virtual:
        cases = [(ms, 0) for ms in options.round_trips] + [(ms, faults_tolerated(n)) for ms in SILENT_ROUND_TRIPS_MS]
        for round_trip_ms, silent in cases:
            measured(virtual(n, round_trip_ms, silent, options.heights, costs))
    show(rows, costs)
    return conclude(aim.verdict(rows) for aim in AIMS)


if __name__ == "__main__":
    sys.exit(main())
