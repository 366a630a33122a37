"""`python -m scenarios.rolling`: every peer in turn loses its disk and comes back as a newcomer, while the network trains.

The peer leaves, is stopped, and loses all its data with its key. It joins again by an invitation and asks for a vote, the others
approve, and it must take part as before.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from functools import partial

import trio

from demo.demo_peers import DemoPeer
from peer.settings.data_directory import DataDirectory
from protocol.api import INVITATION_DAYS
from protocol.errors import UserError
from protocol.identity import peer_id
from scenarios import network
from scenarios.network import Network, holds
from scenarios.pace import STALL_SECONDS_MAX, comes_back, goes_on, in_order
from scenarios.trials import Trial, arguments, conduct

LEAVE_SECONDS_MAX = 30.0
JOIN_SECONDS_MAX = 90.0  # to catch up, to be admitted, to be approved, and two heights


async def wipe(number: int, peers: Network, trial: Trial) -> None:
    peer = peers.peers[number]
    others = [other for other in peers.honest if other is not peer]
    trial.figures["peer"] = peer.name
    with trio.fail_after(STALL_SECONDS_MAX):
        await in_order(peers)
    await peer.client.resign_as_voter()
    trial.require(await holds(partial(_votes, peer, False), LEAVE_SECONDS_MAX), "it still votes after it left")
    await peers.end(peer)
    await goes_on(others[0], 1)
    started, height = trio.current_time(), await peers.height(others[0])
    await _rejoin(peers, peer, others)
    trial.figures["voter after"] = trio.current_time() - started
    trial.figures["heights meanwhile"] = await peers.height(others[0]) - height
    await comes_back(peers, peer, others[0], trial)


async def _rejoin(peers: Network, peer: DemoPeer, others: Sequence[DemoPeer]) -> None:
    keep_log(peer)
    shutil.rmtree(peer.directory)
    peer.identity = DataDirectory.create(peer.directory).create_identity()
    await peers.restart(peer, "join", await others[0].client.create_invitation(INVITATION_DAYS))
    await trio.to_thread.run_sync(peers.record, peer)

    async def is_voter() -> bool:
        for other in others:
            try:
                await other.client.approve_voter(peer_id(peer.identity.public))
            except UserError:
                pass  # it is not up to date yet, or no longer needs this approval
        return await _votes(peer, True)

    if not await holds(is_voter, JOIN_SECONDS_MAX):
        raise trio.TooSlowError


def keep_log(peer: DemoPeer) -> None:
    """Keep the log of a peer whose folder is deleted, so that failures can be examined with `--keep`."""
    life = sum(1 for _ in peer.directory.parent.glob(f"{peer.number}-*.log"))
    shutil.copy(peer.directory / "peer.log", peer.directory.parent / f"{peer.number}-{life}.log")


async def _votes(peer: DemoPeer, wanted: bool) -> bool:
    return (await peer.client.status()).voter == wanted


def main() -> int:
    parser = arguments("rolling", __doc__)
    options = parser.parse_args()
    attempts = [(f"wiped and back: peer {number}", partial(wipe, number)) for number in range(options.peers)]
    return network.main(partial(conduct, options, "every disk lost once", attempts))


if __name__ == "__main__":
    sys.exit(main())
