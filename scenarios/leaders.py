"""`python -m scenarios.leaders`: the leader is killed in each of twenty heights, and restarted after its next turn.

The height that it led may cost a timer. The next height may, too, if the leader had already proposed, because its proposal is
awaited then. From the second height after it on, heights must take their normal time, even when the dead voter would lead.
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

NORMAL_HEIGHTS = 12  # with all peers present


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
    heights = 2 * len(peers.peers) + 2  # others lead this number of heights in any case; then its turn may come
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
    # A leader that was killed right after it sent its block is missed the next time it would lead, and skipped after that.
    trial.require(len(views) <= 1, f"it was waited for again: views {views}, killed after height {last}")
    await peers.restart(leader)
    await comes_back(peers, leader, watch.peer, trial)


def _judge(trial: Trial, normal: list[float], following: list[float]) -> None:
    middle = median(following)
    trial.require(middle <= SLOWER_MAX * median(normal), f"heights take {middle:.2f} s instead of {median(normal):.2f} s")
    # The load of the machine changes single heights, too. The bound is therefore the slowest height with all peers present.
    slowest = max(following)
    trial.require(
        slowest <= SLOWER_MAX * max(normal), f"a height took {slowest:.2f} s, with all peers at most {max(normal):.2f} s"
    )


async def _normal(watch: Watch) -> list[float]:
    await watch.more(0.0)
    first = watch.heights()[-1][0]
    while watch.heights()[-1][0] < first + NORMAL_HEIGHTS:
        await watch.more(10.0)
    return [seconds for height, seconds in _durations(watch).items() if height > first]


def _durations(watch: Watch) -> dict[int, float]:
    """Return the seconds from the previous height to each height."""
    return {after[0]: after[1] - before[1] for before, after in pairwise(watch.heights())}


def main() -> int:
    parser = arguments("leaders", __doc__)
    parser.add_argument("--heights", type=COUNT, default=20, metavar="N", help="number of heights in which the leader is killed")
    options = parser.parse_args()
    attempts = [(f"leader {number + 1}", kill_leader) for number in range(options.heights)]
    return network.main(partial(conduct, options, "the leader is killed", attempts))


if __name__ == "__main__":
    sys.exit(main())
