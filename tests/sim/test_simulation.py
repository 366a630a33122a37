from __future__ import annotations

from collections.abc import Callable

import pytest

from consensus.voters import VoterSet
from tests.sim import mutants, simulation
from tests.sim.__main__ import SIZES, run_seed
from tests.sim.invariants import Violation
from tests.sim.simulation import CALM, Simulation, Trouble
from tests.sim.strategies import LIARS, equivocator, silent

SEEDS_UNTIL_CAUGHT = 60
ROUGH = Trouble(delay=(0.005, 0.6), loss=0.15, crash=0.8, partition=0.3, sync=(0.0, 0.2))


@pytest.mark.parametrize("seed", range(3 * len(SIZES)))
def test_networks_in_trouble_agree_and_go_on(seed: int) -> None:
    assert run_seed(seed) is None


@pytest.mark.parametrize("liar", LIARS, ids=lambda liar: liar.__name__)
def test_every_kind_of_liar_is_tolerated(liar: simulation.Strategy) -> None:
    for seed in range(4):
        Simulation(seed, n=4, liars=(liar,), trouble=ROUGH).run()
    Simulation(9, n=7, liars=(liar, silent), trouble=ROUGH).run()


def test_the_same_seed_gives_the_same_run() -> None:
    first, second = Simulation(5), Simulation(5)
    first.run()
    second.run()
    assert (first.sent, first.now, first.invariants.decided) == (second.sent, second.now, second.invariants.decided)


def test_an_equivocator_is_accused_by_every_kind_of_proof_that_reaches_it() -> None:
    calm = Simulation(1, n=4, liars=(equivocator,), trouble=CALM)
    calm.run()
    liar = next(node for node in calm.nodes.values() if node.strategy is equivocator)
    assert {evidence.culprit for node in calm.honest for evidence in node.journal.evidence} == {liar.key}


def is_caught(start: Callable[[int], Simulation]) -> bool:
    for seed in range(SEEDS_UNTIL_CAUGHT):
        try:
            start(seed).run()
        except Violation:
            return True
    return False


@pytest.mark.parametrize(
    "mutant", [mutants.ForgetsCertificates, mutants.VotesAfterTimeout, mutants.ForgetsVotes, mutants.IgnoresJustification]
)
def test_a_replica_that_breaks_a_rule_is_caught(mutant: type) -> None:
    assert is_caught(lambda seed: Simulation(seed, n=4, liars=(equivocator,) if seed % 2 else (), trouble=ROUGH, replica=mutant))


def test_a_quorum_that_is_one_too_small_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VoterSet, "quorum", property(mutants.small_quorum))
    assert is_caught(lambda seed: Simulation(seed, n=4, liars=(equivocator,), trouble=ROUGH))


def test_sending_before_it_is_durable_is_caught() -> None:
    assert is_caught(lambda seed: Simulation(seed, n=4, liars=(), trouble=ROUGH, sends_before_sync=True))


def test_the_unharmed_replica_passes_where_the_mutants_are_caught() -> None:
    for seed in range(10):
        Simulation(seed, n=4, liars=(equivocator,) if seed % 2 else (), trouble=ROUGH).run()
