"""The command `peer`. Each command imports its own heavy modules, so that `peer --help` answers at once."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from features import exit_statuses
from features.command_arguments import JSON
from features.commands import add_arguments_and_actions
from features.lazy_import import garbage_collection_paused, import_object
from features.nearest_names import suggest_nearest
from peer import features
from peer.commands.command_line_parser import (
    CommandLineParser,
    help_parts,
    parse_line,
    parse_tokens,
    settings_from_options,
)
from peer.commands.standard_streams import is_output_closed, mute_output, open_missing_streams
from peer.settings.config import (
    DEFAULT_DATA_DIRECTORY,
    RESOURCE_SETTINGS,
    Config,
    describe_setting,
    format_settings,
    setting_default,
    setting_descriptions,
    setting_type,
)
from protocol.errors import UserError
from training.engine_resources import EngineResources

# Error numbers of a failed write to standard output.
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)

# Setting -> placeholder of its value, in the order of the help. None stands for a flag without a value, which also has a `--no-`
# form.
SETTING_METAVARS: dict[str, str | None] = {
    "role": "ROLE",
    "listen": "ADDRESS",
    "advertise": "ADDRESS,…",
    "bootstrap": "ADDRESS,…",
    "relay": "WHEN",
    "upnp": None,
    "mdns": None,
    "ping_seconds": "N",
    "suspect_seconds": "N",
    "name": "NAME",
    "engine": "ENGINE",
    **{
        field.name: None if isinstance(field.default, bool) else "N" if isinstance(field.default, int) else "NAME"
        for field in dataclasses.fields(EngineResources)
        if field.name in RESOURCE_SETTINGS
    },
    "evaluate": None,
    "local_data": "PATH",
    "approve_invited": "N",
    "payloads_gb": "N",
    "keep_batches_gb": "N",
    "retire_after_days": "N",
    "stand": None,
    "log_level": "LEVEL",
    "log_format": "FORMAT",
    "log_file": "FILE",
    "control_socket": "PATH",
}

EXAMPLES = """examples:
  peer demo                                    run a network of four peers on this machine, one of them dishonest
  peer demo --data FILE                        train on a text of your own
  peer init --network lab                      create a network
  peer run --listen 0.0.0.0:7700               run this peer
  peer invite                                  print an invitation for another peer
  peer join INVITATION                         join the network on the other machine
  peer console                                 attach a prompt to the running peer

`peer help COMMAND` explains a command, and `peer help SETTING` a setting."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. An error that the user can fix prints a message and gives status 2."""
    open_missing_streams()
    try:
        try:
            # `python -O` drops assertions, but all peers must fail at the same ones: `ledger.core.deterministic_failures`.
            if sys.flags.optimize:
                raise UserError("Python runs without assertions: remove -O and PYTHONOPTIMIZE")
            words = sys.argv[1:] if arguments is None else arguments
            options = build_parser(*words[:1]).parse_args(words)
            return int(options.action(options) or 0)
        finally:
            sys.stdout.flush()  # a failed write raises an error here, where it is reported, and not at the interpreter's exit
    except KeyboardInterrupt:
        return _interrupted()
    except (UserError, OSError) as error:
        status = _status_of(error)
        if status is None:
            raise
        return status
    except BaseExceptionGroup as group:
        if group.subgroup(KeyboardInterrupt):
            return _interrupted()
        first = _first(group)
        is_of_link = isinstance(first, BrokenPipeError) and not is_output_closed()
        status = None if is_of_link or group.split((UserError, OSError))[1] is not None else _status_of(first)
        if status is None:
            raise
        return status


def _first(group: BaseExceptionGroup[Any]) -> BaseException:
    """Return the first error in a nested exception group, or the first `UserError` if the group contains one."""
    error = (group.subgroup(UserError) or group).exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


def _status_of(error: BaseException) -> int | None:
    """Print the error and return its exit status. For an error that the user cannot fix, print nothing and return None."""
    # The program that reads our output has closed the pipe, as `head` does after its lines.
    if isinstance(error, BrokenPipeError):
        mute_output()
        return exit_statuses.FAILURE
    if not isinstance(error, OSError):
        return _print_error(error)
    if error.filename is not None:
        return _print_error(UserError(f"{error.filename}: {error.strerror}; correct its path or its permissions"))
    if error.errno not in UNWRITABLE:
        return None
    mute_output()
    return _print_error(UserError(f"cannot write to standard output: {error.strerror}"))


def _print_error(error: BaseException) -> int:
    """Print an error on one line. A list of a file's wrong lines is printed with one line for each, and a summary at the end."""
    lines = str(error).splitlines()
    between = "\n" if all(re.match(r".+?:( line )?\d+: ", line) for line in lines[:-1]) else " "
    with contextlib.suppress(OSError):  # the program that reads standard error may have ended
        print("peer: error: " + between.join(lines), file=sys.stderr)
    return exit_statuses.USER_ERROR


def _interrupted() -> int:
    print("peer: interrupted", file=sys.stderr)
    return exit_statuses.INTERRUPTED


# Grammar -------------------------------------------------------------------------------------------------------------


class PrintVersion(argparse.Action):
    """The option `--version`. It finds the commit only when it is used, because a checkout must start git for it."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from peer.source_commit import describe_version

        print(describe_version())
        parser.exit()


def build_parser(command: str = "") -> CommandLineParser:
    """Return the parser of all commands. If `command` creates or runs a peer, the parser has only the commands that do so."""
    parser = CommandLineParser(
        prog="peer",
        description="Train one model with people whom you do not trust. There is no server, and voters decide every step.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=PrintVersion, nargs=0, help="Show the version and the commit")
    parser.set_defaults(action=lambda options: parser.print_help())  # `peer` without a command
    commands = parser.add_subparsers(dest="command", metavar="command")

    def add(topic: str, name: str, about: str, action: Callable[[argparse.Namespace], Any], **help: Any) -> CommandLineParser:
        parser.topics.setdefault(topic, []).append(name)
        made = commands.add_parser(name, help=about, about=about, **help)
        made.set_defaults(action=action)
        return made

    _add_network_commands(partial(add, "Create and run a peer"))
    if command not in commands.choices:
        _add_control_commands(add)
        _add_offline_commands(partial(add, "Without a running peer"))
        _add_commands_about_commands(partial(add, "Help"))
    return parser


def _add_network_commands(command: Callable[..., CommandLineParser]) -> None:
    init = command(
        "init",
        "Create a network, and this peer's identity",
        _lazy_command("init_network"),
        details="""
            Writes the genesis of the network and the settings of this peer, and prints the next commands. Founders vote from the
            first block on. With several founders, each runs `peer identity` first, and one of them runs `peer init` with the peer
            ids of the others. No block is decided before a quorum of the founders runs: 3 of 4, 5 of 7.

                peer init --network lab --name anna
                peer init --network lab --voter PEERID --voter PEERID --voter PEERID
            """,
    )
    _add_place(init)
    init.add_argument("--network", required=True, metavar="NAME", help="Name of the network")
    init.add_argument("--name", metavar="NAME", help="Name of this peer, stored for later runs")
    init.add_argument("--listen", metavar="ADDRESS", help="Addresses where this peer accepts connections, stored for later runs")
    init.add_argument("--voter", action="append", default=[], metavar="KEY", help="Peer id of another founder; repeatable")
    identity = command(
        "identity",
        "Print the peer id of this peer, and create its identity if there is none",
        _lazy_command("show_identity"),
    )
    _add_place(identity)
    rekey = command(
        "rekey",
        "Replace the key of a stopped peer",
        _lazy_command("rekey_peer"),
        details="""
            Use it if somebody else may have the key, or if the vote log of this peer is lost. The next `peer run` asks the
            network for the change, and votes with the new key two heights after the decision. If a crash interrupts the
            command, repeat it.
            """,
    )
    _add_place(rekey)
    rekey.add_argument("--bootstrap", metavar="ADDRESS,…", help="Address of another voter, if the vote log is lost")
    join = command(
        "join",
        "Join the network of an invitation and run the peer",
        _join,
        details="""
            The peer downloads the chain, is admitted as a member, and keeps running. Repeat the command to replace the settings
            that it names. Later starts need only `peer run`.

            The string of an invitation is secret until it is used. As an argument it is removed from the list of processes at
            once, but a shell keeps it in its history. To avoid that, write `@FILE`, `-` for standard input, or set the variable
            `PEER_INVITATION`.
            """,
    )
    join.add_argument(
        "invite",
        metavar="INVITATION",
        nargs="?",
        default="",
        help="String from `peer invite`, @FILE, or - for standard input (default $PEER_INVITATION)",
    )
    _add_place(join)
    _add_settings(join)
    run = command(
        "run",
        "Run the peer of a data directory",
        _lazy_command("run_peer"),
        details="""
            In a terminal it shows the prompt `peer>`. Without a terminal, or with `--no-console`, it logs. `quit`, Ctrl-D and
            SIGTERM stop the peer, and so does Ctrl-C where it logs. A peer that shows its prompt or its log in a terminal also
            stops when the terminal closes. A peer that was killed continues after the next `peer run`.

            Each option except `--no-console` is a setting. `peer help SETTING` explains one of them.
            """,
    )
    _add_place(run)
    _add_settings(run)


def _add_place(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data-dir",
        dest="data_directory",
        metavar="DIR",
        help=f"Data directory of the peer (default {DEFAULT_DATA_DIRECTORY})",
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings (default peer.toml in the data directory)")


def _add_settings(parser: argparse.ArgumentParser) -> None:
    of_features = {
        name: None if isinstance(setting.default, bool) else "VALUE" for name, setting in features.feature_settings().items()
    }
    for name, metavar in (SETTING_METAVARS | of_features).items():
        about, flag = _setting_help(name), f"--{name.replace('_', '-')}"
        if metavar is None:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=about)
        else:
            parser.add_argument(flag, metavar=metavar, help=about)
    parser.add_argument("--no-console", dest="console", action="store_false", help="Log instead of showing the prompt")


def _setting_help(name: str) -> str:
    """Return the help of a setting's option: its meaning, the choices of some settings, and the default."""
    about = setting_descriptions()[name]
    if name == "role":
        about += f". {'; '.join(f'{role.name}: {role.about}' for role in features.roles().values())}"
    elif name in ("engine", "relay", "log_level", "log_format"):
        about += f": {setting_type(name)}"
    return f"{about} (default {default})" if (default := setting_default(name)) else about


def _add_control_commands(command: Callable[..., CommandLineParser]) -> None:
    """Add the commands that call the running peer. The prompt has the same commands."""
    from peer.commands.definitions import commands_by_topic

    console = command(
        "Create and run a peer",
        "console",
        "Attach the prompt to a running peer, or run one of its commands",
        _console,
        details="""
            Without a terminal it reads commands from standard input, one per line. `quit` and Ctrl-D detach, and the peer keeps
            running.

                peer console
                peer console approve ben
                echo stats | peer console
            """,
        exit_statuses={exit_statuses.FAILURE: "A command of the script failed; its error is in the output"},
    )
    _add_place(console)
    console.add_argument("line", nargs=argparse.REMAINDER, metavar="COMMAND …", help="Command of the prompt and its arguments")
    for topic, words in commands_by_topic().items():
        for word in words:
            if not word.only_at_prompt:
                made = command(topic, word.name, word.about, _ask, **help_parts(word))
                _add_place(made)
                word.add_arguments(made)


def _add_offline_commands(command: Callable[..., CommandLineParser]) -> None:
    audit = command(
        "audit",
        "Verify an export: every certificate, block and state root, without a network",
        _lazy_command("run_audit"),
        details="""
            It replays the export from its genesis and names the first file that is wrong. It prints the chain id: compare it with
            the chain id that you know, because anybody can create a chain. For each job it prints how many updates were
            re-executed before the vote and which voters vouched for them. It re-executes steps of client runs whose data the
            exporting peer kept (setting `keep_batches_gb`), and no other training. It names each false update with its trainer:
            the exit status is then 1. It counts the steps without data, which nobody can re-execute.
            """,
    )
    audit.add_argument("directory", metavar="DIR", help="Folder from `peer export`, or data directory of a stopped peer")
    verify = command(
        "verify",
        "Verify the proof of a table's row, without a network or a data directory",
        _lazy_command("verify_row_proof"),
        details="""
            It checks all signatures from the genesis to the certifying block, and all hashes from the block to the row. It prints
            the network, the height, the time, the table, the key and the value. Without `--genesis` or `--chain-id` it trusts the
            genesis in the file: then compare the printed chain id with the one that you know.
            """,
    )
    verify.add_argument("file", metavar="FILE", help="File from `peer prove`")
    verify.add_argument(
        "--genesis",
        metavar="FILE",
        help="Genesis of the network: `genesis` of a data directory, or `genesis.msgpack` of an export",
    )
    verify.add_argument("--chain-id", metavar="ID", help="Chain id of the network, from `peer status --json`")
    verify.add_argument(
        "--unknown-module",
        action="store_true",
        help="Accept a module that this program does not know: only the file declares the field as a table",
    )
    JSON.add_to(verify)
    shards = command(
        "shards",
        "Print the manifest of a folder of token shards",
        _lazy_command("describe_token_shards"),
        details="""
            Save the output as `manifest.json` in the folder. `peer train --data DIR` then trains on these tokens. The files
            `*.bin` hold token ids as unsigned 16-bit little-endian numbers. `tokenizer.json` is their byte-level BPE; without it
            tokens are bytes, and 256 is the end of a text.

                peer shards corpus > manifest.json && mv manifest.json corpus/
            """,
    )
    shards.add_argument("directory", metavar="DIR", help="Folder with `*.bin` and perhaps `tokenizer.json`")
    from peer.commands import api_key_commands

    key = command(
        "key",
        api_key_commands.ABOUT,
        api_key_commands.manage_api_keys,
        details=api_key_commands.DETAILS,
        actions=api_key_commands.ACTIONS,
    )
    _add_place(key)
    add_arguments_and_actions(key, api_key_commands.ARGUMENTS, api_key_commands.ACTIONS)
    doctor = command(
        "doctor",
        "Check port, peers, clock, key, disk, memory and version, and suggest remedies",
        _lazy_command("run_doctor"),
        details="It works with a running and with a stopped peer, and takes the settings of `peer run`.",
        exit_statuses={
            exit_statuses.SUCCESS: "All checks passed",
            exit_statuses.DEGRADED: "There are warnings",
            exit_statuses.UNUSABLE: "There are faults: the peer cannot run or cannot take part",
        },
    )
    _add_place(doctor)
    _add_settings(doctor)
    JSON.add_to(doctor)
    config = command("config", "Print all settings as TOML, with the source of each value", _config)
    config.add_argument("what", choices=["show"], metavar="show", help="The word show")
    _add_place(config)
    _add_settings(config)
    # Imported by its name: the demo starts peers, so modules of `peer` must not import it.
    demo = import_object("demo.command_line")
    demo.add_arguments(command("demo", demo.ABOUT, demo.run_demo, details=demo.DETAILS, exit_statuses=demo.EXIT_STATUSES))


def _add_commands_about_commands(command: Callable[..., CommandLineParser]) -> None:
    from peer.commands.shell_completion import SHELLS

    explain = command("help", "Show all commands, or explain a command or a setting", _help)
    explain.add_argument("topic", nargs="?", default="", metavar="COMMAND", help="Command or setting")
    explain.add_argument("more", nargs="*", metavar="ACTION", help="Action of the command, whose help has all of them")
    completion = command(
        "completion",
        "Print a completion script for a shell",
        _completion,
        details="""
            The script completes commands, options and their values.

                eval "$(peer completion bash)"      # in ~/.bashrc
                source <(peer completion zsh)       # in ~/.zshrc, after compinit
                peer completion fish > ~/.config/fish/completions/peer.fish
            """,
    )
    completion.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))


# Actions -------------------------------------------------------------------------------------------------------------


def _lazy_command(name: str) -> Callable[[argparse.Namespace], Any]:
    def action(options: argparse.Namespace) -> Any:
        with garbage_collection_paused():
            from peer.commands import local_commands

        return getattr(local_commands, name)(options)

    return action


def _config(options: argparse.Namespace) -> None:
    print(format_settings(settings_from_options(options)), end="")


def _help(options: argparse.Namespace) -> None:
    parser = build_parser()
    commands = parser.commands()
    setting = options.topic.replace("-", "_")
    if setting in setting_descriptions() and options.topic not in commands:
        print(describe_setting(setting))
        return
    if options.topic and options.topic not in commands:
        hint = suggest_nearest(setting, (*commands, *setting_descriptions()))
        hint = hint if "did you mean" in hint else "; `peer help` lists all commands"
        raise UserError(f"unknown command or setting {options.topic!r}{hint}")
    (commands[options.topic] if options.topic else parser).print_help()


def _completion(options: argparse.Namespace) -> None:
    from peer.commands.definitions import all_commands
    from peer.commands.shell_completion import completion_script

    print(completion_script(options.shell, build_parser(), all_commands()), end="")


def _client(options: argparse.Namespace) -> tuple[Any, Config]:
    from peer.api import control_socket

    # A command's own `--name` is not the setting `name`.
    place = argparse.Namespace(data_directory=options.data_directory, config=options.config)
    config = settings_from_options(place).config
    return control_socket.make_client(config.data_directory, config.control_socket), config


def _console(options: argparse.Namespace) -> int:
    import trio

    from peer.commands import console
    from peer.commands.definitions import all_commands
    from peer.commands.table_renderer import make_printer
    from peer.settings.data_directory import DataDirectory

    options.line = _place_taken(options)
    client, config = _client(options)
    if options.line:
        command = (
            parse_line(all_commands(), options.line[0]) if len(options.line) == 1 else parse_tokens(all_commands(), options.line)
        )
        if command is None:
            raise UserError("empty command: `peer console help` lists all commands")
        return trio.run(partial(console.execute_attached, client, command, make_printer()))

    async def attach() -> int:
        await client.status()  # fails at once if no peer runs on this data directory
        return await console.run_console(client, attached=True, history=DataDirectory(config.data_directory).history)

    return trio.run(attach)


def _place_taken(options: argparse.Namespace) -> list[str]:
    """Move `--data-dir` and `--config` from the words of a console command into `options`, and return the other words."""
    place = CommandLineParser(prog="console", add_help=False)
    _add_place(place)
    return argparse.ArgumentParser.parse_known_args(place, options.line, options)[1]


def _join(options: argparse.Namespace) -> Any:
    from peer.commands.standard_input import hide_argument, read_invitation

    hide_argument(options.invite)
    options.invite = read_invitation(options.invite)
    return _lazy_command("join_network")(options)


def _ask(options: argparse.Namespace) -> int:
    import trio

    from peer.commands import console
    from peer.commands.standard_input import standard_input_as_file
    from peer.commands.table_renderer import make_printer

    client, config = _client(options)
    with standard_input_as_file(options, config.data_directory):
        return trio.run(partial(console.execute_attached, client, options, make_printer()))


if __name__ == "__main__":
    sys.exit(main())
