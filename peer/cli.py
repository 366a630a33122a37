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

from features.command_arguments import JSON
from features.lazy_import import garbage_collection_paused, import_object
from features.nearest_names import suggest_nearest
from peer import VERSION, features
from peer.commands.command_line_parser import CommandLineParser, parse_line, parse_tokens, settings_from_options
from peer.commands.standard_streams import EXIT_INTERRUPTED, is_output_closed, mute_output, open_missing_streams
from peer.settings.config import Config, format_settings, setting_descriptions
from protocol.errors import UserError
from training.engine_resources import EngineResources

EXIT_USER_ERROR = 2
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)  # errno of failed writes to a stream

# Setting -> the placeholder of its value in the help, in the order of the help. None: a flag with `--no-` form and no value.
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
    },
    "evaluate": None,
    "local_data": "PATH",
    "approve_invited": "N",
    "payloads_gb": "N",
    "retire_after_days": "N",
    "stand": None,
    "log_level": "LEVEL",
    "log_format": "FORMAT",
    "log_file": "FILE",
    "control_socket": "PATH",
}

EXAMPLES = """examples:
  peer demo                                    four peers on this machine, one of them dishonest
  peer demo --data FILE                        train on a text of your own
  peer init --network lab                      create a network
  peer run --listen 0.0.0.0:7700               run its first peer
  peer invite                                  print an invitation for another person
  peer join INVITATION                         join the network on another machine
  peer console                                 open a prompt at the running peer

`peer COMMAND --help` explains one command."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. An error that the user can fix prints a message and gives status 2."""
    open_missing_streams()
    try:
        try:
            if sys.flags.optimize:  # peers agree on failed assertions: `ledger.core.deterministic_failures`
                raise UserError("Python runs without assertions: run this command without -O and PYTHONOPTIMIZE")
            words = sys.argv[1:] if arguments is None else arguments
            options = build_parser(*words[:1]).parse_args(words)
            return int(options.action(options) or 0)
        finally:
            sys.stdout.flush()  # a failed write must raise here, and not at the interpreter's exit
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
    """Return the first error of a nested group. A `UserError` takes precedence over other errors."""
    error = (group.subgroup(UserError) or group).exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


def _status_of(error: BaseException) -> int | None:
    """Print the error and return the exit status. Return None, without a message, for an error that the user cannot fix."""
    if isinstance(error, BrokenPipeError):  # the reader has closed the pipe, as `head` does after its lines
        mute_output()
        return 1
    if not isinstance(error, OSError):
        return _print_error(error)
    if error.filename is not None:
        return _print_error(UserError(f"{error.filename}: {error.strerror}; correct its path or its permissions"))
    if error.errno not in UNWRITABLE:
        return None
    mute_output()
    return _print_error(UserError(f"cannot write to standard output: {error.strerror}"))


def _print_error(error: BaseException) -> int:
    """Print an error on one line. A list of wrong lines of a file keeps one line each, with a summary at the end."""
    lines = str(error).splitlines()
    between = "\n" if all(re.match(r".+?:( line )?\d+: ", line) for line in lines[:-1]) else " "
    with contextlib.suppress(OSError):  # the reader of standard error is gone
        print("peer: error: " + between.join(lines), file=sys.stderr)
    return EXIT_USER_ERROR


def _interrupted() -> int:
    print("peer: interrupted", file=sys.stderr)
    return EXIT_INTERRUPTED


# Grammar -------------------------------------------------------------------------------------------------------------


def build_parser(command: str = "") -> CommandLineParser:
    """Return the grammar of all commands, or of those that found or run a peer if `command` is one: a daemon needs no others."""
    parser = CommandLineParser(
        prog="peer",
        description="Train a model with people you do not trust, without a server: two thirds of the voters decide each step.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"folkmoot {VERSION}")
    parser.set_defaults(action=lambda options: parser.print_help())  # `peer` without a command
    commands = parser.add_subparsers(dest="command", metavar="command")

    def add(name: str, about: str, action: Callable[[argparse.Namespace], Any], more: str = "") -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}. {more}".strip())
        made.set_defaults(action=action)
        return made

    _add_network_commands(add)
    if command not in commands.choices:
        _add_control_commands(add)
        _add_offline_commands(add)
        _add_commands_about_commands(add)
    return parser


def _add_network_commands(command: Callable[..., argparse.ArgumentParser]) -> None:
    init = command("init", "create a network and the identity of its first peer", _lazy_command("init_network"))
    _add_place(init)
    init.add_argument("--network", required=True, metavar="NAME", help="name of the network")
    init.add_argument("--name", help="name of this peer, which people see beside its id")
    init.add_argument("--listen", metavar="ADDRESS", help="address where this peer accepts connections, also in later runs")
    init.add_argument(
        "--voter", action="append", default=[], metavar="KEY", help="peer id of a further founding voter; may be repeated"
    )
    identity = command(
        "identity", "create the identity of this peer if it has none, and print its peer id", _lazy_command("show_identity")
    )
    _add_place(identity)
    about = "give a stopped peer a new key, if the old one may be stolen or its vote log is lost"
    rekey = command("rekey", about, _lazy_command("rekey_peer"), "The network decides the change when the peer runs again.")
    _add_place(rekey)
    rekey.add_argument("--bootstrap", metavar="ADDRESS,…", help="address of another voter, if the vote log is lost")
    join = command(
        "join", "join the network of an invitation", _join, "The peer catches up, becomes a member, and keeps running."
    )
    join.add_argument(
        "invite",
        metavar="INVITATION",
        nargs="?",
        default="",
        help="output of `peer invite`, @FILE, or - for standard input; default: the variable PEER_INVITATION",
    )
    _add_place(join)
    _add_settings(join)
    epilog = "In a terminal it shows the prompt `peer>`."
    run = command("run", "run the peer of a data directory", _lazy_command("run_peer"), epilog)
    _add_place(run)
    _add_settings(run)


def _add_place(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data-dir", dest="data_directory", metavar="DIR", help="data directory of the peer (default ~/.local/share/folkmoot)"
    )
    parser.add_argument("--config", metavar="FILE", help="TOML settings (default: peer.toml in the data directory)")


def _add_settings(parser: argparse.ArgumentParser) -> None:
    about = setting_descriptions()
    told = "; ".join(f"{role.name}: {role.about}" for role in features.roles().values())
    about["role"] = f"{told} (default full)"
    about["listen"] += " (default 0.0.0.0:7700)"
    about["engine"] += f": {', '.join(features.engines())} (default pytorch)"
    of_features = {
        name: None if isinstance(setting.default, bool) else "VALUE" for name, setting in features.feature_settings().items()
    }
    for name, metavar in (SETTING_METAVARS | of_features).items():
        flag = f"--{name.replace('_', '-')}"
        if metavar is None:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=about[name])
        else:
            parser.add_argument(flag, metavar=metavar, help=about[name])
    parser.add_argument(
        "--no-console", dest="console", action="store_false", help="write the log instead of the prompt to the terminal"
    )


def _add_control_commands(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the commands that ask the running peer. The prompt has the same commands."""
    from peer.commands.definitions import all_commands

    console = command(
        "console",
        "open the prompt `peer>` at a running peer",
        _console,
        "Without a terminal it reads commands from standard input.",
    )
    _add_place(console)
    console.add_argument("line", nargs=argparse.REMAINDER, metavar="COMMAND …", help="run this command of the prompt, and exit")
    for word in all_commands().values():
        if not word.only_at_prompt:
            made = command(word.name, word.about, _ask)
            _add_place(made)
            word.add_arguments(made)


def _add_offline_commands(command: Callable[..., argparse.ArgumentParser]) -> None:
    audit = command(
        "audit", "replay an export offline from its genesis, and check each certificate and root", _lazy_command("run_audit")
    )
    audit.add_argument("directory", metavar="DIR", help="export of `peer export`")
    about = "check a file of `peer prove` offline, without a data directory, and show what it proves"
    verify = command(
        "verify", about, _lazy_command("verify_row_proof"), "Without --genesis or --chain-id it trusts the genesis in the file."
    )
    verify.add_argument("file", metavar="FILE", help="file of `peer prove`")
    verify.add_argument("--genesis", metavar="FILE", help="genesis of the network, from a data directory or an export")
    verify.add_argument("--chain-id", metavar="ID", help="chain id of the network, from `peer status --json`")
    verify.add_argument(
        "--unknown-module",
        action="store_true",
        help="trust the file about the tables of a module that this program does not know",
    )
    JSON.add_to(verify)
    about = "print the manifest of a folder of token shards; save it there as manifest.json"
    shards = command("shards", about, _lazy_command("describe_token_shards"), "Then `peer train --data DIR` trains on them.")
    shards.add_argument(
        "directory", metavar="DIR", help="folder with *.bin files of 16-bit little-endian token ids and their tokenizer.json"
    )
    about = "check port, peers, clock, key, disk, memory and version, and show faults with remedies"
    doctor = command(
        "doctor",
        about,
        _lazy_command("run_doctor"),
        "The peer may be running or stopped. Exit status: 0, 3 (warnings) or 4 (faults).",
    )
    _add_place(doctor)
    _add_settings(doctor)
    JSON.add_to(doctor)
    config = command("config", "show the settings and the origin of each", _config)
    config.add_argument("what", choices=["show"], metavar="show", help="print every setting as TOML")
    _add_place(config)
    _add_settings(config)
    demo = import_object("demo.command_line")  # imported by name: the demo starts peers, so `peer` must not import it
    demo.add_arguments(command("demo", "run a whole network on this machine, with a dishonest trainer", demo.run_demo))


def _add_commands_about_commands(command: Callable[..., argparse.ArgumentParser]) -> None:
    from peer.commands.shell_completion import SHELLS

    explain = command("help", "show this list, or the help of a command", _help)
    explain.add_argument("topic", nargs="?", default="", metavar="COMMAND", help="command")
    explain.add_argument("more", nargs="*", metavar="ACTION", help="action of the command (its help shows all actions)")
    about = "print a script that completes commands and their options in a shell"
    completion = command("completion", about, _completion, 'For bash: eval "$(peer completion bash)"')
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
    if options.topic and options.topic not in commands:
        raise UserError(f"no command {options.topic!r}{suggest_nearest(options.topic, commands)}")
    (commands[options.topic] if options.topic else parser).print_help()


def _completion(options: argparse.Namespace) -> None:
    from peer.commands.definitions import all_commands
    from peer.commands.shell_completion import completion_script

    print(completion_script(options.shell, build_parser(), all_commands()), end="")


def _client(options: argparse.Namespace) -> tuple[Any, Config]:
    from peer.api import control_socket

    place = argparse.Namespace(data_directory=options.data_directory, config=options.config)  # a command's --name is no setting
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
            raise UserError("the command is empty: `peer console help` lists all commands")
        return trio.run(partial(console.execute_attached, client, command, make_printer()))

    async def attach() -> int:
        await client.status()  # this fails at once if no peer runs
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
