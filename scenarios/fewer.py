"""`python -m scenarios.fewer`: four voters become three while a round is open, and then one of the three is killed.

Two of three voters are a quorum. They must also close the open round, although it was opened with four voters, of which three
ballots were needed. In one trial a voter leaves and is stopped. In the other one a voter is expelled and is stopped.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from functools import partial

import trio

from scenarios import network
from scenarios.network import SMALL_JOB, Network, Watch
from scenarios.trials import Trial, arguments, report, table_of

STEPS = 3000  # local steps per round, about five seconds when four trainers share two cores
LATER_ROUNDS = 2
CHANGE_SECONDS_MAX = 60.0  # until three voters are left: a leave takes two blocks, and evidence of equivocation a vote before
STALL_SECONDS_MAX = 120.0  # for the open round and two more: each waits for the killed trainer, then for an absent leader


async def run(options: argparse.Namespace) -> int:
    trials = [await one("leaves", options), await one("is expelled", options)]
    failures = [f"{trial.what}: {problem}" for trial in trials for problem in trial.problems]
    result = {"trials": [asdict(trial) for trial in trials]}
    return report(options, f"four voters become three, seed {options.seed}", *table_of(trials), failures, result)


async def one(goes: str, options: argparse.Namespace) -> Trial:
    trial = Trial(f"a voter {goes}")
    liars = 1 if goes == "is expelled" else 0
    async with network.running(4, liars, attack="equivocate", seed=options.seed) as peers:
        await peers.train(
            {**SMALL_JOB, "local_steps": str(STEPS), "audit": "off", "byzantine_max": "0", "seed": str(options.seed)}
        )
        watch = Watch(peers.honest[0])
        if not liars:
            await watch.until_round(0)
            await peers.honest[-1].client.resign_as_voter()
        left = await network.holds(partial(three_voters, peers), CHANGE_SECONDS_MAX)
        trial.require(left, f"four voters are not three after {CHANGE_SECONDS_MAX:.0f} s")
        (job,) = await watch.peer.client.jobs()
        started = trio.current_time()
        gone = peers.honest[-1] if not liars else next(peer for peer in peers.peers if peer not in peers.honest)
        peers.kill(gone)
        peers.kill(peers.honest[1])
        with trio.move_on_after(STALL_SECONDS_MAX) as patience:
            await watch.until_round(job.round + LATER_ROUNDS)
        trial.require(not patience.cancelled_caught, f"round {job.round} was open: no {LATER_ROUNDS} rounds after it")
        await watch.more(0.0)
        renewed = [event.text for event in watch.events if event.kind == "job" and "goes on with" in event.text]
        trial.require(bool(renewed), "no event reports that the remaining voters took over the round")
        trial.figures = {"open round": job.round, "rounds after it": LATER_ROUNDS, "seconds": trio.current_time() - started}
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(peers.stop)
        for where in peers.differences():
            trial.require(False, f"roots differ at {where}")
    return trial


async def three_voters(peers: Network) -> bool:
    return (await peers.honest[0].client.status()).voters == 3


def main() -> int:
    parser = arguments("fewer", __doc__, peers=None)
    return network.main(partial(run, parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
