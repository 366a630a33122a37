"""What the demo shows fits the terminal: every peer with all its reasons, and as many rounds as there is room for."""

from __future__ import annotations

import io
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from demo import report_files
from demo.demo_peers import Demo
from demo.live_display import DemoDisplay
from demo.network_demo import assign_roles
from peer.cli import build_parser
from protocol.api import JobView, RoundView
from protocol.errors import StorageError
from protocol.identity import peer_id

ROUNDS = 60
REASONS = {"replay": 48, "norm": 7, "unjudged": 4, "absent": 1}


def demo_of(folder: Path, *arguments: str) -> Demo:
    options = build_parser().parse_args(["demo", *arguments])
    return Demo(options, folder, assign_roles(options, folder))


def picture(folder: Path, peers: int, liars: int, width: int, height: int) -> list[str]:
    demo = demo_of(folder, "--peers", str(peers), "--malicious", str(liars))
    keys = {peer_id(peer.identity.public): peer for peer in demo.peers}
    accepted = {key: ROUNDS for key, peer in keys.items() if peer.trains and not peer.lies}
    rejected = {key: REASONS for key, peer in keys.items() if peer.lies}
    verdicts = dict.fromkeys(accepted, "accept") | dict.fromkeys(rejected, "unjudged")
    job: Any = ("e" * 64, "demo", "language", "running", ROUNDS, ROUNDS, "f" * 64, "full", "0" * 64, accepted, rejected, 1)
    rounds = tuple(
        RoundView("e" * 64, number, number, verdicts, tuple(keys), True, True, "f" * 64, 2.5, None, 1.25, 1040.0)
        for number in range(ROUNDS)
    )
    out = io.StringIO()
    Console(file=out, width=width, height=height).print(
        DemoDisplay(demo)._picture(JobView(*job, rounds_in_model=ROUNDS), rounds, width, height)
    )
    return out.getvalue().splitlines()


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40)])
@pytest.mark.parametrize(("peers", "liars"), [(4, 1), (7, 2), (10, 3)])
def test_the_live_table_fits_and_the_liars_rows_have_all_their_reasons(
    tmp_path: Path, peers: int, liars: int, width: int, height: int
) -> None:
    lines = picture(tmp_path, peers, liars, width, height)
    assert len(lines) < height and max(map(len, lines)) <= width
    told = " ".join("\n".join(lines).replace("│", " ").split())
    assert all(f"{reason} {count}" in told for reason, count in REASONS.items()), told
    for number in range(peers):
        assert any(f"-{number} " in line for line in lines), f"no row of peer {number}"
    assert any(line.split()[1] == str(ROUNDS - 1) for line in lines if len(line.split()) > 1), "the newest round is shown"
    assert "…" not in told


def test_a_terminal_too_low_for_the_rounds_shows_the_peers(tmp_path: Path) -> None:
    assert sum("replay 48" in line for line in picture(tmp_path, 10, 3, 80, 16)) == 3


@pytest.mark.parametrize("name", ["a short one", "one with blanks " + "that no line has room for " * 4])
def test_a_path_is_written_as_a_shell_wants_it_and_stays_on_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    folder = tmp_path / name
    DemoDisplay(demo_of(folder)).print_line("4 peers are running, data in", folder)
    printed = capsys.readouterr().out
    assert shlex.quote(str(folder)) in printed and "data in" in printed


@pytest.mark.parametrize("name", ["report.json", "sample.txt", "json"])
def test_full_disk_is_told_in_one_line(name: str, tmp_path: Path) -> None:
    """Linux has a file that is always full."""
    (tmp_path / name).symlink_to("/dev/full")
    demo: Any = SimpleNamespace(folder=tmp_path, options=SimpleNamespace(json=str(tmp_path / "json")))
    with pytest.raises(StorageError, match=f"{name}: the disk is full; free some space"):
        report_files.write_report(demo, "{}")
        report_files.write_text(tmp_path / "sample.txt", "text")
