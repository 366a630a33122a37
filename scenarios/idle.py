"""`python -m scenarios.idle`: costs of a peer: processor time when idle, and memory while a model is trained."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import trio

from demo.demo_peers import DemoPeer
from features.command_arguments import parse_set_options
from peer.settings.process_resources import process_memory_mb
from protocol.errors import UserError
from scenarios import network
from scenarios.network import Network, children
from scenarios.trials import arguments, duration, report

CPU_PERCENT_MAX = 2.0  # of one core, when idle
VOTER_MB_MAX = 120.0  # for a model of up to a million parameters; the next two values bound larger ones
VOTER_PARAMETERS = 1_000_000
VOTER_MB_BESIDE_THE_MODEL = 110.0
VOTER_BYTES_PER_PARAMETER = 12
TRAINER_MB_MAX = 400.0  # daemon and worker, with `MILLION`; larger models have no bound
TRAINER_PARAMETERS_MAX = 1_100_000
MILLION = {"model.width": "128", "model.hidden": "384", "model.layers": "5", "local_steps": "4", "batch": "8", "micro_batch": "8"}
ROUND_SECONDS_MAX = 180.0
LOOK_SECONDS = 0.1  # interval between samples of memory; a peak lasts at least a local step


@dataclass
class Cost:
    peer: str
    idle_percent: float = 0.0  # before any job, daemon and worker
    idle_after_percent: float = 0.0  # after the job
    daemon_mb: float = 0.0  # peak while training
    worker_mb: float = 0.0
    together_mb: float = 0.0
    alone_mb: float = 0.0  # as if daemon and worker shared no memory with other peers, as on a machine of their own


def voter_mb_max(parameters: int) -> float:
    if parameters <= VOTER_PARAMETERS:
        return VOTER_MB_MAX
    return VOTER_MB_BESIDE_THE_MODEL + VOTER_BYTES_PER_PARAMETER * parameters / 1e6


def trainer_mb_max(parameters: int) -> float | None:
    """Return the bound for a trainer, or None if there is none."""
    return TRAINER_MB_MAX if parameters <= TRAINER_PARAMETERS_MAX else None


async def run(options: argparse.Namespace) -> int:
    async with network.running(options.peers, folder=options.keep) as peers:
        costs = {peer.name: Cost(peer.name) for peer in peers.peers}
        await trio.sleep(options.settle)
        for name, percent in (await idle_percent(peers, options.seconds)).items():
            costs[name].idle_percent = percent
        job = await peers.train(options.settings, rounds=2)
        with trio.fail_after(2 * ROUND_SECONDS_MAX):
            while not (all([await finished(peer, job) for peer in peers.peers]) and await measured(peers)):
                look(peers, costs)
                await trio.sleep(LOOK_SECONDS)
        parameters = Path(peers.demo.watched.directory, "models", job[:32]).glob("*/parameters*")
        size = max((file.stat().st_size for file in parameters), default=0) // 4
        await trio.sleep(options.settle)
        for name, percent in (await idle_percent(peers, options.seconds)).items():
            costs[name].idle_after_percent = percent
    return conclude(options, peers, costs, size)


async def finished(peer: DemoPeer, job: str) -> bool:
    return any(view.job == job and view.state == "finished" for view in await peer.client.jobs())


async def measured(peers: Network) -> bool:
    """Return whether the loss after the last round is known.

    For a large model this takes longer than the time that peers have to settle.
    """
    rounds = await peers.demo.watched.client.rounds(1)
    return bool(rounds) and rounds[0].held_out_bits_per_byte is not None


def look(peers: Network, costs: dict[str, Cost]) -> None:
    for peer in peers.peers:
        assert peer.process is not None
        cost = costs[peer.name]
        daemon = process_memory_mb(peer.process.pid)
        worker = sum(process_memory_mb(process) for process in children(peer.process.pid))
        cost.daemon_mb, cost.worker_mb = max(cost.daemon_mb, daemon), max(cost.worker_mb, worker)
        cost.together_mb = max(cost.together_mb, daemon + worker)
        processes = (peer.process.pid, *children(peer.process.pid))
        cost.alone_mb = max(cost.alone_mb, sum(process_memory_mb(process, "Rss") for process in processes))


async def idle_percent(peers: Network, seconds: float) -> dict[str, float]:
    """Return the percentage of one core that each peer uses, daemon and worker, when idle."""
    before = {peer.name: processor_seconds(peer) for peer in peers.peers}
    started = trio.current_time()
    await trio.sleep(seconds)
    elapsed = trio.current_time() - started
    return {peer.name: 100 * (processor_seconds(peer) - before[peer.name]) / elapsed for peer in peers.peers}


def processor_seconds(peer: DemoPeer) -> float:
    assert peer.process is not None
    processes = {peer.process.pid, *children(peer.process.pid)}
    return sum(_ticks(process) for process in processes) / os.sysconf("SC_CLK_TCK")


def _ticks(process: int) -> int:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])  # utime and stime, see proc(5)


def conclude(options: argparse.Namespace, peers: Network, costs: dict[str, Cost], parameters: int) -> int:
    failures = []
    for peer in peers.peers:
        cost = costs[peer.name]
        idle = max(cost.idle_percent, cost.idle_after_percent)
        limit = trainer_mb_max(parameters) if peer.trains else voter_mb_max(parameters)
        if idle >= CPU_PERCENT_MAX:
            failures.append(f"{peer.name} uses {idle:.2f} % of a core while idle, at most {CPU_PERCENT_MAX:g} % are allowed")
        seen = cost.together_mb if peer.trains else cost.alone_mb
        if limit is not None and seen > limit:
            failures.append(f"{peer.name} uses {seen:.0f} MB, at most {limit:.0f} MB are allowed")
    columns = ("peer", "idle %", "idle % after", "daemon MB", "worker MB", "together MB (PSS)", "alone MB (RSS)")
    rows = []
    for cost in costs.values():
        figures = (cost.idle_percent, cost.idle_after_percent, cost.daemon_mb, cost.worker_mb, cost.together_mb, cost.alone_mb)
        rows.append([cost.peer, *(f"{value:.2f}" for value in figures[:2]), *(f"{value:.0f}" for value in figures[2:])])
    title = f"{options.peers} peers, {parameters} parameters, micro-batch {options.settings['micro_batch']}"
    result = {
        "parameters": parameters,
        "voter_mb_max": voter_mb_max(parameters),
        "peers": [asdict(cost) for cost in costs.values()],
    }
    return report(options, title, columns, rows, failures, result)


def main() -> int:
    parser = arguments("idle", __doc__)
    parser.add_argument(
        "--seconds", type=duration, default=30.0, metavar="S", help="duration of each of the two measurements of idle peers"
    )
    parser.add_argument(
        "--settle", type=duration, default=10.0, metavar="S", help="wait before a measurement, for imports and last messages"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="another field of the job, such as model.layers=20"
    )
    options = parser.parse_args()
    try:
        options.settings = MILLION | parse_set_options(options.set)
    except UserError as error:
        parser.error(str(error))
    return network.main(partial(run, options))


if __name__ == "__main__":
    sys.exit(main())
