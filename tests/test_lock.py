"""The lists of packages with hashes agree with `constraints.txt`. `python -m tools.lock` writes them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools import lock
from tools.installed import LIGHT_EXTRAS, required_distributions
from tools.lock import HASHED, LIGHT, OF_TORCH, TRAIN, TRAIN_EXTRAS, is_of_use, read_constraints

ENTRY = re.compile(r"(?P<name>\S+)==(?P<version>\S+)(?P<hashes>( \\\n    --hash=sha256:[0-9a-f]{64})+)\n")


def versions(path: Path) -> dict[str, str]:
    """Return the versions of a list, all of which have hashes."""
    text = path.read_text().partition("\n")[2]
    entries = list(ENTRY.finditer(text))
    assert "".join(entry[0] for entry in entries) == text
    return {entry["name"]: entry["version"] for entry in entries}


def test_all_pinned_packages_but_torch_and_those_of_its_builds_have_hashes() -> None:
    pinned = read_constraints()
    left_out = pinned.keys() - versions(HASHED).keys()
    assert versions(HASHED) == {name: version for name, version in pinned.items() if name not in left_out}
    assert {"torch", "triton"} < left_out and all(OF_TORCH.fullmatch(name) for name in left_out)
    assert left_out == {name for name in pinned if OF_TORCH.fullmatch(name)}


def test_the_light_list_has_what_a_peer_without_training_needs() -> None:
    light = versions(LIGHT)
    assert light.items() <= versions(HASHED).items()
    assert required_distributions(LIGHT_EXTRAS).keys() <= light.keys()
    assert "tokenizers" in light, "a peer without torch starts jobs with a BPE"
    assert not light.keys() & {"torch", "matplotlib", "pyarrow", "pytest"}


def test_the_train_list_has_what_a_trainer_needs_but_torch() -> None:
    train = versions(TRAIN)
    assert versions(LIGHT).items() <= train.items() <= versions(HASHED).items()
    left_out = required_distributions(TRAIN_EXTRAS).keys() - train.keys()
    assert "torch" in left_out and all(OF_TORCH.fullmatch(name) for name in left_out)
    assert {"matplotlib", "sympy"} < train.keys() and not train.keys() & {"pyarrow", "pytest"}


def test_another_python_does_not_write_the_lists(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(lock, "PYTHON", (3, 99))
    assert lock.main() == 1
    assert "but the lists are made with Python 3.99" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "is_taken"),
    [
        ("numpy-2.4.6-cp311-cp311-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl", True),
        ("numpy-2.4.6-cp313-cp313-macosx_14_0_arm64.whl", True),
        ("numpy-2.4.6-cp310-abi3-musllinux_1_2_x86_64.whl", True),
        ("numpy-2.4.6-py2.py3-none-any.whl", True),
        ("numpy-2.4.6.tar.gz", True),
        ("numpy-2.4.6-cp311-cp311-win_amd64.whl", False),
        ("numpy-2.4.6-cp310-cp310-macosx_14_0_arm64.whl", False),
        ("numpy-2.4.60-py3-none-any.whl", False),
        ("numpy-2.4.6rc1.tar.gz", False),
        ("numpy-5.0-36-none-any.whl", False),
        ("numpy-2.4.6.exe", False),
    ],
)
def test_hashes_are_of_files_of_that_release_for_linux_and_macos(file: str, is_taken: bool) -> None:
    assert is_of_use(file, "2.4.6") is is_taken
