"""Whole histories: they hold, are reproducible, and notice violations."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest

from tests.sim import campaign, partitions, twins
from tests.sim.invariants import quorum
from tests.sim.plan import Fault, calm, expand, faults_tolerated, first_draws
from tests.sim.simulation import Simulation
from tests.sim.strategies import HONEST_MAJORITY

FORK_SEEDS = 6
SHORT = 12  # blocks
FIRST_LIARS = tuple(name for name in HONEST_MAJORITY if name not in ("far-timeouts", "forged-names"))  # of those seeds


# The later seeds failed once, for these reasons:
# - a view at its cap behind a dead leader;
# - a wrong model in a round that was given to others;
# - a commit and a timeout that a crash left unsent;
# - a slow clock beside a liar (two seeds);
# - a ballot known only to one voter and one observer, and observers are not asked;
# - a ballot that all its receivers forgot together before they were asked.
# Seed 17134 had clocks an hour ahead among three voters, one of them sick. Three voters tolerate no fault, so `tests.sim.plan`
# sets the clocks right.
@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1301, 806, 593, 330, 2939, 12527, 14235, 17134])
def test_networks_in_trouble_agree_and_go_on(seed: int) -> None:
    assert campaign.run_one(Simulation(first_draws(seed, 4, FIRST_LIARS))).problem == ""


# In 179 a voter leaves, and applies again. In 1177 all return in the middle of a round, and lose the disk of a trainer whose
# proposal they accept. In 771073 a voter changes its key in a round and proposes with both keys.
# In 6000358 a voter leaves, is retired as a candidate, and votes again when one more voter wants it retired.
# In 6023480 a voter is retired, casts its last ballot late, and votes again fourteen rounds after it.
# In 2715 a voter is retired and approved anew in the last block in which its approvals are enough: one more voter comes.
# Client runs were drawn later, and would change the last two.
@pytest.mark.parametrize("seed", [179, 1177, 2715, 771073, 6000358, 6023480])
def test_networks_with_all_that_is_drawn_agree_and_go_on(seed: int) -> None:
    assert campaign.run_one(Simulation(expand(seed, 4, HONEST_MAJORITY, gateways=()))).problem == ""


def test_networks_with_client_runs_agree_and_their_steps_come_to_their_ends() -> None:
    counts = Counter[str]()
    for seed in (6000358, 6023480):
        result = campaign.run_one(campaign.prepare("seeds", seed, 4))
        assert result.problem == ""
        counts.update(result.faults)
    assert counts["steps accepted"] and counts["checkpoints saved"] and counts["attempts at runs"]


def test_voters_that_come_back_in_the_middle_of_a_round_cut_it_off_by_what_they_measure_in_it() -> None:
    """Two of three return, and f + 1 cut-offs are needed. With their first guess of 10 s a proposal it would take two minutes."""
    assert campaign.run_one(campaign.keeping(campaign.prepare("seeds", 765, 4), range(1, 15))).problem == ""


def test_a_network_of_seven_with_two_liars_agrees_and_goes_on() -> None:
    seed = next(seed for seed in range(1, 50) if len(expand(seed, 7, HONEST_MAJORITY).liars) == 2)
    assert campaign.run_one(Simulation(replace(expand(seed, 7, HONEST_MAJORITY), blocks=SHORT))).problem == ""


@pytest.mark.real("processes")
def test_the_same_seed_gives_the_same_history_whatever_the_order_of_sets() -> None:
    """The order of a set of strings differs in each process."""
    program = "from tests.sim import campaign; print(campaign.run_one(campaign.prepare('seeds', 5, 4)).history)"
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    done = subprocess.run((sys.executable, "-c", program), env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == campaign.run_one(campaign.prepare("seeds", 5, 4)).history


def test_what_peers_share_to_save_time_changes_nothing() -> None:
    plan = replace(expand(3, 4, HONEST_MAJORITY), blocks=SHORT)
    shared, alone = (campaign.run_one(Simulation(replace(plan, shares=shares))) for shares in (True, False))
    assert shared.problem == alone.problem == ""
    assert shared.history == alone.history


def test_real_signatures_hold_too() -> None:
    assert campaign.run_one(Simulation(replace(expand(4), blocks=SHORT, ed25519=True, shares=False))).problem == ""


# Enough liars -----------------------------------------------------------------------------------------------------------


def forks(seed: int, n: int, colluders: int) -> str | None:
    return campaign.run_one(Simulation(calm(seed, n, ("fork",) * colluders, blocks=6, jobs=False))).rule


@pytest.mark.parametrize("n", [4, 7])
def test_as_many_colluders_as_two_quorums_may_share_break_agreement(n: int) -> None:
    enough = 2 * quorum(n) - n
    assert enough == faults_tolerated(n) + 1
    assert {forks(seed, n, enough) for seed in range(2)} <= {"agreement", "one certificate"}


@pytest.mark.parametrize("n", [4, 7])
def test_one_colluder_less_breaks_nothing(n: int) -> None:
    for seed in range(FORK_SEEDS):
        assert forks(seed, n, 2 * quorum(n) - n - 1) is None


def test_who_proposes_two_blocks_is_expelled() -> None:
    simulation = Simulation(calm(1, liars=("two-blocks",)))
    simulation.run()
    liar, honest = simulation.peers[0], simulation.honest[0]
    assert honest.node is not None and liar.key not in honest.node.state.members.voters
    assert honest.node.state.members.is_expelled(liar.key)


@pytest.mark.parametrize("n", [4, 7])
def test_liars_that_choose_what_their_blocks_show_lead_as_often_as_others(n: int) -> None:
    simulation = Simulation(calm(2, n, ("turn-thief",) * faults_tolerated(n), blocks=6 * n))
    simulation.run()
    liars = {peer.key for peer in simulation.peers[: faults_tolerated(n)]}
    made = [decided.decode().proposer for decided in simulation.honest[0].disk.decided.values()]
    laps = -(-len(made) // n)
    assert 5 * len(liars) <= sum(proposer in liars for proposer in made) <= laps * len(liars)


# Twins and partitions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_two_machines_with_one_key_break_nothing(seed: int) -> None:
    assert campaign.run_one(campaign.prepare("twins", seed, 4)).problem == ""


def test_twins_contradict_each_other_at_once_or_at_a_later_height() -> None:
    plans = [twins.expand(seed, 4) for seed in range(24)]
    assert {int(plan.of("twin")[0].amount) for plan in plans} == {1, *twins.LATER_HEIGHTS}
    late = twins.simulation(plans[0])
    late.run()
    expelled = late.decided_state.members.members[late.peers[0].key].expelled
    assert expelled is not None and expelled >= plans[0].of("twin")[0].amount > 5


def test_too_many_twins_are_noticed() -> None:
    """Scenarios can fail: with more twins than tolerated liars, an honest peer decides another block."""

    def rule(seed: int) -> str | None:
        return campaign.run_one(twins.simulation(twins.expand(seed, 4, twins=2))).rule

    assert any(rule(seed) in ("agreement", "one certificate") for seed in range(20))


@pytest.mark.parametrize("seed", range(4))
def test_split_networks_do_not_fork_and_heal_within_three_heights(seed: int) -> None:
    assert campaign.run_one(partitions.simulation(partitions.expand(seed, 4))).problem == ""


# Honest peers that count among the f ---------------------------------------------------------------------------------------


def sick(kind: str, detail: str = "") -> Simulation:
    """Return a plan in which peer 2 alone has a fault, two virtual seconds after the start."""
    simulation = Simulation(calm(3, faults=(Fault(0, kind, 2.0, 2.5, (2,), 0.5, detail),), heal_at=3.0))
    simulation.run()
    return simulation


@pytest.mark.parametrize("what", ["counter", "model"])
def test_a_peer_whose_state_is_wrong_restores_the_certified_one_and_votes_again(what: str) -> None:
    simulation = sick("wrong-state", what)
    peer, last = simulation.peers[2], simulation.height
    assert simulation.counts["wrong-state"] == simulation.counts["restored"] == 1
    assert peer.node is not None and peer.node.replica.divergence is None and not peer.is_wrong
    certificates = [simulation.peers[0].disk.decided[height].certificate for height in range(last - 10, last + 1)]
    assert any(peer.key in certificate.signatures for certificate in certificates)


def test_a_peer_whose_disk_is_damaged_stays_down_and_the_others_go_on() -> None:
    simulation = sick("damage")
    peer = simulation.peers[2]
    assert peer.is_lost and peer.node is None
    assert {other.number for other in simulation.expected} == {0, 1, 3}


# Snapshots --------------------------------------------------------------------------------------------------------------


def test_a_late_joiner_takes_over_a_snapshot_and_votes() -> None:
    plan = calm(2, joiners=1, faults=(Fault(0, "join", 7.0, 7.0, (4,)),), heal_at=9.0, work=2.0)
    simulation = Simulation(plan)
    simulation.run()
    joiner = simulation.peers[4]
    assert simulation.counts["restored"] == 1
    assert 1 not in joiner.disk.decided and joiner.height >= plan.blocks
    assert joiner.node is not None and joiner.node.replica.is_voter
