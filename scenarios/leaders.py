"""`python -m scenarios.leaders`: the leader is killed in each of twenty heights, and started again after its turn has come again.

The height that it led may cost a timer, and the next one too where its proposal was out already: it is awaited then. From the
second one after it on heights must take what they take with everybody there, also where the dead voter would lead.
"""

from __future__ import annotations

import sys
from functools import partial
from itertools import pairwise
from statistics import median

import trio

from scenarios import network
from scenarios.network import Network, Watch
from scenarios.pace import SLOWER_MAX, STALL_SECONDS_MAX, comes_back, in_order
from scenarios.trials import COUNT, Trial, arguments, conduct

NORMAL_HEIGHTS = 12  # with everybody there


async def kill_leader(peers: Network, trial: Trial) -> None:
    watched = peers.demo.watched
    with trio.fail_after(STALL_SECONDS_MAX):
        await in_order(peers)
        normal = await _normal(Watch(watched))
    leader = await peers.leader(watched)
    assert leader is not None
    watch = Watch(next(peer for peer in peers.honest if peer is not leader))
    await watch.more(0.0)
    last = watch.heights()[-1][0]
    peers.kill(leader)
    heights = 2 * len(peers.peers) + 2  # so many are led by others in any case; then its turn may come
    with trio.fail_after(STALL_SECONDS_MAX):
        while watch.heights()[-1][0] < last + heights:
            await watch.more(10.0)
    durations = _durations(watch)
    led, following = durations[last + 1], [durations[height] for height in range(last + 3, last + heights + 1)]
    views = {height: view for height, view in peers.views(watch.peer).items() if height > last}
    trial.figures |= {
        "leader": leader.name,
        "normal": median(normal),
        "slowest normal": max(normal),
        "its height": led,
        "next": durations[last + 2],
        "median after": median(following),
        "slowest after": max(following),
        "second views": str(len(views)),
    }
    _judge(trial, normal, following)
    # Killed right after its block was out, it is missed when it would lead the next time; then not any more.
    trial.require(len(views) <= 1, f"it was waited for again: views {views}, killed after height {last}")
    await peers.restart(leader)
    await comes_back(peers, leader, watch.peer, trial)


def _judge(trial: Trial, normal: list[float], following: list[float]) -> None:
    middle = median(following)
    trial.require(middle <= SLOWER_MAX * median(normal), f"heights take {middle:.2f} s instead of {median(normal):.2f} s")
    # Single heights differ by what else the machine does, with everybody there too: each is held against the slowest of those.
    slowest = max(following)
    trial.require(
        slowest <= SLOWER_MAX * max(normal), f"one took {slowest:.2f} s, with everybody there at most {max(normal):.2f} s"
    )


async def _normal(watch: Watch) -> list[float]:
    await watch.more(0.0)
    first = watch.heights()[-1][0]
    while watch.heights()[-1][0] < first + NORMAL_HEIGHTS:
        await watch.more(10.0)
    return [seconds for height, seconds in _durations(watch).items() if height > first]


def _durations(watch: Watch) -> dict[int, float]:
    """Seconds from the height before to each height."""
    return {after[0]: after[1] - before[1] for before, after in pairwise(watch.heights())}


def main() -> int:
    parser = arguments("leaders", __doc__)
    parser.add_argument("--heights", type=COUNT, default=20, metavar="N", help="in which the leader is killed")
    options = parser.parse_args()
    attempts = [(f"leader {number + 1}", kill_leader) for number in range(options.heights)]
    return network.main(partial(conduct, options, "the leader is killed", attempts))


if __name__ == "__main__":
    sys.exit(main())
