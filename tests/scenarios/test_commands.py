"""Every scenario says what it does and is described where a person looks for it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "scenarios"
SCENARIOS = sorted(file.stem for file in FOLDER.glob("*.py") if 'if __name__ == "__main__"' in file.read_text())
PARTS = ("proxy",)  # started by scenarios, not by people


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
