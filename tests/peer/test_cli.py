from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import trio

import peer as package
from features import exit_statuses
from features.command_arguments import JSON
from features.json_output import to_json
from peer import __main__, cli, features
from peer.api.control_socket import serve_control_socket
from peer.commands.definitions import all_commands
from peer.settings.config import setting_descriptions
from protocol.api import EventView
from protocol.errors import UserError
from tests.peer import fake_api
from tests.peer.fake_api import (
    ALERTS,
    AUDITS,
    BLOCK,
    CLIENT_RUNS,
    DISK,
    ENGINES,
    INVITATIONS,
    JOBS,
    LIMITS,
    ME,
    MODULES,
    PEERS,
    PROJECTS,
    REACH,
    ROUNDS,
    SAMPLES,
    STATS,
    STATUS,
    VOTES,
    FakeApi,
)
from tests.peer.processes import environment
from tools.reference import render_pages

Result = tuple[int, str, str]


@pytest.fixture
def peer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Result]:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)

    def run(*arguments: str) -> Result:
        status = cli.main(arguments)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.mark.real("processes")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("rnu", "unknown command 'rnu'; did you mean run?"),
        ("--data-dir /nowhere identity", "--data-dir must follow the command: write `peer COMMAND --data-dir …`"),
        ("--config=/nowhere run", "write `peer COMMAND --config …`"),
        ("run --rol voter", "unknown argument '--rol'; did you mean --role?"),
        ("run --role boss", "role = 'boss' (command line) is not a valid role"),
        ("run --role judge", "choose one of voter, trainer, annotator, rlhf, full"),
        ("run --role annotator --web-listen here", "web_listen = 'here' (command line) is not an address"),
        ("run --metrics 7790", "metrics = '7790' (command line) is not an address"),
        ("run --sign-up maybe", "sign_up = 'maybe' (command line) must be open or invited"),
        ("tasks import", "FILE|PROJECT"),
        ("tasks burn all", "'burn'"),
        ("tasks", "ACTION is one of import, export"),
        ("rlhf stat", "did you mean status?"),
        ("demo --attack scal", "did you mean scale?"),
        ("-v", "did you mean --version?"),
        ("run --listen here", "'here' is not an address"),
        ("run --listen none,127.0.0.1:1", "'none' cannot be combined with addresses"),
        ("run --listen 127.0.0.1:1,127.0.0.1:1", "'127.0.0.1:1' is listed twice"),
        ("run --bootstrap a@h:1", "bootstrap (command line): 'a' is not a peer id"),
        ("run --listen none --advertise h:1,i:2", "advertise = 'h:1, i:2' (command line) announces"),
        ("run --listen none --advertise h:1", "(listen is none); remove one"),
        ("run --threads many", "threads = 'many' (command line) is not a whole number"),
        ("run --config /nowhere.toml", "/nowhere.toml cannot be read"),
        ("init", "--network"),
        (f"init --network lab --voter {ME} --voter {ME.upper()}", "is repeated"),
        ("join", "INVITATION"),
        ("status --data-dir /nowhere", "no peer runs on /nowhere: it does not exist; create it with `peer init`"),
        ("status --data-dir /", "no peer runs on /: start it with `peer run --data-dir /`"),
        ("console --data-dir /nowhere", "no peer runs on /nowhere"),
        ("console sttas", "did you mean stats?"),
        ("console clear", "`help` lists all commands"),
        ("console stats --data-dir /nowhere", "no peer runs on /nowhere"),
        ("console approve abc --data-dir", "expected one argument"),
        ("demo --peers 3", "3 is outside 4..10"),
        ("demo --malicious 2", "4 voters tolerate 1 faulty"),
        ("demo --malicious 2", "--peers 7"),
        ("demo --attack false-challenge", "add --audit sampled"),
        ("demo --malicious 4 --beyond-bound", "at least one of the 4 peers must be honest"),
        ("demo --attack bribe", "'bribe'"),
        ("demo --rounds 0", "0 is less than 1"),
        ("demo --crowd 3", "--crowd needs --annotate"),
        ("demo --annotate --crowd 1", "a task needs at least two votes"),
        ("demo --annotate --rounds 3", "--rounds cannot be combined with --annotate"),
        ("demo --annotate --web-port 65533", "a port above 65535"),
        ("config hide", "'hide'"),
    ],
)
def test_bad_input_is_one_line_and_a_status_of_two(peer: Callable[..., Result], arguments: str, words: str) -> None:
    status, out, error = peer(*arguments.split())
    assert (status, out) == (2, "")
    assert error.startswith("peer: error: ")
    assert error.count("\n") == 1
    assert words in error


def test_alone_it_shows_its_help(peer: Callable[..., Result]) -> None:
    status, out, error = peer()
    assert (status, error) == (0, "") and out == cli.build_parser().format_help()


def test_config_show_says_where_each_value_comes_from(peer: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "peer.toml").write_text("threads = 2")
    status, out, _ = peer("config", "show", "--data-dir", str(tmp_path), "--name", "anna")
    assert status == 0
    assert tomllib.loads(out)["name"] == "anna"
    assert f"threads = 2  # {tmp_path / 'peer.toml'}" in out
    assert 'name = "anna"  # command line' in out


@pytest.mark.real("processes")
def test_every_command_explains_itself(peer: Callable[..., Result], capsys: pytest.CaptureFixture[str]) -> None:
    commands = cli.build_parser().commands()
    assert {"init", "status", "train", "demo", "help"} < set(commands)
    for name in commands:
        with pytest.raises(SystemExit) as caught:
            cli.main([name, "--help"])
        assert caught.value.code == 0
        explained = capsys.readouterr().out
        assert peer("help", name) == (0, explained, "") and f"usage: peer {name}" in explained


def test_help_of_no_command_lists_all_and_of_an_unknown_one_names_the_nearest(peer: Callable[..., Result]) -> None:
    assert peer("help") == (0, cli.build_parser().format_help(), "")
    assert peer("help", "tasks", "import") == peer("help", "tasks")
    unknown = "peer: error: unknown command or setting"
    assert peer("help", "sttas") == (2, "", f"{unknown} 'sttas'; did you mean stats?\n")
    assert peer("help", "log-levle") == (2, "", f"{unknown} 'log-levle'; did you mean log_level?\n")
    assert peer("help", "nonsense") == (2, "", f"{unknown} 'nonsense'; `peer help` lists all commands\n")


def test_every_word_of_the_prompt_is_a_command_but_for_those_about_the_prompt() -> None:
    commands = cli.build_parser().commands()
    assert {name for name, word in all_commands().items() if word.only_at_prompt} == {"help", "quit"}
    for name, word in all_commands().items():
        assert (name in commands) or word.only_at_prompt


@pytest.mark.real("processes")
def test_help_and_version_answer_without_loading_what_is_heavy() -> None:
    code = (
        "import sys\nfrom peer.cli import main\ntry:\n main(['--help'])\nexcept SystemExit: pass\n"
        "heavy = ('torch', 'numpy', 'trio', 'rich', 'nacl', 'prompt_toolkit', 'aiohttp', 'asyncio')\n"
        "print('HEAVY', [name for name in heavy if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "peer demo" in out
    assert out.endswith("HEAVY []\n")


def fake_commands(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(options: object) -> None:
        raise error

    module = ModuleType("peer.commands.local_commands")
    module.run_peer = fail  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "peer.commands.local_commands", module)
    monkeypatch.setattr("peer.commands.local_commands", module, raising=False)


def test_control_c_is_one_line_and_the_status_shells_expect(peer: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (KeyboardInterrupt(), BaseExceptionGroup("", [KeyboardInterrupt(), ValueError()])):
        fake_commands(monkeypatch, error)
        assert peer("run") == (130, "", "peer: interrupted\n")


def test_what_a_person_can_mend_is_one_line_however_deep_it_was_raised(
    peer: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_commands(monkeypatch, ExceptionGroup("", [ExceptionGroup("", [UserError("the disk\nis full")])]))
    assert peer("run") == (2, "", "peer: error: the disk is full\n")


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("f:1: no text\nf:2: no text\n2 lines cannot be used", 3),
        ("f.jsonl: line 1: too long\nf.jsonl: line 12: too long\n2 lines cannot be used", 3),
        ("f:1: no text\nf:2: no text", 2),
        ("no place\nf:2: no text", 1),
    ],
)
def test_wrong_lines_of_a_file_stand_below_one_another(
    peer: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, text: str, count: int
) -> None:
    fake_commands(monkeypatch, UserError(text))
    assert peer("run")[2].count("\n") == count


def test_what_the_operating_system_says_of_a_file_is_one_line(
    peer: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_commands(monkeypatch, PermissionError(13, "Permission denied", "/data/x"))
    assert peer("run") == (2, "", "peer: error: /data/x: Permission denied; correct its path or its permissions\n")
    fake_commands(monkeypatch, OSError("a bug"))
    with pytest.raises(OSError, match="a bug"):
        peer("run")


def test_a_bug_is_not_dressed_up_as_the_persons_mistake(peer: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    fake_commands(monkeypatch, ExceptionGroup("", [UserError("x"), ValueError("y")]))
    with pytest.raises(ExceptionGroup):
        peer("run")


async def on_thread(peer: Callable[..., Result], *arguments: str) -> Result:
    return await trio.to_thread.run_sync(lambda: peer(*arguments))


@pytest.mark.real("sockets")
async def test_commands_ask_the_running_peer(peer: Callable[..., Result], tmp_path: Path, nursery: trio.Nursery) -> None:
    await nursery.start(serve_control_socket, FakeApi(), tmp_path)
    place = ("--data-dir", str(tmp_path))
    for command in ("status", "stats", "invite"):
        assert (await on_thread(peer, command, *place))[0] == 0
    assert json.loads((await on_thread(peer, "status", "--json", *place))[1])["peer"] == ME
    assert "1 of 3" in (await on_thread(peer, "approve", "abcd", *place))[1]
    assert (await on_thread(peer, "sample", "Once", "--tokens", "7", *place))[1] == "Once goes on\n"
    assert (await on_thread(peer, "sample", "Once", "--stream", *place))[1] == "Once goes on\n"
    assert "7 files" in (await on_thread(peer, "export", str(tmp_path / "out"), *place))[1]
    assert "invitation-string" in (await on_thread(peer, "console", *place, "invite"))[1]
    assert "1" * 64 in (await on_thread(peer, "console", *place, "train --rounds 20 --set seed=4"))[1], "one quoted argument"
    assert "usage: train" in (await on_thread(peer, "console", *place, "train", "--help"))[1]
    status, _, error = await on_thread(peer, "console", *place, "resign")
    assert (status, error) == (2, "peer: error: the last voter cannot resign\n")


@pytest.mark.real("sockets")
@pytest.mark.parametrize(
    ("state", "expected"), [("working", 0), ("suspended", 0), ("waiting", 3), ("behind", 3), ("joining", 3), ("halted", 4)]
)
async def test_the_exit_status_of_status_says_whether_the_peer_works(
    peer: Callable[..., Result],
    tmp_path: Path,
    nursery: trio.Nursery,
    monkeypatch: pytest.MonkeyPatch,
    state: str,
    expected: int,
) -> None:
    monkeypatch.setattr(fake_api, "STATUS", replace(STATUS, state=state, heights_behind=7, decided_seconds_ago=3700.0))
    await nursery.start(serve_control_socket, FakeApi(), tmp_path)
    status, out, _ = await on_thread(peer, "status", "--data-dir", str(tmp_path))
    assert status == expected and "1 h 1 min ago; behind by 7 heights" in out
    assert (await on_thread(peer, "console", "--data-dir", str(tmp_path), "status"))[0] == expected
    status, out, _ = await on_thread(peer, "status", "--json", "--data-dir", str(tmp_path))
    view = json.loads(out)
    assert (status, view["state"], view["heights_behind"], view["decided_seconds_ago"]) == (expected, state, 7, 3700.0)


@pytest.mark.real("sockets")
async def test_lists_are_one_json_document_with_the_fields_of_the_views(
    peer: Callable[..., Result], tmp_path: Path, nursery: trio.Nursery
) -> None:
    events = (EventView(1, 1_000, "job", "job text begins", {"job": "e" * 64}),)
    await nursery.start(serve_control_socket, FakeApi(log=list(events)), tmp_path)
    place = ("--data-dir", str(tmp_path))
    views = {"status": STATUS, "stats": STATS, "peers": PEERS, "jobs": JOBS, "rounds": ROUNDS, "invitations": INVITATIONS}
    views |= {"audits": AUDITS, "log": events, "features": MODULES, "projects": PROJECTS}
    views |= {
        "reach": REACH,
        "limits": LIMITS,
        "alerts": ALERTS,
        "disk": DISK,
        "clients": CLIENT_RUNS,
        "engines": ENGINES,
        "block": BLOCK,
        "votes": VOTES,
        "samples": SAMPLES,
    }
    by_model = {"evaluate"}  # the answer depends on a model
    assert set(views) == {name for name, word in all_commands().items() if JSON in word.arguments} - by_model
    for command, view in views.items():
        told = [await on_thread(peer, *words, "--json", *place) for words in ((command,), ("console", command))]
        assert [(status, json.loads(out)) for status, out, _ in told] == [(0, json.loads(to_json(view)))] * 2, command
    ((one,),) = [json.loads((await on_thread(peer, "rounds", "1", "--json", *place))[1])]
    assert (one["round"], one["held_out_bits_per_byte"], one["training_nats"]) == (2, 2.5, None)


def test_json_has_no_word_for_a_loss_that_is_no_number() -> None:
    assert json.loads(to_json((replace(ROUNDS[0], held_out_bits_per_byte=float("nan")),)))[0]["held_out_bits_per_byte"] is None


def test_every_command_option_and_setting_is_in_the_reference() -> None:
    commands, settings, statuses = (
        import_module(f"tools.reference.{name}").render() for name in ("commands", "settings", "exit_codes")
    )
    parsers = cli.build_parser().commands()
    assert parsers
    for name, parser in parsers.items():
        assert f"### `peer {name}`" in commands, name
        for option in parser.known_options():
            assert option in ("-h", "--help") or option in commands or f"`{option}`" in settings, f"{name} {option}"
        for action in parser.actions:
            assert f"#### `peer {name} {action.usage}`" in commands
        for status, meaning in parser.exit_statuses.items():
            assert f"| [`peer {name}`](commands.md#peer-{name}) | {status} | {meaning} |" in statuses
    for name, word in all_commands().items():
        assert f"### `{name}`" in commands or not word.only_at_prompt
    for name in setting_descriptions():
        assert f"## `{name}`\n" in settings
    for role in features.roles().values():
        assert f"`{role.name}` ({role.about})" in settings


def test_no_page_of_the_reference_names_a_path_of_this_machine() -> None:
    for _, text in render_pages():
        assert str(Path.home()) not in text and str(Path(__file__).parents[2]) not in text


def test_lines_of_the_help_are_sentences_without_a_full_stop_and_name_the_default() -> None:
    for name, parser in cli.build_parser().commands().items():
        lines = [parser.about, *(action.about for action in parser.actions)]
        for argument in parser._actions:
            lines.append(argument.help or "")
            if argument.default not in (None, False, True, "", [], 0, argparse.SUPPRESS):
                assert f"(default {argument.default})" in lines[-1], f"{name} {argument.dest}"
        for line in lines:
            assert line and not line.endswith("."), f"{name}: {line}"
            assert line[0].isupper() or re.fullmatch(r"[\w-]+(, [\w-]+)*", line), f"{name}: {line}"


@pytest.mark.parametrize("topic", ["listen", "ping-seconds", "ping_seconds", "metrics"])
def test_help_explains_a_setting(peer: Callable[..., Result], topic: str) -> None:
    status, out, error = peer("help", topic)
    assert (status, error) == (0, "") and f"- Flag: `--{topic.replace('_', '-')}`" in out and "- Default: " in out


async def run(directory: Path, line: str) -> tuple[int, str]:
    """Run a shell command and return its exit status and error output. `peer` is the program, `$HERE` its data directory."""
    program = f"{shlex.quote(sys.executable)} -m peer.cli"
    done = await trio.run_process(
        ["bash", "-c", f'peer() {{ {program} "$@"; }}; {line}'],
        capture_stderr=True,
        check=False,
        env=environment() | {"HERE": str(directory)},
        stdin=subprocess.DEVNULL,
    )
    return done.returncode, done.stderr.decode()


@pytest.mark.real("sockets")
async def test_an_output_that_takes_nothing_is_one_line(tmp_path: Path, nursery: trio.Nursery) -> None:
    await nursery.start(serve_control_socket, FakeApi(), tmp_path)
    told = "peer: error: cannot write to standard output: No space left on device\n"
    assert await run(tmp_path, "peer peers --data-dir $HERE > /dev/full") == (2, told)
    assert await run(tmp_path, "peer config show > /dev/full") == (2, told)
    assert await run(tmp_path, "peer help > /dev/full") == (2, told)


@pytest.mark.real("sockets")
async def test_streams_that_are_closed_or_know_few_characters_are_no_failure(tmp_path: Path, nursery: trio.Nursery) -> None:
    await nursery.start(serve_control_socket, FakeApi(), tmp_path)
    assert await run(tmp_path, "peer status --data-dir $HERE >&-") == (0, "")
    assert await run(tmp_path, "peer status --data-dir $HERE <&- >&- 2>&-") == (0, "")
    assert await run(tmp_path, "PYTHONIOENCODING=ascii peer peers --data-dir $HERE > $HERE/shown") == (0, "")
    assert r"\u2192h:1" in (tmp_path / "shown").read_text(), "an arrow, escaped"


@pytest.mark.real("another process")
def test_python_without_assertions_is_refused() -> None:
    ended = subprocess.run([sys.executable, "-O", "-m", "peer.cli", "--help"], capture_output=True, text=True)
    assert ended.returncode == 2 and "PYTHONOPTIMIZE" in ended.stderr and ended.stderr.count("\n") == 1


class Interrupted:
    """A program that gets Ctrl-C during its import of `peer.cli`."""

    def find_spec(self, name: str, *_: object) -> None:
        if name == "peer.cli":
            raise KeyboardInterrupt


def test_an_interrupt_while_modules_are_imported_is_told_like_a_later_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "peer.cli")
    monkeypatch.delattr(package, "cli")
    assert __main__.main() == exit_statuses.INTERRUPTED
    assert capsys.readouterr() == ("", "peer: interrupted\n")
