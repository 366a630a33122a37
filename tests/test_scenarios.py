"""The scenarios themselves, small: real processes over real sockets."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

import pytest

from demo.demo_peers import DemoPeer
from protocol.api import EventView
from protocol.errors import UserError
from protocol.identity import Identity
from protocol.verdicts import Verdict
from scenarios import bad_input, crash_points, determinism, idle, kill, large, pace, rollback
from scenarios.__main__ import scenarios
from scenarios.crash_points import UNREACHED
from scenarios.network import Watch
from storage.crash_points import POINTS
from training.transformer import ModelSpec


@pytest.mark.real("processes")
@pytest.mark.large  # tests/rlhf/test_daemons.py kills one of four, too; tests/sim searches for contradicting votes
async def test_a_killed_peer_comes_back_and_has_signed_nothing_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "NORMAL_ROUNDS", 2)
    monkeypatch.setattr(kill, "DOWN_ROUNDS", kill.LATER + 1)
    report = tmp_path / "kill.json"
    await kill.run(
        argparse.Namespace(peers=4, malicious=0, trials=1, seed=1, small=True, keep=tmp_path / "peers", json=str(report))
    )
    found = json.loads(report.read_text())
    # Only the scenario's own command checks times: a machine that runs tests is busy.
    assert [failure for failure in found["failures"] if " took " not in failure and " take " not in failure] == []
    assert found["trials"][0]["votes"] > 10


@pytest.mark.real("processes")
def test_a_busy_port_is_one_line_and_the_peer_starts_afterwards(tmp_path: Path) -> None:
    place = bad_input.Place(tmp_path / "peer")
    place.found()
    height = place.height()
    case = bad_input.Case("busy port")
    bad_input.busy_port(place, case)
    assert case.problem == ""
    place.start()
    place.decide()
    place.stop()
    assert place.height() > height


def test_a_traceback_is_never_what_a_person_sees() -> None:
    for status, errors in ((0, "peer: error: x"), (1, "Traceback\npeer: error: x"), (2, "x"), (2, "peer: error: y")):
        case = bad_input.Case("planted")
        bad_input.judge(case, status, errors, "x")
        assert case.problem, errors
    case = bad_input.Case("right")
    bad_input.judge(case, 2, "INFO\npeer: error: x, do y", "x", "y")
    assert case.problem == ""


def test_an_honest_proposal_that_is_rejected_is_a_failure_and_one_that_nobody_judged_is_counted_apart() -> None:
    clean = determinism.Judged.of({"a": 3, "b": 2}, {"b": {"absent": 2, "unjudged": 1}})
    assert clean == determinism.Judged(5, {}, {"absent": 2, "unjudged": 1}) and clean.failures() == []
    rejected = determinism.Judged.of({"a": 3, "b": 2}, {"a": {"replay": 1, "absent": 1}, "b": {"norm": 2, "replay": 1}})
    assert rejected == determinism.Judged(5, {"norm": 2, "replay": 2}, {"absent": 1})
    assert rejected.failures() == ["2 honest proposals were rejected: norm", "2 honest proposals were rejected: replay"]


def test_a_vouch_that_rejects_an_honest_proposal_is_a_failure() -> None:
    assert determinism.doubts([Verdict.ACCEPT, Verdict.UNJUDGED]) == []
    said = ["2 vouches rejected an honest proposal: norm", "1 vouches rejected an honest proposal: replay"]
    assert determinism.doubts([Verdict.ACCEPT, Verdict.REPLAY, Verdict.NORM, Verdict.NORM]) == said


def test_peers_that_compute_alike_show_nothing() -> None:
    wide, narrow = {"units": ["X86_V3"], "core": "Zen", "aten": "AVX2"}, {"units": [], "core": "Prescott", "aten": "DEFAULT"}
    assert determinism.alike([wide, narrow], {1, 2}) == []
    assert determinism.alike([wide, {**wide, "units": []}], {1, 2}) == ["OpenBLAS", "torch"]
    assert determinism.alike([wide, narrow], {1}) == ["torch's threads"]


def test_a_gpu_is_shown_only_beside_processors() -> None:
    assert determinism.not_both(["cuda:0: NVIDIA H200", "cpu: x86_64", "cpu: x86_64"]) == []
    for devices in (["cpu: x86_64"] * 2, ["cuda:0: NVIDIA H200"], ["", "cpu: x86_64"]):
        assert determinism.not_both(devices), devices


def test_a_scenario_with_a_gpu_says_in_one_line_that_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UserError, match="--gpu: torch finds no GPU; leave it out"):
        determinism.require_gpu()


@pytest.mark.parametrize(
    ("parameters", "voter", "trainer"),
    [(164_288, 120.0, 400.0), (800_000, 120.0, 400.0), (1_017_216, 122.206592, 400.0), (10_000_000, 230.0, None)],
)
def test_a_voter_may_take_more_with_a_larger_model_and_nothing_is_said_of_a_trainer_of_one(
    parameters: int, voter: float, trainer: float | None
) -> None:
    assert idle.voter_mb_max(parameters) == pytest.approx(voter)
    assert idle.trainer_mb_max(parameters) == trainer


def test_the_height_of_a_vote_is_told_from_the_job_of_a_round_vote() -> None:
    job, signer = bytes(16).hex().upper(), bytes(32).hex().upper()
    assert rollback._height("prepare 12 0") == 12
    assert rollback._height(f"ballot {job} 3 {signer}") is None


@pytest.mark.parametrize("parameters", [1_000_000, 10_000_000, 124_000_000])
def test_a_large_model_has_nearly_as_many_parameters_as_were_asked_for(parameters: int) -> None:
    model = ModelSpec(**large.shape_of(parameters))
    assert 0.97 * parameters < model.parameters <= parameters and model.problem() is None


def _event(seconds: float, kind: str, **fields: str) -> EventView:
    return EventView(0, int(1_000 * seconds), kind, "", fields)


def test_the_phases_of_a_round_are_those_of_the_slowest_peer_and_add_up_to_the_round() -> None:
    peer = DemoPeer(0, Identity.generate(), Path(), True, False, 1, False)
    watches = [Watch(peer), Watch(peer)]
    for late, watch in enumerate(watches):
        watch.events = [
            _event(10 + late, "job"),
            _event(30 + late, "proposal", round="0", peer="a"),
            _event(33, "ballot", round="0"),
            _event(34 + late, "decided", height="2"),
            _event(36 + 2 * late, "round", round="0", height="2"),
            _event(37, "ballot", round="0"),  # of a voter for which the round did not wait
        ]
    times = large.times_of(0, watches, 15.0, "")
    assert times == large.RoundTimes(0, 15.0, 4.0, 3.0, 2.0, 3.0) and times.outside == 12.0
    assert times.outside + times.worker == 38 - 11
    watches[1].events = watches[1].events[:2]
    assert large.times_of(0, watches, 15.0, "b").applying == 2.0, "a peer that was away says nothing of the round"


FOLDER = Path(__file__).parents[1] / "scenarios"
SCENARIOS = sorted(file.stem for file in FOLDER.glob("*.py") if 'if __name__ == "__main__"' in file.read_text())
# Started by scenarios, not by people; and the list of them.
PARTS = ("proxy", "tally", "serving", "namespace", "router", "gateway", "probe", "virtual", "attackers", "burn")
PARTS += ("lying_gateway", "__main__")


@pytest.mark.real("processes")
@pytest.mark.parametrize("name", [name for name in SCENARIOS if name not in PARTS])
def test_a_scenario_prints_its_help_and_is_in_the_readme(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module(f"scenarios.{name}")
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 0 and f"python -m scenarios.{name}" in capsys.readouterr().out
    assert f"`python -m scenarios.{name}" in (FOLDER / "README.md").read_text()


@pytest.mark.parametrize(
    ("name", "words", "says"),
    [
        ("kill", ("--trials", "0"), "--trials: 0 is less than 1"),
        ("leader", ("--trials", "-1"), "--trials: -1 is less than 1"),
        ("leaders", ("--heights", "0"), "--heights: 0 is less than 1"),
        ("pause", ("--trials", "0"), "--trials: 0 is less than 1"),
        ("pause", ("--seconds", "0"), "--seconds: 0 is not above 0"),
        ("partition", ("--trials", "0"), "--trials: 0 is less than 1"),
        ("partition", ("--shape", "9,9"), "--shape: '9,9' is none of 2,2 3,1 5,2 4,3"),
        ("rollback", ("--trials", "0"), "--trials: 0 is less than 1"),
        ("determinism", ("--rounds", "0"), "--rounds: 0 is less than 1"),
        ("join", ("--joins", "0"), "--joins: 0 is less than 1"),
        ("rolling", ("--peers", "0"), "--peers: 0 is less than 1"),
        ("soak", ("--minutes", "nan"), "--minutes: nan is not above 0"),
        ("idle", ("--seconds", "soon"), "--seconds: 'soon' is not a number"),
        ("idle", ("--set", "width"), "--set 'width' is not FIELD=VALUE"),
        ("bad_input", ("--only", "nosuch"), "--only: 'nosuch' begins no case"),
        ("crash_points", ("--only", "nosuch"), "--only 'nosuch' matches no crash point: run with --list to list them"),
        ("crash_points", ("--only", "before-blob-keep"), "--only 'before-blob-keep' is not tried here: only where a liar"),
        ("crash_points", ("--only", "blob-keep"), "--only 'blob-keep' is not tried here: only where a liar"),
    ],
)
def test_a_scenario_that_would_try_nothing_says_so_in_one_line(
    name: str, words: tuple[str, ...], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module(f"scenarios.{name}")
    monkeypatch.setattr(sys, "argv", [name, *words])
    with pytest.raises(SystemExit) as ended:
        module.main()
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and says in line


def test_every_point_that_is_listed_is_tried_or_refused() -> None:
    for point in POINTS:
        assert crash_points.chosen(point) and bool(crash_points.refusal(point)) == (crash_points.write_of(point) in UNREACHED)


def test_the_list_of_scenarios_names_them_all() -> None:
    listed = {line.split()[2].rstrip(":") for line in scenarios()}
    assert listed == {f"scenarios.{name}" for name in SCENARIOS if name not in PARTS}
