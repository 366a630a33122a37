"""What shells offer when somebody presses Tab, from the scripts that `peer completion` prints."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from peer import cli
from peer.commands.definitions import all_commands
from peer.commands.shell_completion import SHELLS, completion_script


def made(shell: str) -> str:
    return completion_script(shell, cli.build_parser(), all_commands())


@pytest.fixture(scope="module")
def bash(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("completion") / "peer.bash"
    file.write_text(made("bash"))
    return file


def offered(bash: Path, *typed: str) -> set[str]:
    """Behind these words, of which the last one is being typed."""
    line = f'source "$0"; COMP_WORDS=("$@"); COMP_CWORD={len(typed) - 1}; _peer; printf "%s\\n" "${{COMPREPLY[@]}}"'
    ran = subprocess.run(["bash", "-c", line, bash, *typed], capture_output=True, text=True, check=True)
    return set(ran.stdout.split())


@pytest.mark.real("processes")
def test_commands_options_and_choices_are_offered_where_they_may_stand(bash: Path, tmp_path: Path) -> None:
    assert offered(bash, "peer", "st") == {"stats", "status"}
    assert offered(bash, "peer", "train", "--pre") == {"--preset"}
    assert offered(bash, "peer", "train", "--preset", "") == {"local", "per-step"}
    assert offered(bash, "peer", "run", "--listen", "") == set(), "that may be anything"
    assert offered(bash, "peer", "config", "s") == {"show"}
    assert offered(bash, "peer", "help", "audit") == {"audit", "audits"}
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    assert offered(bash, "peer", "export", f"{tmp_path}/f") == {f"{tmp_path}/folder"}
    assert offered(bash, "peer", "train", "--data", f"{tmp_path}/f") == {f"{tmp_path}/folder", f"{tmp_path}/file"}


@pytest.mark.real("processes")
def test_behind_console_stand_the_words_of_the_prompt_and_behind_a_word_its_arguments(bash: Path) -> None:
    assert all_commands().keys() < offered(bash, "peer", "console", "")
    assert "demo" not in offered(bash, "peer", "console", "")
    assert offered(bash, "peer", "console", "--data-dir", "/x", "train", "--preset", "p") == {"per-step"}


@pytest.mark.parametrize("shell", SHELLS)
def test_every_command_with_every_option_is_in_the_script_of_every_shell(shell: str) -> None:
    text = made(shell)
    for name, command in cli.build_parser().commands().items():
        lines = [line for line in text.splitlines() if f"{name})" in line or f"_from {name}'" in line]
        for option in command.known_options():
            wanted = option.replace("--", "-l ", 1) if shell == "fish" and option.startswith("--") else option
            wanted = wanted.replace("-", "-s ", 1) if shell == "fish" and not option.startswith("--") else wanted
            assert any(wanted in line for line in lines), f"{name} {option}"


@pytest.mark.real("processes")
@pytest.mark.parametrize("shell", SHELLS)
def test_the_shell_can_read_its_script(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    (tmp_path / "script").write_text(made(shell))
    assert subprocess.run([shell, "-n", tmp_path / "script"], capture_output=True, text=True, check=True).stderr == ""
