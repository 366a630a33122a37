"""How a bug gets into the production code for the length of one history, and what counts as noticing it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from tests.packages import PACKAGES
from tests.sim.campaign import Result, run_one
from tests.sim.mutants.scenarios import CALM, Scenario
from tests.sim.simulation import Simulation


class Planter:
    """Replaces names in the production code until the history is over."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self.changes: list[Callable[[Simulation], None]] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
        self._stack.enter_context(mock.patch.object(owner, name, value))

    def everywhere(self, function: Any, value: Any) -> None:
        """In each module of the production code that has imported it; the checker keeps the right one."""
        for module in [module for key, module in sys.modules.items() if key.split(".")[0] in PACKAGES]:
            for name in [name for name, held in vars(module).items() if held is function]:
                self.replace(module, name, value)

    def simulation(self, change: Callable[[Simulation], None]) -> None:
        """For what the daemon around a node does wrong."""
        self.changes.append(change)


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    what: str  # the rule it breaks, for people
    expects: tuple[str, ...]  # invariants, any of which says so
    plant: Callable[[Planter], None] = field(repr=False)
    scenario: Scenario = CALM

    def run(self, seed: int) -> Result:
        with planted(self) as planter:
            simulation = self.scenario.simulation(seed)
            for change in planter.changes:
                change(simulation)
            return run_one(simulation)


@contextlib.contextmanager
def planted(mutant: Mutant) -> Iterator[Planter]:
    with contextlib.ExitStack() as stack:
        planter = Planter(stack)
        mutant.plant(planter)
        yield planter


@dataclass(frozen=True, slots=True)
class Caught:
    mutant: str
    rule: str
    problem: str
    seed: int


def hunt(mutant: Mutant, seeds: int) -> Caught | None:
    """The first seed at which an expected invariant fires. One that just crashes, or breaks something else, is not."""
    for seed in range(seeds):
        result = mutant.run(seed)
        if result.rule in mutant.expects:
            return Caught(mutant.name, result.rule, result.problem, seed)
    return None
