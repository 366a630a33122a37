"""People count rounds from 1: texts of the product name no round by its index."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.packages import PACKAGES, ROOT

SHOWN = {"display_round_number", "format_round_progress"}
# Numbers of rounds that a model was trained for, and a duration.
OTHERS = {
    "peer/commands/job_monitor.py: format_seconds(view.seconds)",
    "ledger/jobs.py: job.round",
    "peer/export/model_export.py: found.round",
    "peer/export/model_provenance.py: number",
    "training/api/initial_model.py: final",
    "training/model_store.py: number",
    "training/api/initial_model.py: number",
    "peer/commands/definitions/model_commands.py: view.round",
    "peer/commands/definitions/model_commands.py: newer",
    "peer/commands/definitions/model_commands.py: round",
    "rlhf/commands.py: stage.measured_rounds",
    "rlhf/commands.py: stage.round",
    "training/replay/proposal_replay.py: model.round",
    "training/replay/proposal_replay.py: request.round",
}


def indices(path: Path) -> Iterator[str]:
    """Values behind the word `round` that no function turned into a number for people."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.JoinedStr):
            continue
        for before, value in zip(node.values, node.values[1:], strict=False):
            is_round = isinstance(before, ast.Constant) and re.search(r"\bround $", str(before.value))
            if is_round and isinstance(value, ast.FormattedValue):
                call = value.value
                if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in SHOWN):
                    yield ast.unparse(value.value)


def test_no_text_names_a_round_by_its_index() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {value}"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for value in indices(path)
    }
    assert found == OTHERS, found ^ OTHERS


@pytest.mark.parametrize("page", sorted((ROOT / "curation" / "pages" / "static").glob("*.js")), ids=lambda page: page.name)
def test_no_page_names_a_round_by_its_index(page: Path) -> None:
    named = re.findall(r"\bround \$\{([^}]*)", page.read_text(), re.IGNORECASE)
    assert all(re.match(r"nth\(|Math\.min\(\w*\.?round \+ 1|first$|last$|one\.round$", value) for value in named), named
