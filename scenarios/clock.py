"""`python -m scenarios.clock`: one peer's wall clock is wrong when it starts, or jumps while it runs.

The other peers must continue as before. A peer whose error is small, or whose clock is behind, takes part all the time. A peer
whose clock is far ahead takes part again after its clock was corrected and it was restarted. `python -m scenarios.clock run …`
starts such a peer.
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from random import Random

import trio

from scenarios import network
from scenarios.network import Network, holds
from scenarios.pace import BACK_SECONDS_MAX, STALL_SECONDS_MAX, comes_back, goes_on, in_order, takes_part
from scenarios.trials import Trial, arguments, conduct

VARIABLE = "FOLKMOOT_CLOCK"  # error of the clock in seconds, and the delay in seconds before it appears
TOLERATED_SECONDS = 1.5  # a block's time may be two seconds ahead of the clock of a voter that prepares it
JUMP_AFTER_SECONDS = 12.0  # time for a peer to start
ROUNDS = 8  # rounds that the others close meanwhile, so that each peer leads once
ERRORS = (3_600.0, -3_600.0, TOLERATED_SECONDS, -TOLERATED_SECONDS)


async def wrong_clock(random: Random, error: float, after: float, peers: Network, trial: Trial) -> None:
    with trio.fail_after(STALL_SECONDS_MAX):
        await in_order(peers)
    victim = random.choice([peer for peer in peers.honest if peer is not peers.demo.watched])
    trial.figures["victim"] = victim.name
    right, victim.module = victim.module, ("scenarios.clock", *victim.module)
    victim.environment[VARIABLE] = f"{error} {after}"
    try:
        await peers.end(victim)
        await peers.restart(victim)
        await trio.sleep(after)
        started = trio.current_time()
        await goes_on(peers.demo.watched, ROUNDS)
        trial.figures["rounds meanwhile"] = (trio.current_time() - started) / ROUNDS
        if after or error <= TOLERATED_SECONDS:  # a running peer measures time from its start, with a clock that is never set
            part = await holds(partial(takes_part, victim, peers.demo.watched), BACK_SECONDS_MAX)
            trial.require(part, f"{victim.name} does not participate with a clock that is wrong by {error:g} s")
    finally:
        victim.module = right
        del victim.environment[VARIABLE]
    await peers.end(victim)
    await peers.restart(victim)
    await comes_back(peers, victim, peers.demo.watched, trial)


def peer_with_wrong_clock() -> int:
    """Run a peer whose clock is wrong. The rest of the command line is the peer's module and its arguments."""
    import runpy

    error, after = map(float, os.environ[VARIABLE].split())
    right, jump = time.time, time.monotonic() + after
    setattr(time, "time", lambda: right() + (error if time.monotonic() >= jump else 0.0))  # noqa: B010 - what the daemon calls
    module, sys.argv = sys.argv[1], sys.argv[1:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


def main() -> int:
    if VARIABLE in os.environ:
        return peer_with_wrong_clock()
    options = arguments("clock", __doc__).parse_args()
    random = Random(options.seed)
    attempts = [(f"{error:+g} s from the start", partial(wrong_clock, random, error, 0.0)) for error in ERRORS]
    attempts += [(f"jumps by {error:+g} s", partial(wrong_clock, random, error, JUMP_AFTER_SECONDS)) for error in ERRORS[:2]]
    return network.main(partial(conduct, options, "one clock is wrong", attempts))


if __name__ == "__main__":
    sys.exit(main())
