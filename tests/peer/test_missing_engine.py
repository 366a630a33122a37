"""Roles that train, on a machine without torch."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from peer import features
from peer.commands import local_commands
from peer.settings.config import load_settings
from protocol.errors import UserError
from tests.peer.processes import command
from training.data.tokenizer import train_bpe

OTHERS = "or take --role voter or --role annotator"
INSTALL = "run `pip install 'folkmoot[train]'`"


@pytest.fixture(autouse=True)
def _without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "find_spec", lambda name: None if name == "torch" else find_spec(name))


@pytest.mark.parametrize("words", [("run",), ("join", "INVITATION")])
@pytest.mark.parametrize("role", ["full", "trainer", "rlhf"])
def test_a_role_that_trains_is_refused_before_anything_is_written(tmp_path: Path, words: Sequence[str], role: str) -> None:
    options = () if role == "full" else ("--role", role)  # full is the default
    log = ("--log-file", str(tmp_path / "log"))
    status, printed, told = command(*words, *options, *log, "--data-dir", str(tmp_path / "data"))
    assert (status, printed) == (2, "")
    assert told == f"peer: error: the role {role} trains, and the package torch is not installed: {INSTALL}, {OTHERS}\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("role", ["voter", "annotator"])
def test_other_roles_need_no_torch(role: str) -> None:
    local_commands.require_engine_of_role(load_settings({}, {"PEER_ROLE": role}).config)


def test_a_demo_that_trains_is_refused(tmp_path: Path) -> None:
    status, printed, told = command("demo", "--report", str(tmp_path / "run"))
    assert (status, printed, list(tmp_path.iterdir())) == (2, "", [])
    assert (
        told
        == f"peer: error: the demo trains, and the package torch is not installed: {INSTALL}, or label tasks with --annotate\n"
    )


def test_a_demo_with_an_engine_that_lacks_its_compiler_or_package_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("demo", "--engines", "tinygrad,tinygrad,tinygrad", "--report", str(tmp_path / "run"))
    start = "peer: error: the demo trains with the engine tinygrad, and the"
    monkeypatch.setattr(features, "find_spec", lambda name: None if name in ("torch", "tinygrad") else find_spec(name))
    status, _, told = command(*words)
    install = "run `pip install 'folkmoot[tinygrad]'`, or leave it out of --engines\n"
    assert (status, told) == (2, f"{start} package tinygrad is not installed: {install}")
    monkeypatch.setattr(features, "find_spec", lambda name: True)
    monkeypatch.setattr(features, "find_engine_compiler", lambda engine: None)
    status, _, told = command(*words)
    remedy = "install clang (Debian: `apt install clang`), or name one in the variable CC, or leave it out of --engines\n"
    assert (status, told) == (2, f"{start} compiler of the engine tinygrad was not found: {remedy}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.real("processes")
@pytest.mark.parametrize("words", [("evaluate", "FOLDER", "FILE"), ("rlhf", "score", "MODEL", "PAIRS")])
def test_commands_that_run_a_model_name_the_missing_package(tmp_path: Path, words: Sequence[str]) -> None:
    status, printed, told = command(*words, "--data-dir", str(tmp_path))
    name = " ".join(word for word in words if word.islower())
    assert (status, printed) == (2, "")
    assert told == f"peer: error: {name} runs a model, and the package torch is not installed: {INSTALL}\n"


def test_a_tokenizer_other_than_bytes_names_the_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    missing = "the package tokenizers is not installed: run `pip install tokenizers`, or train on bytes"
    with pytest.raises(UserError, match=re.escape(missing)):
        train_bpe([b"text"], 300)
