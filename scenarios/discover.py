"""`python -m scenarios.discover --peers 20`: a peer that knows one live peer is soon linked with all others.

The address books of all peers are deleted before each start, so that a peer knows only the addresses in its command. The trials
take turns:

- A peer that was away starts again and knows one live peer.
- The same, after the death of the peer through which all others found one another.
- Two groups do not know each other, and a peer joins that knows one of each.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from random import Random

import trio

from demo import network_demo
from demo.demo_peers import DemoPeer
from protocol.errors import UserError
from protocol.identity import peer_id
from scenarios import network
from scenarios.network import Network, holds
from scenarios.trials import COUNT, Trial, arguments, report, table_of

LINKED_SECONDS_MAX = 10.0
STRANGERS_SECONDS = 3.0  # two groups must not find each other for this long, so that only the last peer can connect them
PEERS_MIN = 5  # two groups of two, and the peer that knows both


def votes(peer: DemoPeer) -> None:
    """Let only the first peer train, as a demo needs one worker. This scenario measures the network."""
    peer.trains = peer.number == 0


async def links(peer: DemoPeer) -> set[str]:
    """Return the ids of linked peers, or none if the peer does not answer."""
    try:
        return {view.peer for view in await peer.client.peers() if view.link is not None}
    except UserError:
        return set()


async def all_linked(peers: Sequence[DemoPeer]) -> bool:
    names = {peer_id(peer.identity.public) for peer in peers}
    for peer in peers:
        if await links(peer) != names - {peer_id(peer.identity.public)}:
            return False
    return True


async def launch(peers: Network, peer: DemoPeer, *known: DemoPeer) -> None:
    """Start a peer that knows only these addresses."""
    (peer.directory / "addresses").unlink(missing_ok=True)
    network_demo.launch_peer(peers.demo, peer, ",".join(one.address for one in known))


async def start(peers: Network, group: Sequence[DemoPeer]) -> None:
    """Start the peers one after another. Each knows the previous one."""
    for before, peer in zip((None, *group), group, strict=False):
        await launch(peers, peer, *([before] if before else []))
        await network_demo.wait_until_ready(peer)


async def end(peers: Network, group: Sequence[DemoPeer]) -> None:
    async with trio.open_nursery() as nursery:
        for peer in group:
            nursery.start_soon(peers.end, peer)


async def linked(peers: Sequence[DemoPeer], trial: Trial) -> None:
    started = trio.current_time()
    trial.require(await holds(partial(all_linked, peers), LINKED_SECONDS_MAX), f"not linked after {LINKED_SECONDS_MAX:g} s")
    trial.figures["linked"] = trio.current_time() - started


async def knows_one(peers: Network, trial: Trial, random: Random) -> None:
    comes, known = random.sample(peers.peers, 2)
    await peers.end(comes)
    await launch(peers, comes, known)
    await linked(peers.peers, trial)


async def first_died(peers: Network, trial: Trial, random: Random) -> None:
    first, *others = peers.peers
    comes, known = random.sample(others, 2)
    await end(peers, peers.peers)
    await start(peers, [first, *(peer for peer in others if peer is not comes)])
    peers.kill(first)
    await launch(peers, comes, known)
    await linked(others, trial)
    await launch(peers, first, known)
    await network_demo.wait_until_ready(first)


async def two_groups(peers: Network, trial: Trial, random: Random) -> None:
    await end(peers, peers.peers)
    comes, *others = random.sample(peers.peers, len(peers.peers))
    groups = others[::2], others[1::2]
    for group in groups:
        await start(peers, group)
    for group in groups:
        trial.require(await holds(partial(all_linked, group), LINKED_SECONDS_MAX), "the peers of a group are not all linked")
    await trio.sleep(STRANGERS_SECONDS)
    trial.require(all([await all_linked(group) for group in groups]), "the groups were linked before")
    await launch(peers, comes, *(random.choice(group) for group in groups))
    await linked(peers.peers, trial)


KINDS = {"a peer that knows one": knows_one, "the first one died": first_died, "one acquaintance of two groups": two_groups}


async def run(options: argparse.Namespace) -> int:
    trials, random, started = list[Trial](), Random(options.seed), trio.current_time()
    async with network.running(options.peers, seed=options.seed, folder=options.keep, dress=votes) as peers:
        for number in range(options.trials):
            what = list(KINDS)[number % len(KINDS)]
            trials.append(trial := Trial(what))
            try:
                await KINDS[what](peers, trial, random)
            except UserError as error:
                trial.problems.append(str(error))
            print(f"{len(trials)}. {what}: {'; '.join(trial.problems) or 'held'}", file=sys.stderr, flush=True)
            if trial.problems:
                break
    failures = [f"{trial.what}: {problem}" for trial in trials for problem in trial.problems]
    title = f"Discovery, {options.peers} peers, seed {options.seed}, {trio.current_time() - started:.0f} s in all; seconds"
    return report(
        options, title, *table_of(trials), failures, {"peers": options.peers, "trials": [asdict(trial) for trial in trials]}
    )


def main() -> int:
    parser = arguments("discover", __doc__, peers=20)
    parser.add_argument("--trials", type=COUNT, default=len(KINDS), metavar="N", help="number of trials, one kind after another")
    options = parser.parse_args()
    if options.peers < PEERS_MIN:
        parser.error(f"--peers {options.peers}: two groups and their acquaintance are {PEERS_MIN} at least")
    return network.main(partial(run, options))


if __name__ == "__main__":
    sys.exit(main())
