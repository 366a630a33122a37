"""`python -m scenarios.leader`: the leader is killed, or stopped, so that its links stay open without messages.

Its block costs one view timeout. Then it is skipped: no later height needs a second view, even when it would lead again.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import median

import trio

from scenarios import network
from scenarios.network import SMALL_JOB, Network, Watch
from scenarios.pace import BACK_SECONDS_MAX, SLOWER_MAX, STALL_SECONDS_MAX, in_order, takes_part, usual, view_timer
from scenarios.trials import COUNT, arguments, report

LATER_ROUNDS = 14  # more than the 2n heights for which a failed leader is skipped in any case, for n = 4


@dataclass
class Trial:
    fault: str
    leader: str
    normal_seconds: float
    view_timer_seconds: float
    slowest_seconds: float  # the slowest round after the fault
    later_seconds: float  # median round from the third one after the fault
    views: dict[int, int]  # height -> the view that decided it, unless it was the first
    problems: list[str] = field(default_factory=list)

    def judge(self) -> None:
        if list(self.views.values()) not in ([], [1]):
            self.problems.append(f"more than one view was lost: {self.views}")
        if self.later_seconds > SLOWER_MAX * self.normal_seconds:
            self.problems.append(f"later rounds take {self.later_seconds:.2f} s instead of {self.normal_seconds:.2f} s")


async def run(options: argparse.Namespace) -> int:
    trials = []
    async with network.running(options.peers, seed=options.seed, folder=options.keep) as peers:
        await peers.train({**SMALL_JOB, "seed": str(options.seed)})
        for number in range(options.trials):
            trials.append(await hurt(peers, "SIGSTOP" if number % 2 else "SIGKILL"))
            print(f"trial {number}: {'; '.join(trials[-1].problems) or 'all held'}", file=sys.stderr, flush=True)
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(peers.stop)
        failures = [f"trial {number}: {problem}" for number, trial in enumerate(trials) for problem in trial.problems]
        failures += [f"roots differ at {where}" for where in peers.differences()]
    if not any(trial.views for trial in trials):
        failures.append("no peer was stopped while it was the leader, so the run shows nothing")
    return conclude(options, trials, failures)


async def hurt(peers: Network, fault: str) -> Trial:
    with trio.fail_after(STALL_SECONDS_MAX):
        normal = await usual(peers, await in_order(peers))
    victim = await peers.leader(peers.demo.watched)
    assert victim is not None
    watch = Watch(next(peer for peer in peers.honest if peer is not victim))
    await watch.more(0.0)
    last, height = watch.rounds()[-1][0], (await watch.peer.client.status()).height
    if fault == "SIGKILL":
        peers.kill(victim)
    else:
        peers.freeze(victim)
    with trio.fail_after(STALL_SECONDS_MAX):
        await watch.until_round(last + LATER_ROUNDS)
    durations, known = watch.durations(), await watch.peer.client.rounds(100)
    trial = Trial(
        fault=fault,
        leader=victim.name,
        normal_seconds=normal,
        view_timer_seconds=view_timer([view for view in known if view.round <= last]),
        slowest_seconds=max(durations[number] for number in range(last + 1, last + LATER_ROUNDS)),
        later_seconds=median(durations[number] for number in range(last + 3, last + LATER_ROUNDS)),
        views={at: view for at, view in peers.views(watch.peer).items() if at >= height},
    )
    trial.judge()
    if fault == "SIGKILL":
        await peers.restart(victim)
    else:
        peers.thaw(victim)
    if not await network.holds(partial(takes_part, victim, watch.peer), BACK_SECONDS_MAX):
        trial.problems.append(f"{victim.name} does not take part again after {BACK_SECONDS_MAX:.0f} s")
    return trial


def conclude(options: argparse.Namespace, trials: list[Trial], failures: list[str]) -> int:
    columns = ("fault", "leader", "normal round", "view timer", "slowest after", "later", "second views", "ok")
    rows = []
    for t in trials:
        seconds = (t.normal_seconds, t.view_timer_seconds, t.slowest_seconds, t.later_seconds)
        views = ", ".join(f"height {height}: view {view}" for height, view in t.views.items())
        rows.append([t.fault, t.leader, *(f"{value:.2f}" for value in seconds), views, "no" if t.problems else "yes"])
    title = f"leader failures, {options.peers} peers, seed {options.seed}; seconds"
    return report(options, title, columns, rows, failures, {"trials": [asdict(t) for t in trials]})


def main() -> int:
    parser = arguments("leader", __doc__)
    parser.add_argument(
        "--trials", type=COUNT, default=6, metavar="N", help="number of leaders, which are killed and stopped in turn"
    )
    return network.main(partial(run, parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
