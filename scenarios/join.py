"""`python -m scenarios.join`: newcomers join by invitation, one after another, while the network trains."""

from __future__ import annotations

import argparse
import itertools
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median

import trio
from rich.console import Console
from rich.table import Table

from demo import network_demo
from demo.demo_peers import DemoPeer
from ledger.snapshots.snapshot_server import SNAPSHOT_LAG_HEIGHTS
from protocol.api import INVITATION_DAYS
from protocol.errors import UserError
from protocol.identity import Identity
from scenarios import network
from scenarios.network import SMALL_JOB, Network, children, journal
from scenarios.trials import COUNT, Parser, write

# About this number of parameters with the least arithmetic: many short rounds, so that joins overlap them.
MILLION = {
    "model.width": "128",
    "model.hidden": "384",
    "model.layers": "5",
    "model.context": "32",
    "local_steps": "1",
    "batch": "1",
    "micro_batch": "1",
}
START_SECONDS_MAX = 600.0  # until the chain is long enough for a newcomer to request a snapshot
JOIN_SECONDS_MAX = 120.0
CERTIFIED_SECONDS_MAX = 5.0  # the promise for a million parameters, from a running peer
POLL_SECONDS = 0.05
EVENT_SECONDS_MAX = 1.0  # a peer reports its state shortly after it has it
LINES_MAX = 60  # of the log of a slow join


@dataclass
class Join:
    number: int
    succeeded: bool = False
    started_seconds: float = 0.0  # from the command to the peer's first answer: Python, numpy and the disk
    snapshot_seconds: float | None = None  # from the request for a snapshot until the certified state is installed
    certified_seconds: float = 0.0  # from its first answer until it holds a recent state with the certified root
    current_seconds: float = 0.0  # from its first answer until it has applied all blocks that were decided at its start
    height_at_start: int = 0
    snapshot_height: int = 0
    rounds_meanwhile: int = 0
    failed_heights: int = 0  # heights that needed a second view while it joined


async def run(options: argparse.Namespace) -> int:
    settings = MILLION if options.parameters >= 1_000_000 else SMALL_JOB
    async with network.running(options.peers, folder=options.keep) as peers:
        job = await peers.train(settings)
        watched = peers.demo.watched
        await network.holds(partial(is_long, peers), START_SECONDS_MAX)
        size = parameters(watched, job)
        joins: list[Join] = []
        for number in range(options.joins):
            joins.append(await join(peers, number, options.keep is not None))
            print(describe(joins[-1]), flush=True)
    return report(options, joins, size)


async def is_long(peers: Network) -> bool:
    return await peers.height(peers.demo.watched) > SNAPSHOT_LAG_HEIGHTS + 1


async def join(peers: Network, number: int, keeps: bool, dress: Callable[[DemoPeer], None] = lambda peer: None) -> Join:
    """Start a newcomer, wait until it has caught up, and remove it. `dress` can change its start options."""
    watched, result = peers.demo.watched, Join(number)
    result.height_at_start = await peers.height(watched)
    invitation = await watched.client.create_invitation(INVITATION_DAYS)
    folder = peers.demo.folder / "newcomers" / str(number)
    folder.mkdir(parents=True)
    place = len(peers.peers) + number
    newcomer = DemoPeer(place, Identity.generate(), folder, trains=False, lies=False, threads=1, without_avx=False)
    dress(newcomer)
    command = time.time()
    rounds = len(await watched.client.rounds(10_000))
    try:
        network_demo.launch_peer(peers.demo, newcomer, ",".join(peer.address for peer in peers.peers), ("join", invitation))
        await network_demo.wait_until_ready(newcomer)
        result.started_seconds = time.time() - command
        with trio.move_on_after(JOIN_SECONDS_MAX):
            await follow(peers, newcomer, result)
            result.succeeded = True
    except UserError as error:
        print(f"newcomer {number}: {error}", file=sys.stderr)
    finally:
        await end(peers, newcomer)
    result.rounds_meanwhile = len(await watched.client.rounds(10_000)) - rounds
    views = peers.views(watched)
    result.failed_heights = sum(height > result.height_at_start for height in views)
    if is_slow(result):
        print("".join(telling(folder / "peer.log")), end="", file=sys.stderr)
    if not keeps:
        shutil.rmtree(folder, ignore_errors=True)
    return result


async def follow(peers: Network, newcomer: DemoPeer, result: Join) -> None:
    """Wait until the newcomer has a certified state, and then until it holds the network's height at its start."""
    started = time.time()
    while True:
        status = await newcomer.client.status()
        recent = status.height >= result.height_at_start - SNAPSHOT_LAG_HEIGHTS
        if recent and not result.certified_seconds and is_certified(peers, status.height, status.state_root):
            result.certified_seconds = time.time() - started
        if result.certified_seconds and status.height >= result.height_at_start:
            break
        await trio.sleep(POLL_SECONDS)
    result.current_seconds = time.time() - started
    await network.holds(partial(note_snapshot, newcomer, result), EVENT_SECONDS_MAX)


async def note_snapshot(newcomer: DemoPeer, result: Join) -> bool:
    """Return whether the newcomer has reported a restored snapshot."""
    restored = await network.restored(newcomer)
    if restored is not None:
        result.snapshot_seconds = float(restored.fields["seconds"])
        result.snapshot_height = int(restored.fields["height"])
    return restored is not None


def is_certified(peers: Network, height: int, root: str) -> bool:
    """Return whether this is the root after this height on the disk of a peer that was always present."""
    with journal(peers.demo.watched) as database:
        found = database.execute("SELECT state_root FROM roots WHERE height = ?", (height,)).fetchone()
    return found is not None and bytes(found[0]).hex() == root


def is_slow(join: Join) -> bool:
    return not join.succeeded or join.certified_seconds > CERTIFIED_SECONDS_MAX


def telling(log: Path) -> Iterator[str]:
    """Return the first lines of a newcomer's log, without those of blocks and rounds."""
    with log.open() as lines:
        told = (line for line in lines if " INFO height " not in line and " INFO round " not in line)
        yield from itertools.islice(told, LINES_MAX)


async def end(peers: Network, newcomer: DemoPeer) -> None:
    if newcomer.process is not None and newcomer.process.poll() is None:
        peers.workers |= children(newcomer.process.pid)
        await peers.end(newcomer)


def parameters(peer: DemoPeer, job: str) -> int:
    files = Path(peer.directory, "models", job[:32]).glob("*/parameters*")
    return max((file.stat().st_size for file in files), default=0) // 4


def describe(join: Join) -> str:
    parts = [f"join {join.number}{'' if join.succeeded else ' FAILED'}: answers after {join.started_seconds:.1f} s"]
    if join.snapshot_seconds is not None:
        parts.append(f"snapshot of {join.snapshot_height} in {join.snapshot_seconds:.1f} s")
    parts += [f"certified after {join.certified_seconds:.1f} s", f"current after {join.current_seconds:.1f} s"]
    parts.append(f"{join.rounds_meanwhile} rounds and {join.failed_heights} failed heights meanwhile")
    return ", ".join(parts)


def report(options: argparse.Namespace, joins: list[Join], size: int) -> int:
    good = [join for join in joins if join.succeeded]
    failures = [f"join {join.number} did not succeed" for join in joins if not join.succeeded]
    failures += [f"{join.failed_heights} heights failed during join {join.number}" for join in joins if join.failed_heights]
    slow = [join for join in good if is_slow(join)]
    failures += [f"join {join.number} had its certified state after {join.certified_seconds:.1f} s" for join in slow]
    table = Table(title=f"{len(good)} of {len(joins)} joins, {options.peers} peers that train {size} parameters")
    for column in ("seconds until", "median", "most"):
        table.add_column(column, justify="right")
    for name, values in (
        ("it answers", [join.started_seconds for join in good]),
        ("snapshot asked for → installed", [join.snapshot_seconds for join in good if join.snapshot_seconds is not None]),
        ("certified state, from the first answer", [join.certified_seconds for join in good]),
        ("where the network was, from the first answer", [join.current_seconds for join in good]),
    ):
        if values:
            table.add_row(name, f"{median(values):.2f}", f"{max(values):.2f}")
    console = Console()
    console.print(table)
    for failure in failures:
        console.print(failure, style="red")
    write(options, {"peers": options.peers, "parameters": size, "joins": [asdict(join) for join in joins], "failures": failures})
    return 1 if failures else 0


def main() -> int:
    parser = Parser("join", __doc__)
    parser.add_argument("--peers", type=COUNT, default=4, metavar="N", help="founders of the network")
    parser.add_argument("--joins", type=COUNT, default=100, metavar="N", help="number of newcomers, one after another")
    parser.add_argument(
        "--parameters",
        type=COUNT,
        default=1_000_000,
        metavar="N",
        help="parameters of the model; below a million: the tiny model",
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="new folder for the peers' data, which is kept")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    return network.main(partial(run, parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
