"""Planted bugs: each can be planted and removed. `python -m tests.sim.mutants` hunts them, with `--quick` as `.ci/run` does."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from consensus.pbft.vote_set import HeightVoteSet
from consensus.voter_set import VoterSet
from tests.sim import client_runs, curated, invariants, lineage, partitions, progress, simulation
from tests.sim.campaign import run_one
from tests.sim.mutants import LINES, MUTANTS, ChangedLine, Mutant, hunt, scenarios
from tests.sim.mutants.client_runs import LATE, LATE_ALONE
from tests.sim.mutants.curation import CURATES
from tests.sim.mutants.hunts import work
from tests.sim.mutants.lines import look
from tests.sim.mutants.planting import planted
from tests.sim.mutants.scenarios import CALM


def test_votes_of_peers_that_crash_are_opened_by_those_that_have_seals() -> None:
    simulation = dataclasses.replace(CURATES, crashes=3, seconds=3.0).simulation(4)
    assert run_one(simulation).problem == ""
    assert simulation.curated.came_about()["votes opened by their seals"] >= 3


def test_leases_are_released_and_their_tasks_are_answered_late_or_leased_again() -> None:
    found = Counter[str]()
    for seed in range(6):
        simulation = CURATES.simulation(seed)
        assert run_one(simulation).problem == ""
        found.update(simulation.curated.came_about())
    assert found["leases released"] >= 10 and found["released tasks answered"] and found["released tasks leased again"]


def test_late_steps_wait_for_a_training_job_and_begin_where_there_is_none() -> None:
    found = {scenario: Counter[str]() for scenario in (LATE, LATE_ALONE)}
    for scenario, counts in found.items():
        for seed in range(2):
            simulation = scenario.simulation(seed)
            assert run_one(simulation).problem == ""
            counts.update(simulation.client_runs.came_about())
    assert found[LATE]["blocks for which late steps waited"] >= 10 and not found[LATE]["late rounds"]
    assert found[LATE_ALONE]["late rounds"] >= 3


def test_a_job_that_ended_with_its_trainer_s_retirement_is_not_missed_when_that_one_is_back() -> None:
    simulation = scenarios.Scenario(loner="back", blocks=40).simulation(0)
    assert run_one(simulation).problem == ""
    assert simulation.progress.counts["jobs ended without a trainer"] == 1


def test_there_are_thirty_bugs_and_each_has_a_name_of_its_own() -> None:
    assert len({mutant.name for mutant in (*MUTANTS, *LINES)}) == len(MUTANTS) + len(LINES) >= 30


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_bug_can_be_planted_in_the_code_as_it_is(mutant: Mutant) -> None:
    with planted(mutant):
        pass


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.name)
def test_every_line_can_be_changed_in_the_code_as_it_is(line: ChangedLine) -> None:
    path, name = line.test.split("::")
    assert f"def {name}(" in Path(path).read_text()
    with line.planted():
        pass


def test_a_changed_line_is_noticed_by_its_test_and_is_gone_afterwards() -> None:
    line, before = LINES[0], LINES[0].function.__code__
    assert look(line.name) == {"mutant": line.name, "rule": "test", "problem": line.test, "seed": 0}
    assert line.function.__code__ is before


def test_every_bug_names_an_invariant_that_exists() -> None:
    rules = {"crash"}
    for module in (client_runs, curated, invariants, lineage, scenarios, simulation, partitions, progress):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("Violation", "Demand"):
                assert isinstance(node.args[0], ast.Constant) or module is progress  # which passes on the rule of a demand
                rules |= {str(named.value) for named in node.args[:1] if isinstance(named, ast.Constant)}
    for mutant in MUTANTS:
        assert rules.issuperset(mutant.expects), mutant.name


def test_a_bug_is_gone_when_its_history_is_over() -> None:
    before = VoterSet.__dict__["quorum"]
    assert next(mutant for mutant in MUTANTS if mutant.name == "small-quorum").run(0).rule == "certificate"
    assert VoterSet.__dict__["quorum"] is before
    assert work(("", CALM, 0))["rule"] is None


def test_a_crash_of_a_peer_fails_a_history_and_is_noticed_where_it_is_expected() -> None:
    crash = Mutant("crash", "", ("certificate",), lambda planter: planter.replace(HeightVoteSet, "pop_prepare_certificate", None))
    result = crash.run(0)
    assert result.rule == "crash" and "TypeError" in result.problem
    assert hunt(crash, 1) is None, "another invariant should have noticed it"
    caught = hunt(dataclasses.replace(crash, expects=("crash",)), 1)
    assert caught is not None and caught.rule == "crash"


@pytest.mark.real("processes")
def test_the_hunt_says_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.sim.mutants.__main__ import main

    path = tmp_path / "found.json"
    monkeypatch.setattr("sys.argv", ["mutants", "--only", "small-quorum", "--seeds-max", "2", "--json", str(path)])
    assert main() == 0
    printed = capsys.readouterr().out
    assert re.search(r"small-quorum +certificate +0", printed) and "1 caught, 0 missed; unharmed: 1 passed, 0 failed" in printed
    assert json.loads(path.read_text())["hunts"][0]["rule"] == "certificate"
