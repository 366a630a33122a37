"""`python -m scenarios.partition --shape 2,2`: links between groups of real peers are cut and restored.

Every link goes through a proxy (`scenarios/proxy.py`). In turn, the links between the groups are held back, closed, held back in
one direction, or cut and restored quickly. The seed draws groups, times and durations. In all but the last case, each peer must
soon report the cut links (`peer reach`), and a peer without a quorum must name both sides (`status`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import permutations
from random import Random

import trio

from consensus.voter_set import quorum
from demo.demo_peers import DemoPeer
from protocol.api import LivenessMatrix
from protocol.codec import decode
from protocol.messages import Certificate
from scenarios import network
from scenarios.network import Network, holds, journal
from scenarios.pace import STALL_SECONDS_MAX, in_order
from scenarios.proxy import Direction, Proxy, running_proxy
from scenarios.trials import COUNT, Attempt, Trial, arguments, conduct
from transport.wire.failure_detector import SUSPECT_SECONDS

SHAPES = ("2,2", "3,1", "5,2", "4,3")  # of four and of seven peers, with and without a group that has a quorum
KINDS = ("hold", "close", "one way", "flapping")
CUT_SECONDS = (5.0, 12.0)  # limits of the draw: below and above the timeouts of TCP and of pings
FLAP_SECONDS = (0.3, 1.5)  # between changes
SAID_SECONDS_MAX = 20.0  # after the cut, until every peer reports it, and after its end, until none does
LOOK_SECONDS = 0.5  # interval between requests for these reports
SETTLE_SECONDS = 1.0  # messages that are on their way at the cut arrive, and blocks with them are decided
HEAL_SECONDS_MAX = 60.0  # until all links are back; a peer pauses up to 20 s after failed dials
HEAL_HEIGHTS_MAX = 3

Groups = Sequence[list[DemoPeer]]


def groups_of(peers: Sequence[DemoPeer], shape: Sequence[int], random: Random) -> Groups:
    drawn = random.sample(list(peers), len(peers))
    return [[drawn.pop() for _ in range(size)] for size in shape]


def between(groups: Groups) -> list[Direction]:
    return [(a.name, b.name) for one, other in permutations(groups, 2) for a in one for b in other]


def one_way(groups: Groups) -> list[Direction]:
    """Return the directions of a cut in which the others do not hear the first group, but it hears them."""
    return [(a.name, b.name) for other in groups[1:] for a in groups[0] for b in other]


async def split(proxy: Proxy, kind: str, shape: Sequence[int], random: Random, peers: Network, trial: Trial) -> None:
    with trio.fail_after(STALL_SECONDS_MAX):
        await in_order(peers)
    await trio.sleep(random.uniform(0, 1))  # a random moment of a round
    groups = groups_of(peers.peers, shape, random)
    trial.figures["groups"] = " | ".join(" ".join(str(peer.number) for peer in group) for group in groups)
    seconds = random.uniform(*CUT_SECONDS)
    try:
        if kind == "flapping":
            await _flap(proxy, groups, seconds, random)
        else:
            await _cut(proxy, groups, kind, seconds, peers, trial)
    finally:
        proxy.heal()
    await _heal(peers, trial)


async def _flap(proxy: Proxy, groups: Groups, seconds: float, random: Random) -> None:
    with trio.move_on_after(seconds):
        while True:
            proxy.cut(between(groups), close=random.random() < 0.5)
            await trio.sleep(random.uniform(*FLAP_SECONDS))
            proxy.heal()
            await trio.sleep(random.uniform(*FLAP_SECONDS))


async def _cut(proxy: Proxy, groups: Groups, kind: str, seconds: float, peers: Network, trial: Trial) -> None:
    cut_at = trio.current_time()
    proxy.cut(one_way(groups) if kind == "one way" else between(groups), close=kind == "close")
    await trio.sleep(SETTLE_SECONDS)
    before = [[*map(peers.decided, group)] for group in groups]
    await trio.sleep(seconds)
    after = [[*map(peers.decided, group)] for group in groups]
    trial.figures["decided in the cut"] = " | ".join(str(max(b) - max(a)) for a, b in zip(before, after, strict=True))
    alone = groups[1:] if kind == "one way" else groups  # after a one-way cut the first group hears all
    await _is_said("said", proxy.cut_directions, alone, cut_at, peers, trial)
    if kind == "one way":
        return  # peers that hear enough others can decide; signatures are checked at the end
    for group, old, new in zip(groups, before, after, strict=True):
        if len(group) >= quorum(len(peers.peers)):
            trial.require(min(new) > min(old), f"{len(group)} peers in one group, a quorum, decided nothing in {seconds:.0f} s")
        else:
            # A group may still learn the blocks that one of its peers knew before the cut.
            trial.require(max(new) == max(old), f"{len(group)} peers in one group, no quorum, went from {max(old)} to {max(new)}")


async def _is_said(what: str, cut: Iterable[Direction], alone: Groups, since: float, peers: Network, trial: Trial) -> None:
    """Check soon after `since` that all matrices show the cut, and that each peer of a group in `alone` names both sides."""
    directions = {(peers.key(speaker), peers.key(hearer)) for speaker, hearer in cut}
    wrong: list[str] = []

    async def all_say_so() -> bool:
        await trio.sleep(LOOK_SECONDS)
        reaches = [(peers.key(peer.name), await peer.client.voter_liveness()) for peer in peers.peers]
        wrong[:] = [text for me, reach in reaches for text in _misjudged(me, reach, directions)]
        for group in alone:
            wrong.extend([text for peer in group for text in await _unnamed(peer, group, peers)])
        return not wrong

    said = await holds(all_say_so, SAID_SECONDS_MAX - (trio.current_time() - since))
    trial.figures[what] = trio.current_time() - since
    trial.require(said, f"{SAID_SECONDS_MAX:.0f} s later: {'; '.join(wrong[:3])}")


def _misjudged(me: str, reach: LivenessMatrix, cut: set[tuple[str, str]]) -> Iterator[str]:
    """Return the differences between a matrix and the proxy's state. Rows of peers that are not heard are unknown."""
    for observer, row in reach.items():
        for peer, seconds in row.items():
            is_known = observer == me or (observer, me) not in cut
            is_silent = seconds is None or seconds >= SUSPECT_SECONDS
            if is_silent != ((peer, observer) in cut) if is_known else seconds is not None:
                yield f"in the matrix of {me[:8]} the row of {observer[:8]} has {seconds} for {peer[:8]}"


async def _unnamed(peer: DemoPeer, group: list[DemoPeer], peers: Network) -> list[str]:
    """Return the status of a peer without a quorum if it does not name both sides."""
    if len(group) >= (needed := quorum(len(peers.peers))):
        return []
    waiting = (await peer.client.status()).waiting
    here, _, there = waiting.partition("; not heard: ")
    wanted = (
        f"partition: {len(group)} of {len(peers.peers)} voters are connected",
        f", {needed} are needed",
    )
    names = all((other.name in here) == (other in group) and (other.name in there) != (other in group) for other in peers.peers)
    return [] if names and all(text in here for text in wanted) else [f"{peer.name} says {waiting!r}"]


async def _heal(peers: Network, trial: Trial) -> None:
    """Check that all peers hold the same decisions within a few heights after all links are back."""
    started = trio.current_time()

    async def linked() -> bool:
        return all([(await peer.client.status()).links == len(peers.peers) - 1 for peer in peers.peers])

    trial.require(await holds(linked, HEAL_SECONDS_MAX), f"not all links are back after {HEAL_SECONDS_MAX:.0f} s")
    trial.figures["linked"] = trio.current_time() - started
    start = max(map(peers.decided, peers.peers))
    heights: list[int] = []

    async def together() -> bool:
        heights[:] = map(peers.decided, peers.peers)
        return min(heights) >= start and max(heights) - min(heights) <= 1

    with trio.fail_after(HEAL_SECONDS_MAX):
        await holds(together, float("inf"))
    trial.figures |= {"healed": trio.current_time() - started, "heights to heal": max(heights) - start}
    trial.require(max(heights) - start <= HEAL_HEIGHTS_MAX, f"{max(heights) - start} heights until all were together again")
    with trio.fail_after(STALL_SECONDS_MAX):
        await in_order(peers)
    trial.figures["all take part"] = trio.current_time() - started
    await _is_said("unsaid", (), (), trio.current_time(), peers, trial)


def thin(peers: Network) -> list[str]:
    """Return the decisions with fewer signatures than a quorum."""
    found = []
    for peer in peers.honest:
        with journal(peer) as database:
            for height, data in database.execute("SELECT height, certificate FROM blocks"):
                signers = len(decode(Certificate, data).signatures)
                if signers < quorum(len(peers.peers)):
                    found.append(f"height {height} on the disk of {peer.name} was decided by {signers}")
    return found


def attempts(options: argparse.Namespace, proxy: Proxy) -> list[tuple[str, Attempt]]:
    found: list[tuple[str, Attempt]] = []
    for number in range(options.trials):
        random = Random(f"{options.seed}/{number}")
        kind = options.kind or KINDS[number % len(KINDS)]
        found.append((kind, partial(split, proxy, kind, options.shape, random)))
    return found


async def run(options: argparse.Namespace) -> int:
    options.peers = sum(options.shape)
    title = "cut into " + " | ".join(map(str, options.shape))
    async with running_proxy() as proxy:
        return await conduct(options, title, attempts(options, proxy), dress=proxy.dress, also=thin)


def _shape(text: str) -> tuple[int, ...]:
    if text not in SHAPES:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {' '.join(SHAPES)}")
    return tuple(int(part) for part in text.split(","))


def main() -> int:
    parser = arguments("partition", __doc__, peers=None)
    parser.add_argument(
        "--shape", type=_shape, default=SHAPES[0], metavar="SIZES", help=f"sizes of the groups: one of {' '.join(SHAPES)}"
    )
    parser.add_argument("--trials", type=COUNT, default=8, metavar="N", help="number of splits, one after another")
    parser.add_argument("--kind", choices=KINDS, help="kind of all trials; default: all kinds in turn")
    return network.main(partial(run, parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
