"""`python -m scenarios.soak --minutes 60`: the faults of the other scenarios, mixed, for any time.

The seed draws faults and victims. The network must be in good order again before the next fault.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from functools import partial
from random import Random

from consensus.voter_set import faults_tolerated
from scenarios import clock, crash_points, leaders, network, partition, pause, rolling
from scenarios.proxy import Proxy, running_proxy
from scenarios.trials import Attempt, arguments, conduct, duration

PAUSES_SECONDS = (0.5, 3.0, 10.0)
POINTS = tuple(
    point
    for point in crash_points.POINTS
    if crash_points.write_of(point)
    # A peer that was restored from a snapshot has no older blocks, and exports nothing.
    not in (*crash_points.NEWCOMERS, *crash_points.UNREACHED, *crash_points.LIARS, "file-safetensors")
)


def draw(random: Random, peers: int, proxy: Proxy) -> tuple[str, Attempt]:
    shapes = [(peers - size, size) for size in range(1, peers // 2 + 1)]
    match random.randrange(6):
        case 0:
            point = random.choice(POINTS)
            return f"killed {point}", partial(crash_points.crash, random, point)
        case 1:
            leads, seconds = random.random() < 0.5, random.choice(PAUSES_SECONDS)
            return f"stopped for {seconds:g} s", partial(pause.pause, random, leads, seconds)
        case 2:
            return "leader killed", leaders.kill_leader
        case 3:
            kind, shape = random.choice(partition.KINDS), random.choice(shapes)
            return f"cut {shape[0]} | {shape[1]}, {kind}", partial(partition.split, proxy, kind, shape, random)
        case 4:
            error = random.choice(clock.ERRORS)
            return f"clock {error:+g} s", partial(clock.wrong_clock, random, error, 0.0)
        case _:
            return "wiped and back", partial(rolling.wipe, random.randrange(peers))


def mixed(random: Random, peers: int, proxy: Proxy, seconds: float) -> Iterator[tuple[str, Attempt]]:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield draw(random, peers, proxy)


def main() -> int:
    parser = arguments("soak", __doc__)
    parser.add_argument("--minutes", type=duration, default=60.0, metavar="M", help="minutes until the last fault begins")
    options = parser.parse_args()
    if faults_tolerated(options.peers) < 1:
        parser.error("fewer than four peers bear no fault at all")

    async def run() -> int:
        async with running_proxy() as proxy:
            attempts = mixed(Random(options.seed), options.peers, proxy, 60 * options.minutes)
            return await conduct(options, "everything mixed", attempts, dress=proxy.dress, vocabulary=crash_points.VOCABULARY)

    return network.main(run)


if __name__ == "__main__":
    sys.exit(main())
