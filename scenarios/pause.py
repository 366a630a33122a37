"""`python -m scenarios.pause`: one peer stands still for ten seconds (`SIGSTOP`), a follower and the leader in turn.

Its links stay, its clock goes on, and it learns nothing of it. The others must go on; it must take part again.
"""

from __future__ import annotations

import sys
from functools import partial
from random import Random

import trio

from consensus.pacemaker import VIEW_SECONDS_MIN
from scenarios import network
from scenarios.network import Network
from scenarios.pace import STALL_SECONDS_MAX, comes_back, in_order
from scenarios.trials import COUNT, Trial, arguments, conduct, duration


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
    # A view timer and a proposals timer may be waited for; after that the others need no more time than ever.
    trial.require(after - before > 2 or seconds < 4 * VIEW_SECONDS_MIN, f"{after - before} heights in {seconds:.0f} s")
    await comes_back(peers, victim, asked, trial)


def main() -> int:
    parser = arguments("pause", __doc__)
    parser.add_argument("--trials", type=COUNT, default=6, metavar="N", help="a follower and the leader in turn")
    parser.add_argument("--seconds", type=duration, default=10.0, metavar="S", help="how long each is stopped")
    options = parser.parse_args()
    random = Random(options.seed)
    attempts = []
    for number in range(options.trials):
        leads = number % 2 == 1
        attempts.append(("the leader" if leads else "a follower", partial(pause, random, leads, options.seconds)))
    return network.main(partial(conduct, options, f"stopped for {options.seconds:g} s", attempts))


if __name__ == "__main__":
    sys.exit(main())
