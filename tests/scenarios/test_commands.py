"""Every scenario says what it does and is described where a person looks for it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from scenarios import crash_points
from scenarios.__main__ import scenarios
from scenarios.crash_points import UNREACHED
from storage.crash_points import POINTS

FOLDER = Path(__file__).parents[2] / "scenarios"
SCENARIOS = sorted(file.stem for file in FOLDER.glob("*.py") if 'if __name__ == "__main__"' in file.read_text())
# Started by scenarios, not by people; and the list of them.
PARTS = ("proxy", "tally", "serving", "namespace", "router", "gateway", "probe", "virtual", "attackers", "burn", "__main__")


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
        ("idle", ("--set", "width"), "--set 'width': write FIELD=VALUE"),
        ("bad_input", ("--only", "nosuch"), "--only: 'nosuch' begins no case"),
        ("crash_points", ("--only", "nosuch"), "--only 'nosuch' is no crash point and begins none: --list prints them"),
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
