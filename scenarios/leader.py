"""`python -m scenarios.leader`: the leader is killed, or stopped so that it holds its links and says nothing.

That costs the block one view timeout. The next leaders are others: the failed one is skipped, and later blocks cost no timeout.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

import trio
from rich.console import Console
from rich.table import Table

from consensus.block import decode_block
from consensus.pacemaker import VIEW_GROWTH
from ledger.store import Store
from peer.datadir import DataDirectory
from peer.demo import DemoPeer
from protocol import codec
from protocol.identity import peer_id
from protocol.messages import Commit
from scenarios import network
from scenarios.kill import BACK_SECONDS_MAX, NORMAL_ROUNDS, SLOWER_MAX, STALL_SECONDS_MAX, in_order, takes_part, usual, view_timer
from scenarios.network import SMALL_JOB, Network, Watch

LATER_ROUNDS = 12  # more than 2n heights of n = 4, so that the skipped leader's turn comes again meanwhile


@dataclass
class Trial:
    fault: str
    leader: str
    height: int  # that it led
    normal_seconds: float
    view_timer_seconds: float
    slowest_seconds: float  # the slowest round after the fault
    later_seconds: float
    views: dict[int, int] = field(default_factory=dict)  # height -> view that decided it, where that was not the first
    problems: list[str] = field(default_factory=list)


async def run(options: argparse.Namespace) -> int:
    trials = []
    async with network.running(options.peers) as peers:
        await peers.train({**SMALL_JOB, "seed": str(options.seed)})
        for number in range(options.trials):
            trials.append(await hurt(peers, "SIGSTOP" if number % 2 else "SIGKILL"))
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(peers.stop)
        differences = peers.differences()
    return report(options, trials, differences)


async def hurt(peers: Network, fault: str) -> Trial:
    with trio.fail_after(STALL_SECONDS_MAX):
        normal = await usual(peers, await in_order(peers))
    victim = await peers.leader(peers.demo.watched)
    assert victim is not None
    survivor = next(peer for peer in peers.honest if peer is not victim)
    height = (await survivor.client.status()).height + 1
    watch = Watch(survivor)
    await watch.more(0)
    (peers.kill if fault == "SIGKILL" else peers.freeze)(victim)
    last = watch.rounds()[-1][0]
    with trio.fail_after(STALL_SECONDS_MAX):
        await watch.until_round(last + LATER_ROUNDS)
    durations = watch.durations()
    views = {view.round: view for view in await survivor.client.rounds(100)}
    trial = Trial(
        fault=fault,
        leader=victim.name,
        height=height,
        normal_seconds=normal,
        view_timer_seconds=view_timer([view for number, view in views.items() if number <= last]),
        slowest_seconds=max(durations[number] for number in range(last + 1, last + LATER_ROUNDS)),
        later_seconds=median(durations[number] for number in range(last + 3, last + LATER_ROUNDS)),
    )
    trial.views = changed_views(survivor, height, max(view.height for view in views.values()))
    judge(trial, peer_id(victim.identity.public))
    await recover(peers, victim, fault, trial)
    return trial


def changed_views(peer: DemoPeer, first: int, last: int) -> dict[int, int]:
    """Heights that took more than one view, from the certificates on this peer's disk."""
    directory = DataDirectory(peer.directory)
    from peer.daemon import read_genesis

    store = Store(directory.ledger, read_genesis(directory).chain_id)
    try:
        found = {}
        for height in range(first, last + 1):
            decided = store.decision(height)
            assert decided is not None
            view = codec.decode_message(decided.certificate.vote, (Commit,)).view
            if view:
                found[height] = view
            assert decode_block(decided.block).height == height
        return found
    finally:
        store.close()
