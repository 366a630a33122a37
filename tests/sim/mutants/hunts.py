"""The work of one process: one planted bug, or one history of the unchanged code."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from tests.sim.campaign import run_one
from tests.sim.mutants import MUTANTS, hunt
from tests.sim.mutants.lines import look
from tests.sim.mutants.scenarios import Scenario

Task = tuple[str, Scenario | None, int]  # (mutant, "": none; scenario, None: tests; seed or number of seeds)


def work(task: Task) -> dict[str, Any]:
    """Run one planted bug, or one history of the unchanged code, in a process of its own."""
    name, scenario, number = task
    start = time.perf_counter()
    if scenario is None:
        found = look(name)
    elif name:
        caught = hunt(next(mutant for mutant in MUTANTS if mutant.name == name), number)
        found = dataclasses.asdict(caught) if caught else {"mutant": name, "rule": None, "problem": "", "seed": number - 1}
    else:
        result = run_one(scenario.simulation(number))
        found = {"mutant": "", "rule": result.rule, "problem": result.problem, "seed": number}
    return {**found, "seconds": round(time.perf_counter() - start, 1)}
