"""`python -m scenarios.pause`: one peer is stopped for ten seconds (`SIGSTOP`): a follower, the leader, or one with a worker.

Its links and its clock continue, and it does not notice the pause. The others must continue, and it must take part again. If
another trainer's worker is stopped as well, most trainers are missing, and no voter vouches for the last one's update. Even then
a round must take no longer than its timers.
"""

from __future__ import annotations

import sys
from functools import partial
from random import Random

import trio

from consensus.pbft.pacemaker import VIEW_SECONDS_MIN
from rounds.round_state import CUT_OFF_SECONDS, LIGHT_VOTER_SECONDS, MINORITY_SECONDS_MIN
from scenarios import network
from scenarios.network import Network, Watch
from scenarios.pace import STALL_SECONDS_MAX, comes_back, goes_on, in_order, replays_timer, usual
from scenarios.trials import COUNT, Trial, arguments, conduct, duration

MEASURED_ROUNDS = 8  # before the pause, so that each peer has measured the usual time of a vouch
HURT_ROUNDS = 2


async def pause(random: Random, leads: bool, seconds: float, peers: Network, trial: Trial) -> None:
    with trio.fail_after(STALL_SECONDS_MAX):
        await in_order(peers)
    await trio.sleep(random.uniform(0, 1))
    leader = await peers.leader(peers.demo.watched)
    assert leader is not None
    victim = leader if leads else random.choice([peer for peer in peers.honest if peer is not leader])
    asked = next(peer for peer in peers.honest if peer is not victim)
    before = await peers.height(asked)
    peers.freeze(victim)
    try:
        await trio.sleep(seconds)
        after = await peers.height(asked)
    finally:
        peers.thaw(victim)
    trial.figures |= {"victim": victim.name, "heights meanwhile": after - before}
    # The others may wait for a view timer and a proposals timer. After that they need only their normal time.
    trial.require(after - before > 2 or seconds < 4 * VIEW_SECONDS_MIN, f"{after - before} heights in {seconds:.0f} s")
    await comes_back(peers, victim, asked, trial)


async def pause_with_worker(random: Random, peers: Network, trial: Trial) -> None:
    """Stop one trainer and the worker of another, until two rounds were closed without them."""
    with trio.fail_after(STALL_SECONDS_MAX):
        normal = await usual(peers, await in_order(peers))
    watched = peers.demo.watched
    await goes_on(watched, MEASURED_ROUNDS)
    victim, other = random.sample([peer for peer in peers.honest if peer.trains and peer is not watched], 2)
    assert other.process is not None
    workers = network.children(other.process.pid)
    watch = Watch(watched)
    await watch.more(0.0)
    first = watch.rounds()[-1][0] + 1
    peers.freeze(victim)
    network.signal_all(workers, stop=True)
    try:
        with trio.fail_after(2 * STALL_SECONDS_MAX):
            await watch.until_round(first + HURT_ROUNDS)
    finally:
        network.signal_all(workers, stop=False)
        peers.thaw(victim)
    durations = watch.durations()
    for number in range(HURT_ROUNDS):
        seconds = durations[first + 1 + number]  # the round of the fault may already have been complete
        trial.figures[f"round {number + 1}"] = seconds
        seconds_max = hurt_seconds_max(normal, number + 1)  # the round of the fault was the first one without vouches
        trial.require(seconds <= seconds_max, f"round {first + 1 + number} took {seconds:.1f} s, not {seconds_max:.0f} s")
    for peer in (victim, other):
        await comes_back(peers, peer, watched, trial)


def hurt_seconds_max(normal: float, patience: int) -> float:
    """Return T4 with most trainers missing: only the trainer's own worker runs, so no voter vouches for its update."""
    return MINORITY_SECONDS_MIN + replays_timer(normal, patience) + LIGHT_VOTER_SECONDS + CUT_OFF_SECONDS


def main() -> int:
    parser = arguments("pause", __doc__)
    parser.add_argument(
        "--trials",
        type=COUNT,
        default=6,
        metavar="N",
        help="number of trials: a follower, the leader, and a peer with another's worker, in turn",
    )
    parser.add_argument("--seconds", type=duration, default=10.0, metavar="S", help="duration of each stop")
    options = parser.parse_args()
    random = Random(options.seed)
    kinds = [
        ("a follower", partial(pause, random, False, options.seconds)),
        ("the leader", partial(pause, random, True, options.seconds)),
        ("one and another's worker", partial(pause_with_worker, random)),
    ]
    attempts = [kinds[number % len(kinds)] for number in range(options.trials)]
    return network.main(partial(conduct, options, f"stopped for {options.seconds:g} s", attempts))


if __name__ == "__main__":
    sys.exit(main())
