"""`python -m scenarios.churn --peers 7 --rounds 1000`: a thousand rounds beside f liars, while peers are killed and replaced.

Every few rounds an honest peer is killed at a random moment and restarted seconds later, or it leaves, loses its disk and joins
again. For every round, all honest peers that hold it must have the same model root, and at least two must hold it.

With `--profile flaky --minutes 30`, links are bad, and peers come and go (`coming.py`).

Beside f liars, each peer that is down exceeds the tolerated faults. The liars lie only in updates and ballots, so the network
still makes progress. This scenario checks that no peer ever holds another model.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from random import Random

import trio

from consensus.voter_set import faults_tolerated
from demo.lying_trainer import ATTACKS
from peer.commands.definitions.job_commands import PRESETS, preset_overrides
from scenarios import coming, network, rolling
from scenarios.network import Network
from scenarios.pace import STALL_SECONDS_MAX, comes_back, goes_on, in_order
from scenarios.trials import COUNT, Attempt, Trial, arguments, conduct, duration

QUIET_ROUNDS_MAX = 30  # rounds between two events
DOWN_SECONDS_MAX = 5.0
KILLS = 4  # kills for each replacement
BEHIND_ROUNDS_MAX = 100  # rounds that others may have closed before they are asked
HOLDERS_MIN = 2  # peers that are needed for a comparison


class Churn:
    """Attempts until enough rounds are closed or the network is stuck."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._random, self._rounds = Random(options.seed), options.rounds
        self._roots: dict[int, dict[str, str]] = {}  # round -> honest peer -> model root
        self.closed = 0

    def attempts(self) -> Iterator[tuple[str, Attempt]]:
        while self.closed < self._rounds:
            yield ("replaced", self._replace) if self._random.randrange(KILLS + 1) == 0 else ("killed", self._kill)

    async def _kill(self, peers: Network, trial: Trial) -> None:
        victim = self._random.choice(peers.honest)
        asked = next(peer for peer in peers.honest if peer is not victim)
        with trio.fail_after(STALL_SECONDS_MAX):
            await in_order(peers)
        await trio.sleep(self._random.uniform(0, 1))
        peers.kill(victim)
        trial.figures |= {"peer": victim.name, "down": (down := self._random.uniform(0, DOWN_SECONDS_MAX))}
        await trio.sleep(down)
        await peers.restart(victim)
        await comes_back(peers, victim, asked, trial)
        await self._quiet(peers, trial)

    async def _replace(self, peers: Network, trial: Trial) -> None:
        await rolling.wipe(peers.peers.index(self._random.choice(peers.honest)), peers, trial)
        await self._quiet(peers, trial)

    async def _quiet(self, peers: Network, trial: Trial) -> None:
        asked = peers.demo.watched
        await goes_on(asked, 1 + self._random.randrange(QUIET_ROUNDS_MAX))
        (last,) = await asked.client.rounds(1)
        first, self.closed = self.closed, last.round + 1
        trial.figures["rounds"] = self.closed - first
        for peer in peers.honest:
            for view in await peer.client.rounds(self.closed - first + BEHIND_ROUNDS_MAX):
                self._roots.setdefault(view.round, {})[peer.name] = view.model_root
        trial.problems += self._doubts(first)

    def _doubts(self, first: int) -> list[str]:
        unequal = [number for number, roots in self._roots.items() if number < self.closed and len(set(roots.values())) > 1]
        alone = [number for number in range(first, self.closed) if len(self._roots.get(number, ())) < HOLDERS_MIN]
        return [f"honest roots differ after round {number}" for number in unequal] + [
            f"fewer than {HOLDERS_MIN} honest peers have round {number}" for number in alone
        ]


def main() -> int:
    parser = arguments("churn", __doc__)
    parser.add_argument("--rounds", type=COUNT, default=1000, metavar="N", help="rounds of the job")
    parser.add_argument("--preset", choices=PRESETS, default="local", help="preset of the job")
    parser.add_argument(
        "--profile", metavar="NAME", help="profile of the links, or a trace file: peers leave and return, without liars"
    )
    parser.add_argument("--minutes", type=duration, default=30.0, metavar="M", help="minutes of a run with --profile")
    parser.add_argument("--attack", choices=ATTACKS, default="sign-flip", help="attack of the f liars in every round")
    options = parser.parse_args()
    if options.profile:
        return network.main(partial(coming.run, options))
    churn, liars = Churn(options), faults_tolerated(options.peers)
    return network.main(
        partial(
            conduct,
            options,
            f"{options.rounds} rounds with churn, {liars} liars ({options.attack}), preset {options.preset}",
            churn.attempts(),
            job=preset_overrides(options.preset, {}),
            malicious=liars,
            attack=options.attack,
        )
    )


if __name__ == "__main__":
    sys.exit(main())
