"""Planted bugs: each breaks one rule of the production code, and an invariant must notice within some seeds.

`python -m tests.sim.mutants --list` names them, `--only NAME` hunts one; without either, all are hunted, and every seed that
caught one is run again on the unharmed code, where it must pass.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from consensus.quorum import quorum
from consensus.turn import Restart
from consensus.voters import VoterSet
from tests.sim import campaign, disk
from tests.sim.campaign import Result, run_one
from tests.sim.simulation import Simulation

SEEDS_MAX = 2_000  # a bug that stays unnoticed for so many histories counts as missed


class Planter:
    """Replaces names in the production code until the history is over."""

    def __init__(self, stack: contextlib.ExitStack, simulation: list[Callable[[Simulation], None]]) -> None:
        self._stack, self._simulation = stack, simulation

    def replace(self, owner: Any, name: str, value: Any) -> None:
        self._stack.enter_context(mock.patch.object(owner, name, value))

    def simulation(self, change: Callable[[Simulation], None]) -> None:
        """For what the daemon around a node does wrong."""
        self._simulation.append(change)


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    what: str  # the rule it breaks, for people
    plant: Callable[[Planter], None]
    kind: str = "seeds"  # of histories that show it: seeds, twins or partitions
    n: int | None = None

    def run(self, seed: int) -> Result:
        changes: list[Callable[[Simulation], None]] = []
        with contextlib.ExitStack() as stack:
            self.plant(Planter(stack, changes))
            simulation = campaign.prepare(self.kind, seed, self.n)
            for change in changes:
                change(simulation)
            return run_one(simulation)


@dataclass(frozen=True, slots=True)
class Caught:
    mutant: Mutant
    seed: int
    rule: str
    is_clean: bool  # the same seed passes on the unharmed code


def hunt(mutant: Mutant, seeds: int = SEEDS_MAX) -> Caught | None:
    for seed in range(seeds):
        rule = mutant.run(seed).rule
        if rule is not None:
            clean = run_one(campaign.prepare(mutant.kind, seed, mutant.n)).rule is None
            return Caught(mutant, seed, rule, clean)
    return None


# The bugs ------------------------------------------------------------------------------------------------------------


def _small_quorum(planter: Planter) -> None:
    planter.replace(VoterSet, "quorum", property(lambda voters: quorum(len(voters)) - 1))


def _sends_before_sync(planter: Planter) -> None:
    def change(simulation: Simulation) -> None:
        simulation.sends_before_sync = True

    planter.simulation(change)


def _forgets_votes(planter: Planter) -> None:
    load = disk.Disk.load

    def forgetful(self: disk.Disk) -> Restart:
        return Restart(load(self).decided)

    planter.replace(disk.Disk, "load", forgetful)


MUTANTS: tuple[Mutant, ...] = (
    Mutant("small-quorum", "a quorum is one voter too small", _small_quorum),
    Mutant("sends-before-sync", "messages leave before the turn is durable", _sends_before_sync),
    Mutant("forgets-votes", "a restarted peer knows nothing of what it signed", _forgets_votes),
)


# The hunt ------------------------------------------------------------------------------------------------------------


def _hunts(names: list[str], seeds: int) -> Iterator[bool]:
    for mutant in MUTANTS:
        if names and mutant.name not in names:
            continue
        caught = hunt(mutant, seeds)
        if caught is None:
            print(f"{mutant.name:28} NOT CAUGHT in {seeds} seeds", flush=True)
        else:
            clean = "passes unharmed" if caught.is_clean else "FAILS UNHARMED"
            print(f"{mutant.name:28} seed {caught.seed:<5} {caught.rule:18} {clean}", flush=True)
        yield caught is not None and caught.is_clean


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.mutants", description=__doc__)
    parser.add_argument("--list", action="store_true", help="the planted bugs")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", choices=[mutant.name for mutant in MUTANTS])
    parser.add_argument("--seeds", type=int, default=SEEDS_MAX, metavar="N", help=f"histories at most for each ({SEEDS_MAX})")
    options = parser.parse_args()
    if options.list:
        for mutant in MUTANTS:
            print(f"{mutant.name:28} {mutant.what}")
        return 0
    results = list(_hunts(options.only, options.seeds))
    print(f"{sum(results)} caught, {len(results) - sum(results)} missed")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
