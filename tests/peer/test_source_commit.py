"""The commit in `peer --version`: git's in a checkout, a file's in an installed program."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from peer import VERSION, source_commit
from tests.packages import ROOT
from tests.peer.processes import peer


def git(folder: Path, *arguments: str) -> str:
    author = ["-c", "user.name=anna", "-c", "user.email=anna@localhost"]
    done = subprocess.run(["git", "-C", str(folder), *author, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one committed file of the package."""
    root = tmp_path / "checkout"
    (root / "peer").mkdir(parents=True)
    (root / "peer" / "module.py").write_text("")
    git(root, "init", "--quiet")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "--message", "Begin")
    monkeypatch.setattr(source_commit, "PACKAGE", root / "peer")
    return root


@pytest.mark.real("processes")
def test_a_checkout_has_the_commit_of_git_and_a_mark_after_changes(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = git(checkout, "rev-parse", "HEAD")[:12]
    git(checkout, "tag", "v1")  # tags do not replace the commit
    assert source_commit.describe_version() == f"folkmoot {VERSION} ({commit})"
    monkeypatch.setenv("GIT_DIR", str(ROOT / ".git"))  # as in a hook of another repository
    assert source_commit.source_commit() == commit
    (checkout / "peer" / "module.py").write_text("changed")
    assert source_commit.source_commit() == f"{commit}-dirty"


@pytest.mark.real("processes")
def test_an_installed_program_has_the_commit_of_its_build_and_ignores_repositories_around_it(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = checkout / ".venv" / "site-packages" / "peer"
    installed.mkdir(parents=True)
    monkeypatch.setattr(source_commit, "PACKAGE", installed)
    assert source_commit.describe_version() == f"folkmoot {VERSION}"
    (installed / source_commit.FILE_NAME).write_text("1a2b3c4d5e6f\n")
    assert source_commit.describe_version() == f"folkmoot {VERSION} (1a2b3c4d5e6f)"


@pytest.mark.real("processes")
@pytest.mark.parametrize("git_program", ["", "#!/bin/sh\nexit 128\n"])
def test_without_git_the_version_stands_alone(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, git_program: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    if git_program:
        (tmp_path / "git").write_text(git_program)
        (tmp_path / "git").chmod(0o755)
    assert source_commit.describe_version() == f"folkmoot {VERSION}"


@pytest.mark.real("processes")
def test_the_full_command_line_prints_the_same_line() -> None:
    status, printed, _ = peer("--version")
    assert (status, printed) == (0, source_commit.describe_version() + "\n")
    assert re.fullmatch(r"folkmoot [\w.]+( \([0-9a-f]{12}(-dirty)?\))?\n", printed)


@pytest.mark.real("processes")
@pytest.mark.parametrize("known", [True, False])
def test_a_build_replaces_or_removes_the_commit_of_an_earlier_one(tmp_path: Path, known: bool) -> None:
    sources, built = tmp_path / "sources", tmp_path / "built"
    for name in ("setup.py", "peer/__init__.py", "peer/source_commit.py"):
        (sources / name).parent.mkdir(parents=True, exist_ok=True)
        (sources / name).write_text((ROOT / name).read_text())
    if known:
        (sources / "peer" / source_commit.FILE_NAME).write_text("1a2b3c4d5e6f\n")
    stale = built / "peer" / source_commit.FILE_NAME
    stale.parent.mkdir(parents=True)
    stale.write_text("000000000000\n")
    command = [sys.executable, "setup.py", "--quiet", "build_py", "--build-lib", str(built)]
    subprocess.run(command, cwd=sources, check=True, capture_output=True)
    assert (stale.read_text() if stale.exists() else "") == ("1a2b3c4d5e6f\n" if known else "")
