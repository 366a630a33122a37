"""`python -m scenarios.many --peers 20`: many voters on one machine decide some heights; the costs of each voter.

One of them trains a small job, so that there is something to decide. All of them vote.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass
from functools import partial

import trio

from demo.demo_peers import DemoPeer
from peer.settings.process_resources import process_memory_mb
from protocol.api import BULK_TRAFFIC_KINDS
from scenarios import network
from scenarios.idle import processor_seconds
from scenarios.network import SMALL_JOB, Network, children
from scenarios.trials import COUNT, arguments, report

LINKED_SECONDS_MAX = 180.0  # twenty starts of Python and 190 handshakes, on two cores
HEIGHT_SECONDS_MAX = 30.0
LOOK_SECONDS = 1.0  # interval between samples of memory
JOB = {**SMALL_JOB, "byzantine_max": "0", "audit": "off"}


@dataclass
class Cost:
    peer: str
    links: int
    memory_mb: float = 0.0  # peak of PSS, daemon and worker
    processor_seconds: float = 0.0  # while the heights were decided
    sent_kb: float = 0.0  # in the same time


def dress(peer: DemoPeer) -> None:
    peer.trains = peer.number == 0
    peer.evaluates = False


async def run(options: argparse.Namespace) -> int:
    async with network.running(options.peers, seed=options.seed, folder=options.keep, dress=dress) as peers:
        failures = []
        if not await network.holds(partial(are_linked, peers), LINKED_SECONDS_MAX):
            failures.append(f"not all are linked after {LINKED_SECONDS_MAX:.0f} s")
        costs = {peer.name: Cost(peer.name, (await peer.client.status()).links) for peer in peers.peers}
        seconds = await decided(peers, costs, options.heights)
        if seconds is None:
            reached = [await peers.height(peer) for peer in peers.peers]
            failures.append(f"{options.heights} heights took more than {options.heights * HEIGHT_SECONDS_MAX:.0f} s: {reached}")
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(peers.stop)
        failures += peers.failures()
    rows = [
        [cost.peer, str(cost.links), *(f"{figure:.2f}" for figure in (cost.memory_mb, cost.processor_seconds, cost.sent_kb))]
        for cost in costs.values()
    ]
    title = f"{options.peers} voters decide {options.heights} heights in {seconds or 0:.1f} s"
    columns = ("peer", "links", "MB (PSS)", "processor s", "sent kB")
    return report(
        options, title, columns, rows, failures, {"seconds": seconds, "peers": [asdict(cost) for cost in costs.values()]}
    )


async def are_linked(peers: Network) -> bool:
    return all([(await peer.client.status()).links == len(peers.peers) - 1 for peer in peers.peers])


async def decided(peers: Network, costs: dict[str, Cost], heights: int) -> float | None:
    """Return the seconds until every peer has applied this number of further heights, or None after the timeout."""
    await peers.train(JOB)
    first = await peers.height(peers.demo.watched)
    processor = {peer.name: processor_seconds(peer) for peer in peers.peers}
    sent = {peer.name: await bytes_sent(peer) for peer in peers.peers}
    started = trio.current_time()
    with trio.move_on_after(heights * HEIGHT_SECONDS_MAX) as waited:
        while min([await peers.height(peer) for peer in peers.peers]) < first + heights:
            for peer in peers.peers:
                look(peer, costs[peer.name])
            await trio.sleep(LOOK_SECONDS)
    seconds = trio.current_time() - started
    for peer in peers.peers:
        costs[peer.name].processor_seconds = processor_seconds(peer) - processor[peer.name]
        costs[peer.name].sent_kb = (await bytes_sent(peer) - sent[peer.name]) / 1e3
    return None if waited.cancelled_caught else seconds


async def bytes_sent(peer: DemoPeer) -> int:
    return sum(count for kind, count in (await peer.client.stats()).bytes_sent.items() if kind not in BULK_TRAFFIC_KINDS)


def look(peer: DemoPeer, cost: Cost) -> None:
    assert peer.process is not None
    processes = (peer.process.pid, *children(peer.process.pid))
    cost.memory_mb = max(cost.memory_mb, sum(process_memory_mb(process) for process in processes))


def main() -> int:
    parser = arguments("many", __doc__, peers=20)
    parser.add_argument("--heights", type=COUNT, default=20, metavar="N", help="number of heights that all peers must decide")
    return network.main(partial(run, parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
