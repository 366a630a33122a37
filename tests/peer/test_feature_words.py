"""Declarations of a feature appear in all interfaces for people and programs, and in the Tab completion of shells."""

from __future__ import annotations

import json
import pkgutil
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import trio

from features.lazy_import import import_object
from features.rpc import collect_methods, defer_handlers, public_methods
from peer import cli
from peer.api import control_socket
from peer.api.rpc_handlers import rpc_handlers, rpc_methods
from peer.commands import definitions as commands
from peer.commands.command_line_parser import help_text
from peer.commands.definitions import all_commands
from peer.commands.shell_completion import SHELLS, completion_script
from protocol.api import PeerApi
from protocol.errors import UserError
from tests.notes.listing import listed
from tests.notes.words import NoteAnswers, NoteCalls, NoteView
from tests.peer.fake_api import FakeApi


@pytest.fixture
def feature() -> Iterator[None]:
    with listed():
        yield


def api() -> PeerApi:
    return cast(PeerApi, defer_handlers({PeerApi: FakeApi, NoteCalls: lambda: NoteAnswers(None)}))


@pytest.mark.real("sockets")
async def test_a_call_of_a_feature_is_asked_and_answered(feature: None, tmp_path: Path, nursery: trio.Nursery) -> None:
    await nursery.start(control_socket.serve_control_socket, api(), tmp_path)
    client = cast(NoteCalls, control_socket.make_client(tmp_path))
    assert await client.notes(2) == (NoteView("milk", 0.5), NoteView("bread", 1.0))
    # An int is accepted as a float.
    assert await client.notes(most=2, heaviest=3) == (NoteView("milk", 0.5), NoteView("bread", 3.0))
    with pytest.raises(TypeError):
        await client.notes()  # type: ignore[call-arg]


@pytest.mark.real("sockets")
async def test_a_word_of_a_feature_is_one_of_the_prompt_and_a_command(
    feature: None, tmp_path: Path, nursery: trio.Nursery, capsys: pytest.CaptureFixture[str]
) -> None:
    await nursery.start(control_socket.serve_control_socket, api(), tmp_path)

    async def peer(*typed: str) -> str:
        assert await trio.to_thread.run_sync(cli.main, [*typed, "--data-dir", str(tmp_path)]) == 0
        return capsys.readouterr().out

    assert "milk" in await peer("notes") and "bread" not in await peer("notes", "--most", "1")
    assert await peer("console", "note", "eggs") == await peer("note", "eggs") == "noted: eggs\n"
    assert json.loads(await peer("notes", "--json"))[0] == {"text": "milk", "weight": 0.5}
    assert "--most" in help_text(all_commands(), "notes") and "what was noted" in cli.build_parser().format_help()
    assert all("notes" in completion_script(shell, cli.build_parser(), all_commands()) for shell in SHELLS)
    assert list(all_commands())[-2:] == ["help", "quit"], "those about the prompt stay the last"


def test_no_module_of_words_is_forgotten() -> None:
    modules = {module.name for module in pkgutil.iter_modules(commands.__path__)}
    assert modules == {topic.__name__.rpartition(".")[2] for topic in commands.COMMAND_MODULES}


def test_without_the_line_nothing_of_it_shows(tmp_path: Path) -> None:
    assert {"notes", "note"}.isdisjoint(all_commands()) and {"notes", "note"}.isdisjoint(rpc_methods())
    assert not hasattr(control_socket.make_client(tmp_path), "notes")
    with pytest.raises(UserError, match="unknown command 'notes'"):
        help_text(all_commands(), "notes")


def test_what_is_declared_twice_or_not_answered_is_noticed() -> None:
    with pytest.raises(AssertionError, match="two declarations of the call 'note"):
        collect_methods(NoteCalls, NoteAnswers)
    lazy = type("Lazy", (NoteCalls,), {})
    with pytest.raises(AssertionError, match="two protocols declare the call"):
        defer_handlers({NoteCalls: lambda: NoteAnswers(None), lazy: lambda: NoteAnswers(None)})
    with pytest.raises(AssertionError, match="does not implement the call"):
        defer_handlers({NoteCalls: lazy}).note("milk")


def test_each_handler_answers_all_calls_of_its_protocol() -> None:
    for protocol, place in rpc_handlers():
        handler = import_object(place)
        declared, answered = ({name for name, _ in public_methods(kind)} for kind in (protocol, handler))
        assert declared == answered <= vars(handler).keys()


async def test_a_handler_is_made_once_by_the_first_of_its_calls() -> None:
    made: list[NoteAnswers] = []

    def make() -> NoteAnswers:
        made.append(NoteAnswers(None))
        return made[-1]

    deferred = cast(NoteCalls, defer_handlers({NoteCalls: make}))
    assert made == []
    assert await deferred.notes(2) == await deferred.notes(most=2) == await NoteAnswers(None).notes(2)
    assert len(made) == 1


def test_an_argument_without_a_type_is_no_declaration() -> None:
    class Untyped:
        async def ask(self, what) -> str:  # type: ignore[no-untyped-def]
            return str(what)

    with pytest.raises(AssertionError, match="the call 'ask' has an argument without a type"):
        collect_methods(Untyped)


def made(shell: str) -> str:
    return completion_script(shell, cli.build_parser(), all_commands())


@pytest.fixture(scope="module")
def bash(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("completion") / "peer.bash"
    file.write_text(made("bash"))
    return file


def offered(bash: Path, *typed: str) -> set[str]:
    """Return the completions behind these words. The last word is incomplete."""
    line = f'source "$0"; COMP_WORDS=("$@"); COMP_CWORD={len(typed) - 1}; _peer; printf "%s\\n" "${{COMPREPLY[@]}}"'
    return set(subprocess.run(["bash", "-c", line, bash, *typed], capture_output=True, text=True, check=True).stdout.split())


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
