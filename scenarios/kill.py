"""`python -m scenarios.kill`: kill -9 of one peer at a random moment of a round, repeatedly, while the network trains.

The others continue within one timeout, and rounds take normal time again from the fourth one. The killed peer comes back: it
catches up, its proposals are accepted again, its disk holds the same roots, and it has signed nothing twice.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass, field
from functools import partial
from random import Random
from statistics import median
from time import time

import trio

from demo.demo_peers import DemoPeer
from features.command_arguments import parse_integer_in
from ledger.jobs import MISSED_VOUCHES_MAX
from protocol.identity import peer_id
from scenarios import network
from scenarios.network import SMALL_JOB, Network, Watch
from scenarios.pace import (
    BACK_SECONDS_MAX,
    SLOWER_MAX,
    STALL_SECONDS_MAX,
    in_order,
    proposals_timer,
    takes_part,
    usual,
    view_timer,
    vouch_timer,
)
from scenarios.trials import COUNT, arguments, report

DOWN_ROUNDS = 9  # closed while the victim is down, including the round of the kill
LATER = MISSED_VOUCHES_MAX + 1  # this number of rounds later the victim is called last, so no voter waits for its vouches


@dataclass
class Trial:
    number: int
    victim: str
    led: bool  # whether it led the view when it was killed
    proposed: bool  # whether the others had its proposal of that round
    round: int  # round of the kill
    normal_seconds: float
    proposals_timer_seconds: float  # T1 of that round
    view_timer_seconds: float
    killed_round_seconds: float  # the whole round of the kill
    next_round_seconds: float
    decided_after_seconds: float  # from the kill to the next closed round
    later_seconds: float = 0.0  # median round from the fourth one
    workers_ended: bool = False
    answers_seconds: float = 0.0  # from the restart
    caught_up_seconds: float = 0.0
    back_seconds: float = 0.0
    votes: int = 0
    problems: list[str] = field(default_factory=list)

    def judge(self) -> None:
        waited = max(self.proposals_timer_seconds, vouch_timer(self.normal_seconds))
        timeout = waited + (self.view_timer_seconds if self.led else 0.0)
        for which, seconds in (("round of the kill", self.killed_round_seconds), ("next round", self.next_round_seconds)):
            if seconds > timeout + SLOWER_MAX * self.normal_seconds:
                self.problems.append(f"{which} took {seconds:.2f} s, more than its timeout of {timeout:.2f} s and a normal round")
        if self.later_seconds > SLOWER_MAX * self.normal_seconds:
            self.problems.append(f"later rounds take {self.later_seconds:.2f} s instead of {self.normal_seconds:.2f} s")
        if not self.workers_ended:
            self.problems.append("its worker still runs")


async def run(options: argparse.Namespace) -> int:
    random, trials = Random(options.seed), []
    job = {**(SMALL_JOB if options.small else {}), "seed": str(options.seed)}
    async with network.running(options.peers, options.malicious, seed=options.seed, folder=options.keep) as peers:
        await peers.train(job)
        for number in range(options.trials):
            trial = await hurt(peers, number, random)
            trials.append(trial)
            print(line(trial), file=sys.stderr, flush=True)
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(peers.stop)
        differences, evidence = peers.differences(), peers.evidence()
        twice = [f"{peer.name} {slot}" for peer in peers.honest for slot in peers.votes(peer)[1]]
    return conclude(options, trials, differences, evidence, twice)


async def hurt(peers: Network, number: int, random: Random) -> Trial:
    """Run one trial, which begins and ends with a network in good order."""
    with trio.fail_after(STALL_SECONDS_MAX):
        first = await in_order(peers)
    normal = await usual(peers, first)
    asked = peers.demo.watched
    victim = random.choice(peers.honest)
    await trio.sleep(random.uniform(0, 2 * normal))
    leader = await peers.leader(asked)
    if number % 3 == 2 and leader in peers.honest and leader is not None:
        victim = leader  # in every third trial the victim is the current leader
    before = {peer.name: Watch(peer) for peer in peers.honest if peer is not victim}
    killed_at = time()
    workers = peers.kill(victim)
    with trio.fail_after(STALL_SECONDS_MAX):
        worst = await outlast(list(before.values()), killed_at)
    trial = await measure(peers, worst, number, victim, victim is leader, normal, killed_at)
    trial.workers_ended = await network.ended(workers)
    trial.judge()
    await come_back(peers, victim, trial)
    return trial


async def outlast(survivors: list[Watch], killed_at: float) -> Watch:
    """Wait until every survivor has closed enough rounds. Return the survivor that closed its first one last."""

    async def until_closed(watch: Watch) -> None:
        while sum(at > killed_at for _, at in watch.rounds()) < DOWN_ROUNDS:
            await watch.more(10.0)

    async with trio.open_nursery() as nursery:
        for watch in survivors:
            nursery.start_soon(until_closed, watch)
    return max(survivors, key=lambda watch: next(at for _, at in watch.rounds() if at > killed_at))


async def measure(
    peers: Network, watch: Watch, number: int, victim: DemoPeer, led: bool, normal: float, killed_at: float
) -> Trial:
    rounds, durations = watch.rounds(), watch.durations()
    index = next(i for i, (_, at) in enumerate(rounds) if at > killed_at)
    round, closed_at = rounds[index]
    opened_at = rounds[index - 1][1]
    views = {view.round: view for view in await watch.peer.client.rounds(100)}
    arrivals: dict[str, float] = {}
    for event in watch.events:
        if event.kind == "proposal" and int(event.fields["round"]) == round:
            arrivals.setdefault(event.fields["peer"], event.at_ms / 1000)
    return Trial(
        number=number,
        victim=victim.name,
        led=led,
        proposed=arrivals.get(peer_id(victim.identity.public), killed_at + 1) < killed_at,
        round=round,
        normal_seconds=normal,
        proposals_timer_seconds=proposals_timer(views[round - 1], [at - opened_at for at in arrivals.values()]),
        view_timer_seconds=view_timer(list(views.values())),
        killed_round_seconds=closed_at - opened_at,
        next_round_seconds=durations[round + 1],
        decided_after_seconds=closed_at - killed_at,
        later_seconds=median(durations[later] for later in range(round + LATER, round + DOWN_ROUNDS)),
    )


async def come_back(peers: Network, victim: DemoPeer, trial: Trial) -> None:
    started = trio.current_time()
    await peers.restart(victim)
    trial.answers_seconds = trio.current_time() - started
    target = (await peers.honest[0 if victim is not peers.honest[0] else 1].client.status()).height

    async def caught_up() -> bool:
        return (await victim.client.status()).height >= target

    if not await network.holds(caught_up, BACK_SECONDS_MAX):
        trial.problems.append(f"not caught up {BACK_SECONDS_MAX:.0f} s after its restart")
    trial.caught_up_seconds = trio.current_time() - started
    if not await network.holds(partial(takes_part, victim, victim), BACK_SECONDS_MAX):
        trial.problems.append(f"does not participate {BACK_SECONDS_MAX:.0f} s after its restart")
    trial.back_seconds = trio.current_time() - started
    halted = (await victim.client.status()).halted
    trial.problems += [halted] if halted else []
    trial.votes, twice = await trio.to_thread.run_sync(peers.votes, victim)
    evidence = await trio.to_thread.run_sync(peers.evidence)
    trial.problems += [f"signed {slot} twice" for slot in twice]
    trial.problems += [f"evidence on the disk of {name}" for name, count in evidence.items() if count]


# Report --------------------------------------------------------------------------------------------------------------


def line(trial: Trial) -> str:
    what = f"trial {trial.number}: {trial.victim}{' (leader)' if trial.led else ''} in round {trial.round}"
    return f"{what}, back after {trial.back_seconds:.1f} s: {'; '.join(trial.problems) or 'all held'}"


def conclude(
    options: argparse.Namespace, trials: list[Trial], differences: list[str], evidence: dict[str, int], twice: list[str]
) -> int:
    failures = [f"trial {trial.number}: {problem}" for trial in trials for problem in trial.problems]
    failures += [f"roots differ at {where}" for where in differences]
    failures += [f"signed twice: {slot}" for slot in twice]
    failures += [f"{count} proofs of double signing on the disk of {name}" for name, count in evidence.items() if count]
    columns = ["trial", "victim", "leader", "proposed", "round", "normal", "T1", "view timer", "killed round", "next round"]
    rows = []
    for t in trials:
        seconds = [t.normal_seconds, t.proposals_timer_seconds, t.view_timer_seconds, t.killed_round_seconds]
        seconds += [t.next_round_seconds, t.later_seconds, t.decided_after_seconds]
        seconds += [t.answers_seconds, t.caught_up_seconds, t.back_seconds]
        marks = ["yes" if mark else "" for mark in (t.led, t.proposed)]
        ok = "no" if t.problems else "yes"
        rows.append([str(t.number), t.victim, *marks, str(t.round), *(f"{value:.2f}" for value in seconds), ok])
    title = f"kill -9, {options.peers} peers, {options.malicious} lying, seed {options.seed}; seconds"
    columns += ["later", "decided after", "answers", "caught up", "back", "ok"]
    return report(options, title, columns, rows, failures, {"trials": [asdict(t) for t in trials]})


def main() -> int:
    parser = arguments("kill", __doc__)
    parser.add_argument(
        "--malicious", type=parse_integer_in(0), default=0, metavar="N", help="number of trainers that lie in every round"
    )
    parser.add_argument("--trials", type=COUNT, default=20, metavar="N", help="number of kills, one after another")
    parser.add_argument("--small", action="store_true", help="use a tiny model, for short rounds")
    return network.main(partial(run, parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
