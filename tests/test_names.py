"""Names and texts of the product, by the rules of CONTRIBUTING.md; and every list of packages names all of them."""

from __future__ import annotations

import ast
import re
import shutil
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.packages import PACKAGES, PROJECT, ROOT
from tests.waiting import run_process

MODULES_OF_FOLDER_MAX = 20
# Files are named by nouns. These words end as participles do, and are nouns of the field.
NOUNS = {
    "framing": "of messages on a stream",
    "sampling": "of tokens, prompts or tasks",
    "training": "local training: the steps of one trainer between two aggregations",
}
# Verbs without a meaning of their own. `hold` is for locks.
VAGUE = {
    *("do", "find", "give", "go", "hear", "judge", "keep", "learn", "look", "make"),
    *("note", "of", "read", "say", "see", "settle", "show", "take", "tell"),
}


def product() -> list[Path]:
    """Modules of the product, by their paths in the repository."""
    return [path.relative_to(ROOT) for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def classes(path: Path) -> Iterator[ast.ClassDef]:
    return (node for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, ast.ClassDef))


def test_a_class_name_means_one_thing() -> None:
    found = defaultdict(list)
    for path in product():
        for node in classes(path):
            found[node.name].append(str(path))
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}


def test_files_are_named_by_nouns() -> None:
    ends = {path: path.stem.rpartition("_")[2] for path in product()}
    assert {str(path) for path, end in ends.items() if re.fullmatch(r"\w+(ing|ed)", end) and end not in NOUNS} == set()
    assert NOUNS.keys() <= set(ends.values()), "a reason for a name that is not there"


def test_folders_are_small() -> None:
    counts = Counter(path.parent for path in product())
    assert {str(folder): count for folder, count in counts.items() if count > MODULES_OF_FOLDER_MAX} == {}


def test_methods_say_what_they_do() -> None:
    public = [
        f"{path}: {node.name}.{method.name}"
        for path in product()
        for node in classes(path)
        for method in node.body
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_") and method.name in VAGUE
    ]
    assert public == []


SHOWN = {"display_round_number", "format_round_progress"}
# Numbers of rounds that a model was trained for, a duration, and what `display_round_number` gave.
OTHERS = {
    "peer/commands/job_monitor.py: format_seconds(view.seconds)",
    "ledger/jobs.py: job.round",
    "peer/export/model_export.py: found.round",
    "peer/runtime/round_executor.py: shown",
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
    assert all(re.match(r"nth\(|Math\.min\(\w*\.?rounds_in_model \+ 1|first$|last$|one\.round$", value) for value in named), named


NOT_SHIPPED = {"tests", "scenarios", "benchmarks", "tools"}
CONTRACTS: dict[str, dict[str, Any]] = {contract["name"]: contract for contract in PROJECT["tool"]["importlinter"]["contracts"]}


def test_every_package_is_checked_shipped_and_typed() -> None:
    packages = {file.parent.name for file in ROOT.glob("*/__init__.py")} - NOT_SHIPPED
    assert packages == set(PACKAGES)
    assert {name.removesuffix("*") for name in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]} == packages
    assert set(PROJECT["tool"]["mypy"]["files"]) == packages | {"scenarios", "tools"}


def test_every_folder_of_modules_is_a_package() -> None:
    folders = {file.parent for package in PACKAGES for file in (ROOT / package).rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


def test_every_package_has_its_layer_and_is_in_every_contract_about_all() -> None:
    named = [name for layer in CONTRACTS["Imports point down only"]["layers"] for name in re.split(r" \| ", layer)]
    assert {name for name in named if not name.startswith("(")} == set(PACKAGES)
    about_all = [contract for contract in CONTRACTS.values() if contract["type"] in ("forbidden", "acyclic_siblings")]
    lists = [contract.get("ancestors") or contract["source_modules"] for contract in about_all]
    assert sum(set(PACKAGES) <= set(names) for names in lists) == 3, "circles, torch, and the event loop are about every package"


PLANTED = {
    "a circle of two modules": ("ledger/members.py", "from ledger.jobs import Phase"),
    "a circle behind an import inside a function": (
        "ledger/members.py",
        "def _late() -> None:\n    from ledger.jobs import Phase",
    ),
    "an arrow upwards": ("rounds/round_state.py", "from ledger.members import Member"),
    "an arrow upwards for types alone": (
        "consensus/voter_set.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ledger.ledger_state import State",
    ),
    "a clock in what is decided": ("ledger/audits/sortition.py", "import time"),
    "torch in the daemon": ("peer/runtime/telemetry/node_observer.py", "import torch"),
    "a second event loop": ("curation/service/http_routes.py", "import asyncio"),
    "handlers in what is decided": ("curation/estimation/online_dawid_skene.py", "import aiohttp"),
    "training in what people say": ("curation/estimation/online_dawid_skene.py", "from training.job_spec import JobSpec"),
    "chance in the pairs of a step": ("rlhf/data/preference_sets.py", "import random"),
    "a new folder of the peer without a layer": ("peer/attic/__init__.py", ""),
}


@pytest.mark.real("processes")
@pytest.mark.parametrize("fault", PLANTED)
def test_the_contracts_notice(fault: str, tmp_path: Path) -> None:
    name, line = PLANTED[fault]
    for package in PACKAGES:
        (tmp_path / package).symlink_to(ROOT / package)
    (tmp_path / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    package = name.split("/")[0]
    (tmp_path / package).unlink()
    shutil.copytree(ROOT / package, tmp_path / package)
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text((file.read_text() if file.exists() else '"""New."""\n') + f"\n\n{line}\n")
    found = run_process(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 1 and "1 broken" in found.stdout, found.stdout + found.stderr
