"""The files in `deploy/` and the packages of `make setup` agree with the sources. `python -m scenarios.deploy` runs them."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from importlib import metadata
from typing import Any

import pytest
import yaml

from peer import VERSION
from peer.settings.config import load_settings
from scenarios import deploy
from tests.packages import PACKAGES, PROJECT, ROOT
from tools.installed import public_version, required_distributions
from tools.lock import read_constraints

DEPLOY = ROOT / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
UNIT = (DEPLOY / "folkmoot.service").read_text()


def test_the_compose_file_has_the_nine_peers_with_settings_that_the_program_takes() -> None:
    roles = Counter(service["environment"]["PEER_ROLE"] for service in SERVICES.values())
    assert roles == {"full": 1, "trainer": 3, "annotator": 2, "voter": 3}
    for name, service in SERVICES.items():
        config = load_settings({}, service["environment"]).config
        assert config.name == name
        assert not config.advertise, "names that lead into a private network: those who only hear of them do not dial there"
        assert f"{name}:/var/lib/folkmoot" in service["volumes"] and name in COMPOSE["volumes"], "a volume of its own"
        light = config.role in ("voter", "annotator")
        assert service["image"].endswith(":light" if light else ":full") and service["image"].endswith(service["build"]["target"])


def test_every_peer_founds_or_joins_and_three_voters_re_execute() -> None:
    [environment] = {tuple(service["environment"][name] for name in ("FOUNDERS", "JOINERS")) for service in SERVICES.values()}
    founders, joiners = (names.split() for names in environment)
    assert sorted(founders + joiners) == sorted(SERVICES)
    tolerated = (len(founders) - 1) // 3
    workers = [name for name in founders if SERVICES[name]["environment"]["PEER_ROLE"] in ("full", "trainer")]
    assert tolerated == 1 and len(workers) >= 2 * tolerated + 1, "`train` re-executes everything unless it is told otherwise"
    assert all(SERVICES[name]["environment"]["PEER_STAND"] == "no" for name in joiners), "they would change that number"


def test_nothing_runs_as_root_or_is_published_beyond_this_machine() -> None:
    stages = {stage.split()[2]: stage for stage in re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]}
    assert "USER peer" in stages["base"]
    assert all(stages[name].startswith("base AS") and "USER" not in stages[name] for name in ("light", "full"))
    for service in SERVICES.values():
        assert service["cap_drop"] == ["ALL"] and service["read_only"] and "user" not in service
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
    assert re.search(r"^User=folkmoot$", UNIT, re.MULTILINE) and re.search(r"^CapabilityBoundingSet=$", UNIT, re.MULTILINE)


def test_on_loopback_each_address_of_a_list_is_another_one() -> None:
    places = {"full:7700": "127.0.0.1:1", "voter-1:7700": "127.0.0.1:2"}
    assert deploy.mapped("full:7700,voter-1:7700", places) == "127.0.0.1:1,127.0.0.1:2"
    assert deploy.mapped("full", places) == "full", "a name alone stays"


def test_health_is_asked_where_metrics_are_served() -> None:
    [listens] = re.findall(r"PEER_METRICS=(\S+)", DOCKERFILE)
    assert f"http://{listens}/healthz" in DOCKERFILE and f"PEER_METRICS={listens}" in UNIT
    assert load_settings({}, {"PEER_METRICS": listens}).config.feature_settings["metrics"] == listens


def test_images_are_built_from_all_rooms_and_pinned_packages() -> None:
    lines = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    wanted = {line.removeprefix("!") for line in lines if line.startswith("!")}
    of_build = {"pyproject.toml", "setup.py", "constraints.txt", "requirements-light.txt", "requirements-train.txt"}
    assert wanted == {*PACKAGES, *of_build, "README.md", "LICENSE", "deploy/start.sh"}
    assert {PROJECT["project"]["readme"], *PROJECT["project"]["license-files"]} <= wanted
    installs = [part for part in re.split(r"&&|\n", DOCKERFILE.replace("\\\n", "")) if re.search(r"\bpip\b.* install ", part)]
    assert len(installs) == 5, "packages, build tools, the wheel, the packages of training, torch"
    assert all(re.search(r"-c constraints\.txt|--require-hashes|--no-deps", part) for part in installs)


@pytest.mark.real("processes")
def test_the_start_script_is_a_script_of_any_shell() -> None:
    assert subprocess.run(["sh", "-n", DEPLOY / "start.sh"], check=False).returncode == 0
    assert DEPLOY.joinpath("start.sh").stat().st_mode & 0o111


@pytest.mark.real("processes")
@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd here")
def test_systemd_reads_the_unit() -> None:
    done = subprocess.run(["systemd-analyze", "verify", DEPLOY / "folkmoot.service"], capture_output=True, text=True, check=False)
    assert [line for line in done.stderr.splitlines() if "is not executable" not in line] == []


EXTRAS = ("dev", "web", "upnp", "mdns", "data", "train")


def test_the_program_has_the_version_of_its_package() -> None:
    assert metadata.version("folkmoot") == VERSION


def test_every_package_that_set_up_installs_is_pinned_to_the_version_that_is_here() -> None:
    """The GPU build of torch requires nineteen packages more than the CPU build."""
    pinned = read_constraints()
    here = {name: public_version(distribution) for name, distribution in required_distributions(EXTRAS).items()}
    assert {"torch", "numpy", "sympy", "ruff", "aiohttp", "multidict"} <= here.keys()
    assert {name: pinned.get(name) for name in here} == here


def test_constraints_name_each_package_once_with_one_exact_version() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert len(lines) == len(read_constraints())
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9][\w.]*", line) for line in lines)


def test_make_setup_installs_the_extras() -> None:
    assert f"--editable '.[{','.join(EXTRAS)}]'" in (ROOT / "Makefile").read_text()


def test_files_that_are_no_code_are_shipped() -> None:
    """setuptools finds modules by itself, and ships other files only if they are named."""
    named = dict(PROJECT["tool"]["setuptools"]["package-data"])
    everywhere = named.pop("*")
    assert everywhere == ["py.typed"]
    patterns = [(package, pattern) for package, own in named.items() for pattern in own]
    shipped = {file for package, pattern in patterns for file in (ROOT / package).glob(pattern)}
    shipped |= {ROOT / package / "py.typed" for package in PACKAGES}
    found = (file for package in PACKAGES for file in (ROOT / package).rglob("*"))
    files = (file for file in found if "__pycache__" not in file.parts)  # other processes write there
    assert {file for file in files if file.is_file() and file.suffix != ".py"} == shipped


def test_make_test_says_first_how_long_it_takes() -> None:
    recipe = re.split(r"^test: setup\n", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)[1].split("\n\n")[0].splitlines()
    assert (
        re.search(r"@echo .*about \d+ minutes on two idle cores, and up to \d+ on a busy machine", recipe[0]) and len(recipe) == 2
    )
