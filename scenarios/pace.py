"""Measurements of a network: its pace, the participation of its peers, and its timeouts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import median

import trio

from consensus.pbft.pacemaker import TAIL_FACTOR, VIEW_SECONDS_MIN
from demo.demo_peers import DemoPeer
from peer.node.open_rounds import REPLAYS_FACTOR
from protocol.api import RoundView
from protocol.identity import peer_id
from rounds.round_state import PROPOSALS_FACTOR, PROPOSALS_SECONDS_MIN, VOUCH_FACTOR, VOUCH_SECONDS_MIN
from scenarios.network import Network, Watch, holds, voted
from scenarios.trials import Trial

NORMAL_ROUNDS = 6  # with all peers present: their median is the normal time of a round
SLOWER_MAX = 1.5  # relative to the normal time, from the second round after that of the fault
BACK_SECONDS_MAX = 60.0  # until the proposal of a peer that was hurt is accepted and it votes again
RECENT_HEIGHTS = 4
STALL_SECONDS_MAX = 120.0  # no wait here takes longer, unless the network is stuck


async def in_order(peers: Network) -> int:
    """Wait until all peers take part, and return the first such round: two consecutive rounds accept each honest trainer.

    Both rounds close after this call, and all honest peers know them. Earlier rounds are no proof: a peer that was just restarted
    still shows rounds from before the fault, and its worker may only be starting.
    """
    trainers = {peer_id(peer.identity.public) for peer in peers.honest if peer.trains}
    before: int | None = None
    while True:
        seen = [await peer.client.rounds(2) for peer in peers.honest]
        newest = max((last[-1].round for last in seen if last), default=-1)
        before = newest if before is None else before
        if all(len(last) == 2 and last[0].round > before and _all_accepted(last, trainers) for last in seen):
            return newest + 1
        await trio.sleep(0.1)


def _all_accepted(views: Sequence[RoundView], trainers: set[str]) -> bool:
    return all(view.verdicts.get(key) == "accept" for view in views for key in trainers)


async def usual(peers: Network, first: int) -> float:
    """Return the normal time of a round, in seconds."""
    watch = Watch(peers.demo.watched)
    with trio.fail_after(STALL_SECONDS_MAX):
        await watch.until_round(first + NORMAL_ROUNDS)
    return median(seconds for number, seconds in watch.durations().items() if number > first)


def proposals_timer(before: RoundView, arrivals: list[float]) -> float:
    """Return T1 of `rounds.round_state` for the round after `before`."""
    awaited = sum(verdict == "accept" for verdict in before.verdicts.values())
    pace = sorted(arrivals)[min(awaited // 2, len(arrivals) - 1)]
    return max(PROPOSALS_SECONDS_MIN, PROPOSALS_FACTOR * pace)


def vouch_timer(normal: float) -> float:
    """Return an upper bound of the time after which other re-executors begin. A vouch usually takes less than a normal round."""
    return VOUCH_FACTOR * max(VOUCH_SECONDS_MIN, normal)


def replays_timer(normal: float, patience: int) -> float:
    """Return an upper bound of T2 − T1 of `rounds.round_state`."""
    return float(REPLAYS_FACTOR * max(VOUCH_SECONDS_MIN, normal) * 2**patience)


def view_timer(views: list[RoundView]) -> float:
    """Return an upper bound of the first view's timer in `consensus.pbft.pacemaker`, from the slowest of all decisions."""
    slowest = max(view.decision_ms or 0.0 for view in views)
    return max(VIEW_SECONDS_MIN, TAIL_FACTOR * slowest / 1000)


async def works(peer: DemoPeer, asked: DemoPeer) -> bool:
    """Return whether the peer takes part and is not halted. The last round alone may be from before the fault."""
    return not (await peer.client.status()).halted and await takes_part(peer, asked)


async def takes_part(peer: DemoPeer, asked: DemoPeer) -> bool:
    """Return whether the peer has voted at a recent height and, if it trains, has its proposal accepted in the last round.

    Rounds close without the slowest ballots, and heights without the slowest votes. A slow peer's own may be missing for long.
    """
    key = peer_id(peer.identity.public)
    last = await asked.client.rounds(1)
    has_voted = voted(peer) > (await asked.client.status()).height - RECENT_HEIGHTS
    return has_voted and (not peer.trains or any(view.verdicts.get(key) == "accept" for view in last))


async def goes_on(asked: DemoPeer, rounds: int) -> None:
    """Wait until this number of further rounds is closed. Raises `trio.TooSlowError` if the network is stuck."""
    watch = Watch(asked)
    with trio.fail_after(STALL_SECONDS_MAX):
        last = await asked.client.rounds(1)
        await watch.until_round((last[-1].round if last else -1) + rounds)


async def comes_back(peers: Network, peer: DemoPeer, asked: DemoPeer, trial: Trial) -> None:
    """Wait until a peer that was hurt takes part again, and check its votes."""
    started = trio.current_time()
    if not await holds(partial(works, peer, asked), BACK_SECONDS_MAX):
        halted = (await peer.client.status()).halted or f"at height {await peers.height(peer)}"
        trial.problems.append(f"{peer.name} does not participate {BACK_SECONDS_MAX:.0f} s later: {halted}")
    trial.figures["back"] = trio.current_time() - started
    _, twice = await trio.to_thread.run_sync(peers.votes, peer)
    trial.problems += [f"{peer.name} signed {slot} twice" for slot in twice]
