"""Peers on links of a profile come and go without an operator: `python -m scenarios.churn --profile flaky --minutes 30`.

Four peers found the network. Every 20 seconds one comes or goes, in one of three ways:

- A newcomer joins by an invitation, and the voters approve it by their policy.
- A peer leaves and ends.
- A peer is killed (`kill -9`), and restarted in the next step.

The first two peers train, and stay.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from random import Random

import trio

from demo.demo_peers import DemoPeer
from peer.settings.data_directory import DataDirectory
from protocol.api import INVITATION_DAYS
from protocol.errors import UserError
from scenarios import network
from scenarios.emulation.link_profiles import load_profile
from scenarios.network import SMALL_JOB, Network
from scenarios.pace import STALL_SECONDS_MAX
from scenarios.proxy import running_proxy
from scenarios.trials import Trial, report, table_of

FOUNDERS, PEERS_MAX = 4, 10
STAY = 2  # founders that train and stay
EVERY_SECONDS = 20.0
LEAVE_SECONDS_MAX = 60.0  # until the leave is decided
VOTER_SECONDS_MAX = 300.0  # for a newcomer on a bad link, while others come and go
END_SECONDS_MAX = 180.0  # until all present peers hold the last height
POLL_SECONDS = 0.5
JOB = {**SMALL_JOB, "byzantine_max": "0", "audit": "off"}


@dataclass
class Crowd:
    """The peers that are present. `peers` also has those that are gone."""

    peers: Network
    dress: Callable[[DemoPeer], None]
    random: Random
    trials: list[Trial] = field(default_factory=list)
    there: list[DemoPeer] = field(default_factory=list)
    away: list[DemoPeer] = field(default_factory=list)  # killed, to be started again
    joined: dict[str, tuple[float, Trial]] = field(default_factory=dict)  # newcomers that do not vote yet, with join times
    longest: float = 0.0  # seconds without a height

    async def step(self) -> None:
        """Let one peer come or go."""
        count = len(self.there) + len(self.away)
        goes = count > FOUNDERS and (count >= PEERS_MAX or self.random.random() < 0.5)
        if self.away:
            await self._tried("comes back", self._come_back)
        elif not goes:
            await self._tried("joins", self._join)
        elif self._may_leave() and self.random.random() < 0.5:
            await self._tried("leaves", self._leave)
        else:
            await self._tried("is killed", self._kill)

    async def _tried(self, what: str, does: Callable[[Trial], Awaitable[None]]) -> None:
        self.trials.append(trial := Trial(what))
        started = trio.current_time()
        try:
            await does(trial)
        except UserError as error:
            trial.problems.append(str(error))
        trial.figures |= {"seconds": trio.current_time() - started, "there": len(self.there)}
        print(f"{len(self.trials)}. {what}: {trial.problems or trial.figures}", file=sys.stderr, flush=True)

    async def _join(self, trial: Trial) -> None:
        number = len(self.peers.peers)
        folder = self.peers.demo.folder / "peers" / str(number)
        identity = DataDirectory.create(folder).create_identity()
        newcomer = DemoPeer(number, identity, folder, trains=False, lies=False, threads=1, without_avx=False)
        self.dress(newcomer)
        trial.figures["peer"] = newcomer.name
        invitation = await self.peers.demo.watched.client.create_invitation(INVITATION_DAYS)
        self.peers.peers.append(newcomer)
        self.there.append(newcomer)
        await self.peers.restart(newcomer, "join", invitation)
        await trio.to_thread.run_sync(self.peers.record, newcomer)
        self.joined[newcomer.name] = trio.current_time(), trial

    async def _leave(self, trial: Trial) -> None:
        peer = self.random.choice(self._may_leave())
        trial.figures["peer"] = peer.name
        await peer.client.resign_as_voter()
        if not await network.holds(partial(does_not_vote, peer), LEAVE_SECONDS_MAX):
            trial.problems.append(f"{peer.name} still votes {LEAVE_SECONDS_MAX:.0f} s after it left")
        await self.peers.end(peer)
        self.there.remove(peer)

    async def _kill(self, trial: Trial) -> None:
        peer = self.random.choice(self._may_go())
        trial.figures["peer"] = peer.name
        self.peers.kill(peer)
        self.there.remove(peer)
        self.away.append(peer)

    async def _come_back(self, trial: Trial) -> None:
        peer = self.away.pop()
        trial.figures["peer"] = peer.name
        self.there.append(peer)
        await self.peers.restart(peer)

    def _may_go(self) -> list[DemoPeer]:
        return [peer for peer in self.there if peer.number >= STAY]

    def _may_leave(self) -> list[DemoPeer]:
        """Return the peers that can leave. A peer that has just joined may not be a member yet."""
        return [peer for peer in self._may_go() if peer.name not in self.joined]

    async def look(self) -> None:
        """Check in a loop that heights keep coming and that newcomers vote."""
        height, since = -1, trio.current_time()
        while True:
            now = trio.current_time()
            if (reached := await self.peers.height(self.peers.demo.watched)) > height:
                height, since = reached, now
            self.longest = max(self.longest, now - since)
            for peer in [peer for peer in self.there if peer.name in self.joined]:
                begun, trial = self.joined[peer.name]
                if not await does_not_vote(peer):
                    trial.figures["votes after"] = now - begun
                    del self.joined[peer.name]
                elif now - begun > VOTER_SECONDS_MAX:
                    trial.problems.append(f"{peer.name} does not vote {VOTER_SECONDS_MAX:.0f} s after it joined")
                    del self.joined[peer.name]
            await trio.sleep(POLL_SECONDS)

    async def agree(self) -> bool:
        """Return whether all present peers soon hold the height that the first one has now."""
        wanted = await self.peers.height(self.peers.demo.watched)

        async def reached() -> bool:
            return all([await self.peers.height(peer) >= wanted for peer in self.there])

        return await network.holds(reached, END_SECONDS_MAX)


async def does_not_vote(peer: DemoPeer) -> bool:
    try:
        return not (await peer.client.status()).voter
    except UserError:  # it has ended meanwhile
        return True


async def run(options: argparse.Namespace) -> int:
    async with running_proxy(load_profile(options.profile)) as proxy:

        def dress(peer: DemoPeer) -> None:
            peer.trains = peer.number < STAY
            peer.evaluates = False
            peer.environment["PEER_APPROVE_INVITED"] = "1000"
            proxy.dress(peer)

        running = network.running(FOUNDERS, seed=options.seed, folder=options.keep, dress=dress)
        async with running as peers, trio.open_nursery() as nursery:
            crowd = Crowd(peers, dress, Random(options.seed), there=list(peers.peers))
            await peers.train(JOB)
            nursery.start_soon(crowd.look)
            first, end = await peers.height(peers.demo.watched), time.monotonic() + 60 * options.minutes
            while time.monotonic() < end and crowd.longest < STALL_SECONDS_MAX:
                next_at = trio.current_time() + EVERY_SECONDS
                await crowd.step()
                await trio.sleep_until(next_at)
            agreed = await crowd.agree()
            heights = await peers.height(peers.demo.watched) - first
            nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(peers.stop)
            failures = [f"{trial.what}: {problem}" for trial in crowd.trials for problem in trial.problems] + peers.failures()
    if not agreed:
        failures.append(f"{END_SECONDS_MAX:.0f} s after the last join or departure, the peers have different heights")
    if crowd.longest >= STALL_SECONDS_MAX:
        failures.append(f"no height for {crowd.longest:.0f} s")
    took = f"{options.minutes:g} minutes: {heights} heights, at most {crowd.longest:.1f} s without one"
    title = f"profile {options.profile}, {took}; seconds"
    result = {
        "heights": heights,
        "longest_seconds": crowd.longest,
        "trials": [asdict(trial) for trial in crowd.trials],
    }
    return report(options, title, *table_of(crowd.trials), failures, result)
