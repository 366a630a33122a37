"""The namespaces of `python -m scenarios.lan`, without any peer in them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from protocol.errors import UserError
from scenarios import lan
from tests.waiting import run_process

can_make_them = pytest.mark.skipif(bool(lan.refusal()), reason="needs the right to make network namespaces")


def inside(machine: lan.Machine, *words: str) -> subprocess.CompletedProcess[str]:
    return run_process(["ip", "netns", "exec", machine.name, *words], capture_output=True, text=True)


def namespaces() -> str:
    return run_process(["ip", "netns", "list"], capture_output=True, text=True).stdout


@pytest.mark.real("processes")
@can_make_them
def test_machines_have_one_address_each_no_way_out_and_move_and_nothing_is_left_of_them(tmp_path: Path) -> None:
    with lan.lan(tmp_path, 2) as made:
        first, second = made.machines
        assert inside(first, "ip", "route").stdout.split()[:3] == ["10.77.0.0/24", "dev", "eth0"]
        assert "default" not in inside(first, "ip", "route").stdout
        made.move(second, "10.77.0.102")
        assert "10.77.0.102/24" in inside(second, "ip", "-4", "-br", "address").stdout, "it has an address after the move"
        made.cut(1)
        assert "state UP" not in inside(second, "ip", "link", "show", "eth0").stdout
        made.cut(1, heal=True)
        assert first.name in namespaces()
    assert made.bridge not in namespaces() and first.name not in namespaces()


@pytest.mark.real("processes")
@can_make_them
def test_nothing_is_left_after_a_failure_either(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="half way"), lan.lan(tmp_path, 1) as made:
        raise UserError("half way")
    assert made.bridge not in namespaces()


def test_where_namespaces_cannot_be_made_it_says_so_and_has_its_own_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["lan"])
    monkeypatch.setattr(lan.shutil, "which", lambda command: None)
    assert lan.main() == lan.NOT_PERMITTED
    (line,) = capsys.readouterr().err.splitlines()
    assert "nothing was tried" in line and "iproute2" in line
