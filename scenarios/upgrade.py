"""`python -m scenarios.upgrade`: a running network upgrades a module, whose new version one peer's program lacks.

Four peers train. Three of them are restarted, one after another, with a program that knows the module's second version, and vote
for it. The fourth reports the missing version, signs nothing from that height on, and takes part again after its own update.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import trio

from demo.demo_peers import DemoPeer, PeerDisk
from ledger.network_governance import NetworkState
from protocol.api import StatusView
from scenarios import network, tally
from scenarios.network import SMALL_JOB, Network, voted
from scenarios.trials import COUNT, Trial, arguments, report, table_of

NOTICE = 60  # heights from the vote to the upgrade: some seconds of small rounds, enough for all votes
HEIGHTS_AFTER = 30  # heights that the others decide without the old peer
SECONDS_MAX = 120.0  # for each step


async def run(options: argparse.Namespace) -> int:
    trials = [await one(number, options) for number in range(1, options.trials + 1)]
    failures = [f"{trial.what}: {problem}" for trial in trials for problem in trial.problems]
    result = {"trials": [asdict(trial) for trial in trials]}
    return report(options, f"a module is upgraded, seed {options.seed}; seconds", *table_of(trials), failures, result)


async def one(number: int, options: argparse.Namespace) -> Trial:
    trial = Trial(f"upgrade {number}")
    tally.install(1)  # the version at the founding of the network
    old = (options.seed + number) % 4
    with tempfile.TemporaryDirectory(prefix="folkmoot-upgrade-") as scratch:
        async with network.running(4, seed=options.seed + number, dress=partial(program, version=1)) as peers:
            await peers.train({**SMALL_JOB, "audit": "off", "byzantine_max": "0", "seed": str(options.seed)})
            tally.install(2)  # the version with which this process reads disks
            try:
                await upgraded(peers, peers.peers[old], trial, Path(scratch) / "export")
            except trio.TooSlowError:
                trial.require(
                    False, f"the network made no progress: heights {[(await peers.height(peer)) for peer in peers.peers]}"
                )
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(peers.stop)
            for problem in peers.failures():
                trial.require(False, problem)
            versions = {peer.name: version_on_disk(peer) for peer in peers.peers}
            trial.require(set(versions.values()) == {2}, f"versions on the disks: {versions}")
        audited = await trio.to_thread.run_sync(audit, Path(scratch) / "export", 2)
        trial.require(audited.returncode == 0, f"the export does not audit: {audited.stderr.strip()}")
        refused = await trio.to_thread.run_sync(audit, Path(scratch) / "export", 1)
        says_so = refused.returncode == 2 and len(refused.stderr.splitlines()) == 1 and "upgrades to tally 2" in refused.stderr
        trial.require(says_so, f"the old program says of the export: {refused.stderr.strip()!r}")
    return trial


def program(peer: DemoPeer, version: int) -> None:
    peer.module = ("scenarios.tally", str(version))


async def upgraded(peers: Network, old: DemoPeer, trial: Trial, export: Path) -> None:
    others = [peer for peer in peers.peers if peer is not old]
    started = trio.current_time()
    for peer in others:
        await peers.end(peer)
        program(peer, version=2)
        await peers.restart(peer)
        await passes(peer, (await others[0].client.status()).height + 2)
    trial.figures["three replaced"] = trio.current_time() - started

    height = (await others[0].client.status()).height + NOTICE
    for peer in others:
        await peer.client.request_upgrade(tally.NAME, 2, height)
    # The last request was decided at its own peer, and the first peer may learn of it a moment later.
    await passes(others[0], (await others[-1].client.status()).height)
    row = next(view for view in await others[0].client.modules() if view.module == tally.NAME)
    trial.require((row.active_version, row.due_version, row.due_height) == (1, 2, height), f"`features` says {row}")
    started = trio.current_time()
    await passes(others[0], height + HEIGHTS_AFTER)
    trial.figures["decided until acted"] = trio.current_time() - started

    told = await halted(old)
    wanted = f"this network upgrades to tally 2 at height {height}; this program has 1: install a newer program"
    trial.require(wanted in told.halted, f"the old peer says {told.halted!r}")
    trial.require(told.height == height - 1, f"the old peer applied {told.height}, the last it can is {height - 1}")
    trial.require(voted(old) < height, f"the old peer signed at height {voted(old)}")

    started = trio.current_time()
    await peers.end(old)
    program(old, version=2)
    await peers.restart(old)
    await passes(old, (await others[0].client.status()).height + 2)
    await comes(partial(has_voted, old, height))
    trial.figures["back after its update"] = trio.current_time() - started
    await others[1].client.export_run(str(export))


async def comes(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait for a condition. Raises `trio.TooSlowError` after `SECONDS_MAX`."""
    if not await network.holds(condition, SECONDS_MAX):
        raise trio.TooSlowError


async def passes(peer: DemoPeer, height: int) -> None:
    async def is_there() -> bool:
        return (await peer.client.status()).height >= height

    await comes(is_there)


async def halted(peer: DemoPeer) -> StatusView:
    async def has_stopped() -> bool:
        return bool((await peer.client.status()).halted)

    await comes(has_stopped)
    return await peer.client.status()


async def has_voted(peer: DemoPeer, height: int) -> bool:
    return voted(peer) > height


def version_on_disk(peer: DemoPeer) -> int:
    disk = PeerDisk(peer.directory)
    try:
        return disk.state.module_state(NetworkState).module_version(tally.NAME)
    finally:
        disk.close()


def audit(folder: Path, version: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scenarios.tally", str(version), "audit", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_MAX)


def main() -> int:
    parser = arguments("upgrade", __doc__, peers=None)
    parser.add_argument("--trials", type=COUNT, default=3, metavar="N", help="number of networks, one after another")
    return network.main(partial(run, parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
