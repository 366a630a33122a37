"""Planting of a bug in the production code for one history, and the conditions under which it counts as noticed."""

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
    """Replacements of names in the production code until the history is over."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack

    def replace(self, owner: Any, name: str, value: Any) -> None:
        self._stack.enter_context(mock.patch.object(owner, name, value))

    def enter(self, planted: contextlib.AbstractContextManager[Any]) -> None:
        """Plant what lasts until the context manager exits."""
        self._stack.enter_context(planted)

    def everywhere(self, function: Any, value: Any) -> None:
        """Replace a name in each production module that has imported it. The checker keeps the right one."""
        for module in [module for key, module in sys.modules.items() if key.split(".")[0] in PACKAGES]:
            for name in [name for name, held in vars(module).items() if held is function]:
                self.replace(module, name, value)


Plant = Callable[[Planter], None]


def replaced(owner: Any, name: str, value: Any) -> Plant:
    """Return the bug that replaces one value. As a decorator above the replacement: `@partial(replaced, owner, name)`."""
    return lambda planter: planter.replace(owner, name, value)


def wrapped(owner: Any, name: str, value: Callable[..., Any]) -> Plant:
    """Return the bug that wraps a function: the wrapper's first argument is the right function."""

    def plant(planter: Planter) -> None:
        real = getattr(owner, name)
        planter.replace(owner, name, lambda *arguments, **named: value(real, *arguments, **named))

    return plant


def everywhere(function: Any, value: Any) -> Plant:
    return lambda planter: planter.everywhere(function, value)


def together(*plants: Plant) -> Plant:
    def plant(planter: Planter) -> None:
        for each in plants:
            each(planter)

    return plant


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    what: str  # the rule it breaks, for people
    expects: tuple[str, ...]  # invariants, any of which may notice it
    plant: Plant = field(default=lambda planter: None, repr=False)
    scenario: Scenario = CALM
    change: Callable[[Simulation], None] = field(default=lambda simulation: None, repr=False)  # of the daemons around the nodes

    def run(self, seed: int) -> Result:
        with planted(self):
            simulation = self.scenario.simulation(seed)
            self.change(simulation)
            return run_one(simulation)


@contextlib.contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        mutant.plant(Planter(stack))
        yield


@dataclass(frozen=True, slots=True)
class Caught:
    mutant: str
    rule: str
    problem: str
    seed: int


def hunt(mutant: Mutant, seeds: int) -> Caught | None:
    """Return the first seed at which an expected invariant fires. A crash or another violation does not count."""
    for seed in range(seeds):
        result = mutant.run(seed)
        if result.rule in mutant.expects:
            return Caught(mutant.name, result.rule, result.problem, seed)
    return None
