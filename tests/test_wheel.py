"""The wheel, installed outside of the checkout, with and without torch. No network is needed.

The packages that Folkmoot requires are links to those of this environment. Nothing else of this environment can be imported.
"""

from __future__ import annotations

import fcntl
import json
import re
import subprocess
import sys
import tarfile
import urllib.request
import zipfile
from collections.abc import Iterable
from email.parser import Parser
from pathlib import Path

import pytest

from peer import VERSION
from peer.source_commit import source_commit
from tests.packages import PACKAGES, ROOT
from tests.peer.processes import DEMO_SECONDS_MAX, Daemon, daemons, environment, poll
from tests.waiting import run_process
from tools.installed import LIGHT_EXTRAS, PRODUCT_EXTRAS, required_distributions
from web.web_service import ADDRESS_FILE

pytestmark = [pytest.mark.real("processes"), pytest.mark.long]

BUILD_SECONDS_MAX = 120.0


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `make wheel` has filled. make takes the set-up as done."""
    folder = tmp_path_factory.mktemp("dist")
    values = [f"BIN={Path(sys.executable).parent}", f"DIST={folder}"]
    command = ["make", "--assume-old=.venv/.setup-complete", "wheel", *values]
    with (tmp_path_factory.getbasetemp().parent / "wheel.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # setuptools makes the same folders in the checkout for each build
        done = run_process(command, BUILD_SECONDS_MAX, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def wheel_of(dist: Path) -> Path:
    [wheel] = dist.glob("*.whl")
    return wheel


def install(wheel: Path, folder: Path, extras: Iterable[str]) -> Path:
    """Install the wheel in a new environment beside links to the packages that it requires. Return the environment."""
    links = folder / "required"
    links.mkdir()
    for distribution in required_distributions(extras).values():
        for name in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (links / name).is_symlink():
                (links / name).symlink_to(Path(str(distribution.locate_file(name))).resolve())
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    options = ["--quiet", "--no-index", "--no-deps"]
    subprocess.run([sys.executable, "-m", "pip", "--python", python, "install", *options, wheel], check=True)
    [packages] = (folder / "venv" / "lib").glob("*/site-packages")
    (packages / "required.pth").write_text(f"{links}\n")
    return folder / "venv"


def run_peer(venv: Path, *words: str, idle: float = 60.0) -> subprocess.CompletedProcess[str]:
    return run_process(
        [venv / "bin" / "peer", *words], idle, cwd=venv.parent, env=clean_environment(), capture_output=True, text=True
    )


def clean_environment() -> dict[str, str]:
    """Return the environment of a daemon in tests, without folders that Python would import from."""
    return {name: value for name, value in environment().items() if not name.startswith("PYTHON")}


def imported_from(venv: Path, names: Iterable[str]) -> dict[str, str | None]:
    """Return the file of each module, or None for a module that is not there."""
    code = (
        "import importlib.util as u, json, sys; print(json.dumps({n: (s := u.find_spec(n)) and s.origin for n in sys.argv[1:]}))"
    )
    command = [venv / "bin" / "python", "-c", code, *names]
    done = subprocess.run(command, cwd=venv.parent, env=clean_environment(), capture_output=True, text=True, check=True)
    found: dict[str, str | None] = json.loads(done.stdout)
    return found


def start(daemon: Daemon, venv: Path, *words: str) -> None:
    command = [venv / "bin" / "peer", *words, "--data-dir", str(daemon.directory), "--no-console"]
    with daemon.log_file.open("ab") as log:
        daemon.process = subprocess.Popen(
            command, cwd=venv.parent, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=clean_environment()
        )


def test_the_wheel_and_the_sdist_have_all_files_and_the_commit(dist: Path) -> None:
    with zipfile.ZipFile(wheel_of(dist)) as wheel:
        names = set(wheel.namelist())
        [about] = (name for name in names if name.endswith(".dist-info/METADATA"))
        fields = Parser().parsestr(wheel.read(about).decode())
        assert wheel.read("peer/commit.txt").decode().strip() == source_commit()
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *PACKAGES]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    of_project = {name for name in names if ".dist-info/" not in name}
    assert of_project == {*listed, "peer/commit.txt"}, "all files of the packages are shipped"
    assert {f"{package}/py.typed" for package in PACKAGES} < of_project
    assert (fields["Name"], fields["Version"], fields["License-Expression"]) == ("folkmoot", VERSION, "MIT")
    assert f"folkmoot-{VERSION}.dist-info/licenses/LICENSE" in names
    required = [text for text in fields.get_all("Requires-Dist", []) if "extra ==" not in text]
    assert not any(re.match("torch|matplotlib|aiohttp", text) for text in required)
    [sdist] = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        sources = {name.partition("/")[2] for name in archive.getnames()}
    assert {*listed, "peer/commit.txt", "setup.py", "pyproject.toml", "LICENSE", "constraints.txt"} <= sources
    assert not any(name.startswith(("tests", "scenarios", "benchmarks", "tools")) for name in sources)


def test_the_wheel_trains_a_demo(dist: Path, tmp_path: Path) -> None:
    venv = install(wheel_of(dist), tmp_path, PRODUCT_EXTRAS)
    places = imported_from(venv, PACKAGES)
    assert all(str(place).startswith(str(venv)) for place in places.values()), places
    commit = source_commit()
    assert run_peer(venv, "--version").stdout == f"folkmoot {VERSION} ({commit})\n"
    files = ["--json", str(tmp_path / "report.json"), "--report", str(tmp_path / "run")]
    done = run_peer(venv, "demo", "--rounds", "3", "--web-port", "0", *files, idle=DEMO_SECONDS_MAX)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "run" / "loss.svg").exists()


async def test_without_torch_a_voter_and_an_annotator_run_and_a_trainer_is_refused(dist: Path, tmp_path: Path) -> None:
    venv = install(wheel_of(dist), tmp_path, LIGHT_EXTRAS)
    assert set(imported_from(venv, ("torch", "matplotlib", "pytest")).values()) == {None}
    with daemons([tmp_path / "voter", tmp_path / "annotator"]) as (voter, annotator):
        for daemon, role in ((voter, "voter"), (annotator, "annotator")):
            place = ("--data-dir", str(daemon.directory))
            assert run_peer(venv, "init", "--network", "lab", *place).returncode == 0
            refused = run_peer(venv, "run", *place)
            assert (refused.returncode, refused.stdout) == (2, "")
            assert refused.stderr == (
                "peer: error: the role full trains, and the package torch is not installed: "
                "run `pip install 'folkmoot[train]'`, or take --role voter or --role annotator\n"
            )
            before = sorted(daemon.directory.iterdir())
            assert run_peer(venv, "run", "--role", "trainer", *place).returncode == 2
            assert sorted(daemon.directory.iterdir()) == before
            start(daemon, venv, "run", "--role", role)
        await voter.answers()
        await annotator.answers()
        address = annotator.directory / "services" / "serve" / ADDRESS_FILE

        async def is_served() -> bool:
            return address.exists() and bool(address.read_text())

        await poll(is_served)
        page, style = (fetch(f"{address.read_text()}{path}") for path in ("/join", "/static/site.css"))
        assert "<title>" in page and style == (ROOT / "web" / "static" / "site.css").read_text()
        assert fetch(f"{address.read_text()}/vendor/preact.mjs") == (ROOT / "web" / "vendor" / "preact.mjs").read_text()
        assert voter.terminate() == annotator.terminate() == 0


def fetch(address: str) -> str:
    with urllib.request.urlopen(address, timeout=30) as reply:
        return str(reply.read().decode())
