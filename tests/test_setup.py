"""What `make setup` installs is pinned, whichever build of torch the package index has."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from peer import VERSION
from tests.packages import PACKAGES, PROJECT

ROOT = Path(__file__).parents[1]
EXTRAS = ("dev", "web", "upnp", "mdns", "data")


def constraints() -> dict[str, str]:
    lines = (line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def installed() -> dict[str, str]:
    """Versions, without their local part, of everything that the extras asks for and that is there, directly or not."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: dict[str, str] = {}
    extras = (text for name in EXTRAS for text in project["optional-dependencies"][name])
    waiting = [Requirement(text) for text in (*project["dependencies"], *extras)]
    seen: set[tuple[str, str]] = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        found[name] = Version(distribution.version).public
        for extra in ("", *requirement.extras):
            if (name, extra) not in seen:
                seen.add((name, extra))
                waiting += needed(distribution, extra)
    return found


def needed(distribution: metadata.Distribution, extra: str) -> Iterator[Requirement]:
    for requirement in map(Requirement, distribution.requires or ()):
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            yield requirement


def test_the_program_has_the_version_of_its_package() -> None:
    assert metadata.version("folkmoot") == VERSION


def test_every_package_that_set_up_installs_is_pinned_to_the_version_that_is_here() -> None:
    """The build of torch for GPUs brings nineteen packages that the one for processors alone does not."""
    pinned, here = constraints(), installed()
    assert {"torch", "numpy", "sympy", "ruff", "aiohttp", "multidict"} <= here.keys()
    assert {name: pinned.get(name) for name in here} == here


def test_constraints_name_each_package_once_with_one_exact_version() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert len(lines) == len(constraints())
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9][\w.]*", line) for line in lines)


def test_make_setup_installs_the_extras() -> None:
    assert f"--editable '.[{','.join(EXTRAS)}]'" in (ROOT / "Makefile").read_text()


def test_files_that_are_no_code_are_shipped() -> None:
    """setuptools takes modules by itself, and of all else only what is named."""
    named = PROJECT["tool"]["setuptools"]["package-data"]
    shipped = {file for package, patterns in named.items() for pattern in patterns for file in (ROOT / package).glob(pattern)}
    found = (file for package in PACKAGES for file in (ROOT / package).rglob("*"))
    files = (file for file in found if "__pycache__" not in file.parts)  # others write there
    assert {file for file in files if file.is_file() and file.suffix != ".py"} == shipped


def test_make_test_says_first_how_long_it_takes() -> None:
    recipe = re.split(r"^test: setup\n", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)[1].split("\n\n")[0].splitlines()
    assert (
        re.search(r"@echo .*about \d+ minutes on two idle cores, and up to \d+ on a busy machine", recipe[0]) and len(recipe) == 2
    )
