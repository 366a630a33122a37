"""Liars: each is tolerated, no honest peer is ever expelled, and a liar that leaves proof is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ledger.audits import sortition
from ledger.audits.audit_state import MemberAuditRecord
from tests.sim.audits import (
    Auditor,
    Challenges,
    Cheats,
    Claims,
    Colludes,
    Distrusts,
    Frames,
    Hides,
    Passes,
    ShowsSome,
    Shut,
    Withholds,
)
from tests.sim.campaign import run_one
from tests.sim.invariants import faults_tolerated
from tests.sim.plan import calm, expand
from tests.sim.simulation import Simulation
from tests.sim.strategies import HONEST_MAJORITY, STRATEGIES, Strategy

SHORT = 8  # blocks
PROVEN = {name for name, strategy in STRATEGIES.items() if strategy.leaves_proof} - {"withheld-lock", "fork"}
TRIED = 12  # seeds in which a liar may happen not to lie


def lied_to(name: str, seed: int) -> Simulation:
    """Return the faults of an ordinary seed, with one liar."""
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
    faults = (*plan.faults, *(replace(fault, number=90 + fault.number) for fault in calm(liars=names).faults))
    assert run_one(Simulation(replace(plan, faults=faults))).problem == ""


# Audits ---------------------------------------------------------------------------------------------------------------


SAMPLED_SEED = 1  # its job is one with sampled audits
BLOCKS = 70
ONE_AND_TWO = [(4, 1), pytest.param(7, 2, marks=pytest.mark.large)]  # cases in which each of two liars acts as if alone


def run(
    lies: type[Auditor],
    n: int = 4,
    liars: int = 1,
    blocks: int = BLOCKS,
    honest: type[Auditor] = Auditor,
    slowness: float = 0.0,
    seed: int = SAMPLED_SEED,
) -> tuple[Simulation, list[MemberAuditRecord], list[MemberAuditRecord]]:
    """Return the standings of the liars and of the others. Invariants are checked after every block."""
    simulation = Simulation(calm(seed, n, ("but for audits",) * liars, blocks=blocks), {"but for audits": Strategy})
    keys = tuple(peer.key for peer in simulation.peers if not peer.is_honest)
    for peer in simulation.peers:
        peer.author.auditor = honest() if peer.is_honest else lies(keys)
        peer.author.slowness = slowness
    simulation.run()
    node = simulation.honest[0].node
    assert node is not None
    standings = {peer.key: node.state.audits.member_records.get(peer.key, MemberAuditRecord()) for peer in simulation.peers}
    assert sum(standing.reports for standing in standings.values()) > 10
    return simulation, [standings[key] for key in keys], [standing for key, standing in standings.items() if key not in keys]


# In seventy blocks of seed 1 one of the two liars is drawn too rarely.
@pytest.mark.parametrize(
    ("lies", "n", "liars", "seed"), [(Cheats, 4, 1, SAMPLED_SEED), pytest.param(Colludes, 7, 2, 4, marks=pytest.mark.large)]
)
def test_who_cheats_in_half_of_its_proposals_is_suspended(lies: type[Auditor], n: int, liars: int, seed: int) -> None:
    _, of_liars, of_honest = run(lies, n, liars, seed=seed)
    assert all(standing.suspensions and standing.rewards_lost for standing in of_liars)
    assert not any(standing.suspensions or standing.refuted for standing in of_honest)
    assert sum(standing.upheld for standing in of_honest) >= liars


def test_whose_link_is_nearly_as_slow_as_is_allowed_is_not_suspended_and_passes() -> None:
    _, _, of_honest = run(Claims, slowness=0.95)
    assert not any(standing.suspensions or standing.refuted for standing in of_honest)
    assert all(standing.reports for standing in of_honest) and sum(standing.rewards for standing in of_honest)


@pytest.mark.parametrize(
    ("lies", "n", "liars", "blocks"),
    [(Hides, 4, 1, BLOCKS), (ShowsSome, 4, 1, BLOCKS), pytest.param(ShowsSome, 7, 2, 110, marks=pytest.mark.large)],
)
def test_who_shows_nothing_or_its_proposals_to_some_is_suspended(lies: type[Auditor], n: int, liars: int, blocks: int) -> None:
    _, of_liars, of_honest = run(lies, n, liars, blocks, slowness=0.3)
    assert all(standing.suspensions for standing in of_liars)
    assert not any(standing.suspensions or standing.refuted for standing in of_honest)


@pytest.mark.parametrize(("n", "liars"), ONE_AND_TWO)
def test_who_challenges_everybody_is_refuted_and_suspends_nobody(n: int, liars: int) -> None:
    _, of_liars, of_honest = run(Challenges, n, liars)
    assert sum(standing.refuted for standing in of_liars) >= liars
    assert not any(standing.suspensions or standing.refuted for standing in of_honest)


def test_volunteers_have_cheats_suspended_where_nothing_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sortition, "audit_rate_of_round", lambda *_: 0.0)
    _, of_liars, of_honest = run(Colludes, 7, 2, honest=Distrusts, seed=4)
    assert all(standing.suspensions for standing in of_liars)
    assert not any(standing.suspensions or standing.refuted for standing in of_honest)
    assert sum(standing.upheld for standing in of_honest) >= 2


@pytest.mark.parametrize(("n", "liars"), ONE_AND_TWO)
def test_who_passes_everybody_without_replaying_is_suspended_within_twenty_audits(n: int, liars: int) -> None:
    _, of_liars, of_honest = run(Passes, n, liars)
    assert all(standing.suspensions and standing.rewards_lost and standing.wrong_losses <= 20 for standing in of_liars)
    assert not any(standing.suspensions or standing.refuted or standing.wrong_losses for standing in of_honest)


def test_who_opens_false_losses_has_nobody_suspended() -> None:
    _, (liar,), of_honest = run(Frames)
    assert sum(standing.wrong_losses for standing in of_honest) > 2
    assert not any(standing.suspensions for standing in (liar, *of_honest))


def test_who_never_opens_its_loss_loses_rewards_and_is_not_suspended() -> None:
    _, (liar,), of_honest = run(Shut)
    assert liar.rewards_lost > min(standing.rewards_lost for standing in of_honest) and not liar.suspensions
    assert not any(standing.suspensions or standing.wrong_losses for standing in of_honest)


def test_who_reports_nothing_and_reveals_nothing_is_not_drawn_and_not_waited_for() -> None:
    simulation, (liar,), of_honest = run(Withholds)
    assert liar.reports == 0 and liar.rewards > 0
    assert all(standing.reports for standing in of_honest)
    assert simulation.counts.get("dropped wrong-round") is None
