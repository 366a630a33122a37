"""`python -m scenarios.determinism`: peers that compute differently hold the same bits after every block.

Torch with 1 and 2 threads in one network, and on one peer numpy without its wide instructions. The roots are those that each
peer computed itself, read from its disk after it stopped.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

import trio

from peer import demo
from peer.demo import DemoPeer
from peer.demo_report import Disk
from scenarios import network
from scenarios.network import Network
from scenarios.trials import COUNT, arguments, report

ROUND_SECONDS_MAX = 60.0  # on a busy machine; a default round takes one or two
NUMPY_FEATURES = "import numpy; print(' '.join(sorted(numpy.show_config(mode='dicts')['SIMD Extensions'].get('found', []))))"


async def run(options: argparse.Namespace) -> int:
    async with network.running(options.peers, mixed=True, seed=options.seed, folder=options.keep) as peers:
        features = {peer.name: await numpy_features(peer) for peer in peers.peers}
        job = await peers.train({"seed": str(options.seed)}, rounds=options.rounds)

        async def over() -> bool:
            """Everybody has applied the empty block behind the last round, which certifies its root."""
            states = [await peer.client.status() for peer in peers.peers]
            views = [view for peer in peers.peers for view in await peer.client.jobs() if view.job == job]
            last = await peers.peers[0].client.rounds(1)
            closed = len({state.height for state in states}) == 1 and last != () and states[0].height > last[0].height
            return closed and all(view.state == "finished" for view in views)

        finished = await network.holds(over, ROUND_SECONDS_MAX * options.rounds)
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(peers.stop)
        return conclude(options, peers, features, finished)


async def numpy_features(peer: DemoPeer) -> str:
    """What numpy uses in a process with this peer's environment."""
    assert peer.process is not None
    words = Path(f"/proc/{peer.process.pid}/environ").read_bytes().split(b"\0")
    environment = dict(word.decode().split("=", 1) for word in words if b"=" in word)
    done = await trio.run_process([sys.executable, "-c", NUMPY_FEATURES], capture_stdout=True, env=environment)
    return done.stdout.decode().strip()


def conclude(options: argparse.Namespace, peers: Network, features: dict[str, str], finished: bool) -> int:
    differences = peers.differences()
    failures = [f"roots differ at {where}" for where in differences]
    failures += [] if finished else ["the job did not finish"]
    wide = {peer.name for peer in peers.peers if set(features[peer.name].split()) & set(demo.WIDE.split())}
    if wide != {peer.name for peer in peers.peers if not peer.restricted}:
        failures.append("numpy's instructions are not restricted on exactly one peer: nothing was shown")
    columns = ("peer", "torch threads", "numpy's instructions", "heights", "rounds", "state root")
    heights, rows = set(), []
    for peer in peers.peers:
        disk = Disk(peer.directory)
        roots, rounds = disk.roots(), disk.model_roots()
        heights.add((len(roots), len(rounds)))
        threads = str(peer.threads) if peer.trains else "none"
        rows.append([peer.name, threads, features[peer.name], str(len(roots)), str(len(rounds)), disk.state.root.hex()[:16]])
        disk.close()
    failures += [] if len(heights) == 1 else ["not all peers hold every block"]
    title = f"{options.peers} peers that compute differently, {options.rounds} rounds, seed {options.seed}"
    blocks, rounds_held = max(heights)
    return report(options, title, columns, rows, failures, {"features": features, "blocks": blocks, "rounds": rounds_held})


def main() -> int:
    parser = arguments("determinism", __doc__)
    parser.add_argument("--rounds", type=COUNT, default=12, metavar="N", help="of training, whose roots are compared")
    return network.main(partial(run, parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
