"""`python -m scenarios.slow`: a trainer that is slower than the others, within bounds, misses rounds and is accepted again."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from functools import partial

import trio

from demo.demo_peers import DemoPeer
from protocol.identity import peer_id
from scenarios import network
from scenarios.network import Network, children, holds
from scenarios.pace import STALL_SECONDS_MAX, goes_on, in_order
from scenarios.trials import COUNT, arguments, report

RUNS_SECONDS, STOPS_SECONDS = 0.10, 0.15  # of its worker
SLOW_ROUNDS = 4  # rounds in which the slow trainer must be accepted in most; T1 may be too short for it by chance
MISSED_ROUNDS = 3
BACK_ROUNDS_MAX = 12  # it is awaited in an even round, then in multiples of four and of eight


@dataclass
class Trial:
    number: int
    victim: str
    accepted: int = 0  # of the slow rounds before it missed some
    missed: int = 0  # rounds
    rounds: int = 0  # from then until it was accepted again
    problems: list[str] = field(default_factory=list)


async def run(options: argparse.Namespace) -> int:
    trials = []
    async with network.running(4, seed=options.seed, folder=options.keep) as peers:
        await peers.train({"seed": str(options.seed)})
        victims = [peer for peer in peers.honest if peer.trains and peer is not peers.demo.watched]
        for number in range(options.trials):
            trials.append(await hurt(peers, number, victims[number % len(victims)]))
            print(line(trials[-1]), file=sys.stderr, flush=True)
        differences = peers.differences()
    return conclude(options, trials, differences)


async def hurt(peers: Network, number: int, victim: DemoPeer) -> Trial:
    asked, trial = peers.demo.watched, Trial(number, victim.name)
    with trio.fail_after(STALL_SECONDS_MAX):
        await in_order(peers)
    workers = partial(children, victim.process.pid if victim.process else 0)
    async with slowed(workers):
        await goes_on(asked, SLOW_ROUNDS + 1)
        trial.accepted = sum([await is_accepted(peers, victim, back) for back in range(1, SLOW_ROUNDS + 1)])
    first = await last_round(peers)
    send(workers(), signal.SIGSTOP)

    async def has_missed() -> bool:
        return not await is_accepted(peers, victim)

    await holds(has_missed, STALL_SECONDS_MAX)
    await goes_on(asked, MISSED_ROUNDS - 1)
    missed = await last_round(peers)
    trial.missed = missed - first

    async def is_over() -> bool:
        return await is_accepted(peers, victim) or await last_round(peers) > missed + BACK_ROUNDS_MAX

    async with slowed(workers):
        await holds(is_over, STALL_SECONDS_MAX)
    trial.rounds = await last_round(peers) - missed
    if 2 * trial.accepted <= SLOW_ROUNDS:
        trial.problems.append(f"only {trial.accepted} of {SLOW_ROUNDS} updates of the slow trainer were accepted")
    if not await is_accepted(peers, victim):
        trial.problems.append(f"not accepted again {trial.rounds} rounds later")
    return trial


@asynccontextmanager
async def slowed(workers: Callable[[], Iterable[int]]) -> AsyncIterator[None]:
    """Stop these processes for most of the time."""

    async def hold_back() -> None:
        while True:
            send(workers(), signal.SIGSTOP)
            await trio.sleep(STOPS_SECONDS)
            send(workers(), signal.SIGCONT)
            await trio.sleep(RUNS_SECONDS)

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(hold_back)
            yield
            nursery.cancel_scope.cancel()
    finally:
        send(workers(), signal.SIGCONT)


def send(processes: Iterable[int], number: signal.Signals) -> None:
    for pid in processes:
        os.kill(pid, number)


async def last_round(peers: Network) -> int:
    return (await peers.demo.watched.client.rounds(1))[-1].round


async def is_accepted(peers: Network, victim: DemoPeer, back: int = 1) -> bool:
    """Return whether the victim was accepted in the last closed round, or in one before it."""
    views = await peers.demo.watched.client.rounds(back)
    return views[0].verdicts.get(peer_id(victim.identity.public)) == "accept"


def line(trial: Trial) -> str:
    what = f"trial {trial.number}: {trial.victim} missed {trial.missed} rounds, accepted again after {trial.rounds}"
    return f"{what}: {'; '.join(trial.problems) or 'all held'}"


def conclude(options: argparse.Namespace, trials: list[Trial], differences: list[str]) -> int:
    failures = [f"trial {trial.number}: {problem}" for trial in trials for problem in trial.problems]
    failures += [f"roots differ at {where}" for where in differences]
    rows = [[*map(str, (t.number, t.victim, t.accepted, t.missed, t.rounds)), "no" if t.problems else "yes"] for t in trials]
    title = f"a worker that runs {RUNS_SECONDS / (RUNS_SECONDS + STOPS_SECONDS):.0%} of the time; rounds"
    columns = ["trial", "victim", f"accepted of {SLOW_ROUNDS}", "missed", "until accepted again", "ok"]
    return report(options, title, columns, rows, failures, {"trials": [asdict(t) for t in trials]})


def main() -> int:
    parser = arguments("slow", __doc__)
    parser.add_argument("--trials", type=COUNT, default=4, metavar="N", help="number of trials, one after another")
    return network.main(partial(run, parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
