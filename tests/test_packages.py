"""Every list of packages names all of them: a package that one forgets would be checked by nobody, or not be shipped."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.packages import PACKAGES, PROJECT, ROOT
from tests.waiting import run_process

NOT_SHIPPED = {"tests", "scenarios", "benchmarks"}
CONTRACTS: dict[str, dict[str, Any]] = {contract["name"]: contract for contract in PROJECT["tool"]["importlinter"]["contracts"]}


def test_every_package_is_checked_shipped_and_typed() -> None:
    packages = {file.parent.name for file in ROOT.glob("*/__init__.py")} - NOT_SHIPPED
    assert packages == set(PACKAGES)
    assert {name.removesuffix("*") for name in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]} == packages
    assert set(PROJECT["tool"]["mypy"]["files"]) == packages | {"scenarios"}


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
        "consensus/quorum.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ledger.ledger_state import State",
    ),
    "a clock in what is decided": ("ledger/audits/sortition.py", "import time"),
    "torch in the daemon": ("peer/runtime/telemetry/block_events.py", "import torch"),
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
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    found = run_process(command, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert found.returncode == 1 and "1 broken" in found.stdout, found.stdout + found.stderr
