"""What a feature declares, by its own file and one line, shows wherever people and programs look."""

from __future__ import annotations

import json
import pkgutil
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
    # A whole number does for a float.
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
    with pytest.raises(UserError, match="no command 'notes'"):
        help_text(all_commands(), "notes")


def test_what_is_declared_twice_or_not_answered_is_noticed() -> None:
    with pytest.raises(AssertionError, match="two declarations of the call 'note"):
        collect_methods(NoteCalls, NoteAnswers)
    lazy = type("Lazy", (NoteCalls,), {})
    with pytest.raises(AssertionError, match="two protocols declare the call"):
        defer_handlers({NoteCalls: lambda: NoteAnswers(None), lazy: lambda: NoteAnswers(None)})
    with pytest.raises(AssertionError, match="does not answer it"):
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
