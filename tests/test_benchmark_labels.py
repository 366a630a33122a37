"""`python -m benchmarks.labels`: its counts, and its report of missed targets."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import labels
from benchmarks.labels import Crowd, Figures, Person, Points, Stopped, correlation, run, verdicts


@pytest.mark.real("processes")
def test_one_seed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setattr(labels, "ANSWERS", 40)
    monkeypatch.setattr(sys, "argv", ["labels", "--seeds", "1", "--json", str(tmp_path / "figures.json")])
    labels.main()
    said = capsys.readouterr().out
    assert said.count("a fifth ") >= 8 and "colluding" in said
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert (
        len(figures["crowds"]) == len(labels.CROWDS)
        and len(figures["points"]) == len(figures["five"]) == len(figures["long"]) == 5
    )


def test_what_is_missed_is_said() -> None:
    figures = Figures(
        [Crowd(name, 0, 0.9, 0.95, 0.95, 0.95) for name in labels.CROWDS],
        [Stopped(0, 0.95, 3.2)],
        [Points(kind, 0, 40, 1, 1, 100, 0.06, 0.01, 0, 0.9) for kind in labels.KINDS],
        [Points(kind, 0, 62, 1, 1, 100, 0.2, 0.06, 0, 0.9) for kind in labels.KINDS],
        [Points(kind, 0, 150, 1, 1, 100, 0.01, 0.01, 0, 0.7) for kind in labels.KINDS],
    )
    lines = list(verdicts(figures))
    assert len(lines) == len(labels.CROWDS) + 14 and all(line.startswith("MISSED") for line in lines)


@pytest.mark.parametrize("name", [name for name in labels.CROWDS if name != labels.HALF])
def test_no_crowd_has_worse_labels_than_a_plain_majority(name: str) -> None:
    assert max(labels.below_majority([labels.crowd(name, seed) for seed in range(100, 103)])) <= labels.BELOW_MAJORITY


def test_correlations_are_of_ranks() -> None:
    assert correlation([1, 2, 30], [5, 6, 7]) == pytest.approx(1) and correlation([3, 2, 1], [5, 6, 7]) == pytest.approx(-1)
    assert correlation([0, 0, 0], [1, 2, 3]) == 0


def test_who_copies_is_blind_only_where_nothing_is_opened() -> None:
    people = [Person("copying", 0.5), *(Person("honest", 1.0) for _ in range(6))]
    project = run(people, np.random.default_rng(0), 60, 0)
    seen = [said for (task, key, said), blind in zip(project.votes, project.blind, strict=True) if key == 0 and not blind]
    assert sum(project.blind) == 2 * 60 and len(project.votes) == len(project.blind)
    assert len(project.labels) == 60 and len(people[0].keys) <= 1 and isinstance(seen, list)


def test_ever_fresh_ones_come_with_new_keys() -> None:
    people = [Person("fresh", 0.5), *(Person("honest", 1.0) for _ in range(6))]
    project = run(people, np.random.default_rng(0), 60, 0)
    assert len(people[0].keys) == -(-people[0].answers // labels.FRESH_ANSWERS) and project.keys == len(people[0].keys) + 6
