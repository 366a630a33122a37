"""Liars: each is tolerated, no honest peer is ever thrown out, and whoever leaves proof is expelled."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.sim.campaign import run_one
from tests.sim.invariants import faults_tolerated
from tests.sim.plan import calm, expand
from tests.sim.simulation import Simulation
from tests.sim.strategies import HONEST_MAJORITY, STRATEGIES

SHORT = 8  # blocks
PROVEN = {name for name, strategy in STRATEGIES.items() if strategy.leaves_proof} - {"withheld-lock", "fork"}
TRIED = 12  # seeds in which a liar may happen not to lie


def lied_to(name: str, seed: int) -> Simulation:
    """The trouble of an ordinary seed, and one liar."""
    plan = expand(seed)
    return Simulation(replace(plan, faults=(*plan.faults, replace(calm(liars=(name,)).faults[0], number=99)), blocks=SHORT))


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_kind_of_liar_says_in_one_line_what_it_does(name: str) -> None:
    text = STRATEGIES[name].__doc__
    assert text is not None and "\n" not in text and text.endswith(".")


def test_no_two_strategies_are_the_same() -> None:
    assert len(set(STRATEGIES.values())) == len(STRATEGIES) >= 20


@pytest.mark.long
@pytest.mark.parametrize("name", HONEST_MAJORITY)
def test_every_kind_of_liar_is_tolerated_and_expelled_if_it_leaves_proof(name: str) -> None:
    def is_expelled(seed: int) -> bool:
        simulation = lied_to(name, seed)
        assert run_one(simulation).problem == ""
        node = simulation.honest[0].node
        return node is not None and node.state.members.is_expelled(simulation.peers[0].key)

    seeds = range(1, 1 + TRIED)
    assert is_expelled(seeds[0]) or name not in PROVEN or any(map(is_expelled, seeds[1:]))


def test_two_liars_of_seven_are_tolerated_together() -> None:
    names = ("two-blocks", "forged-timeouts")
    assert len(names) == faults_tolerated(7)
    plan = replace(expand(2, 7), blocks=SHORT)
    liars = calm(liars=names).faults
    faults = (*plan.faults, *(replace(fault, number=90 + fault.number) for fault in liars))
    assert run_one(Simulation(replace(plan, faults=faults))).problem == ""
