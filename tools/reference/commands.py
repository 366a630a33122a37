"""The page of commands: arguments, options, defaults and exit statuses of each command, from the parsers."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator
from inspect import cleandoc

from features.commands import OPTIONS_OF
from peer import cli
from peer.commands.command_line_parser import CommandLineParser, make_command_parser
from peer.commands.definitions import all_commands
from peer.settings.config import setting_descriptions
from tools.reference import table

INTRODUCTION = """\
# Commands

`python -m tools.reference` writes this page from the declarations. `peer help COMMAND` prints the same.

The [prompt](#the-prompt) `peer>` has the same commands without `peer`, except those that [need no running
peer](#without-a-running-peer) or [create and run one](#create-and-run-a-peer). `peer --version` prints the version and the
commit.

These options are not repeated below:

- `--help` explains a command. At the prompt, `help COMMAND` does.
- `--data-dir DIR` and `--config FILE` name the peer, for each command that creates, runs or asks one.
- Each [setting](settings.md) is an option of `peer run`, `peer join`, `peer doctor` and `peer config`.

An error is one line on standard error with the value and the remedy, and [exit status](exit-codes.md) 2. A file with several
wrong lines has one line for each. If the peer does not answer for ten seconds, the command says so and keeps waiting.

PEER is the name of a member, or the first characters of its peer id. JOB is the name of a job or the first characters of its
id. JOB@ROUND is its model after ROUND rounds. Rounds count from 1 in tables, logs and pages, and from 0 in JSON. The fields
of `--json` are those of the views in `protocol/api.py`.

`-` in place of a file is standard input, once in a command: for `train FILE` and `--data`, `tasks import FILE` and
`--guidelines`, `rlhf start --preferences` and `--blocklist`. After 60 seconds without input the command fails. Files must be
regular: pipes, sockets and devices are refused.
"""
PROMPT = """\
## The prompt

`peer run` and `peer console` show the prompt in a terminal. It begins with the network, the peer, its address and its state.
A leading `peer` is ignored: `peer approve ben` is `approve ben`.

| key | effect |
|---|---|
| Tab | completes a command or an option |
| arrow keys | recall earlier lines |
| Ctrl-C | drops the typed line, or ends the running command; its request may still be decided |
| Ctrl-C twice on an empty line, Ctrl-D | quits |

After `quit`, the peer of `peer run` stops, and the peer of `peer console` keeps running. Above the typed line the prompt shows
events: links, members, candidates with the command that approves them, jobs, warnings, and once a minute the held-out loss. It
shows at most ten events a minute; `log` has all of them.

Peers have names in all output. A name of several members is followed by the first characters of the id. A narrow terminal drops
columns, and names them below the table; long names end in `…`. Output to a pipe is complete, with one row per line.
"""
PLACE = ("data_directory", "config")  # options of nearly all commands, which the tables leave out
DEFAULT_IN_HELP = re.compile(r" \(default (.+)\)$")


def render() -> str:
    parser = cli.build_parser()
    commands = parser.commands()
    parts = [INTRODUCTION, *(f"- [{title}](#{_anchor(title)})" for title in parser.topics), "- [The prompt](#the-prompt)\n"]
    for title, names in parser.topics.items():
        parts.append(f"## {title}\n")
        for name in names:
            parts += _command(f"peer {name}", commands[name])
    parts.append(PROMPT)
    for name, command in all_commands().items():
        if command.only_at_prompt:
            parts += _command(name, make_command_parser(command))
    return "\n".join(parts).rstrip() + "\n"


def _anchor(title: str) -> str:
    return re.sub(r"[^\w -]", "", title).lower().replace(" ", "-")


def _command(title: str, parser: CommandLineParser) -> Iterator[str]:
    """Yield the lines of a command's section."""
    of_actions = {action.name: _options_of(parser, action.name) for action in parser.actions}
    grouped = {id(option) for options in of_actions.values() for option in options}
    omitted = (*PLACE, "help", "action_name", *(setting_descriptions() if "--ping-seconds" in parser.known_options() else ()))
    listed = [argument for argument in parser._actions if argument.dest not in omitted]
    options = [argument for argument in listed if argument.option_strings]
    words = [_placeholder(argument) for argument in parser._actions if not argument.option_strings]
    words += [f"{option.option_strings[0]} {option.metavar}" for option in options if option.required]
    words += ["[options]"] * any(not option.required for option in options)
    yield from (f"### `{title}`\n", f"{parser.about}.\n", f"    {' '.join([title, *words])}\n")
    if parser.details:
        yield f"{parser.details}\n"
    yield from _table(argument for argument in listed if id(argument) not in grouped)
    for action in parser.actions:
        yield from (f"#### `{title} {action.usage}`\n", f"{action.about}.\n")
        if action.description:
            yield f"{cleandoc(action.description)}\n"
        yield from _table(of_actions[action.name])
    if parser.exit_statuses:
        yield from table(("exit status", "meaning"), ((str(status), meaning) for status, meaning in parser.exit_statuses.items()))


def _options_of(parser: CommandLineParser, action: str) -> list[argparse.Action]:
    return [
        option
        for group in parser._action_groups
        if (group.title or "").startswith(OPTIONS_OF) and action in (group.title or "").removeprefix(OPTIONS_OF).split(" and ")
        for option in group._group_actions
    ]


def _placeholder(argument: argparse.Action) -> str:
    name = str(argument.metavar or argument.dest)
    return {"?": f"[{name}]", "*": f"[{name} …]", "+": f"{name} …", argparse.REMAINDER: f"[{name}]"}.get(
        str(argument.nargs), name
    )


def _table(arguments: Iterable[argparse.Action]) -> list[str]:
    rows = [_row(argument) for argument in arguments]
    return table(("argument", "meaning", "default"), rows) if rows else []


def _row(argument: argparse.Action) -> tuple[str, str, str]:
    about = (argument.help or "").replace("%%", "%")
    default = DEFAULT_IN_HELP.search(about)
    value = "" if argument.nargs == 0 else f" {argument.metavar or '|'.join(map(str, argument.choices or ()))}"
    names = ", ".join(f"{name}{value}" for name in argument.option_strings) or _placeholder(argument)
    return f"`{names}`", about[: default.start()] if default else about, default[1] if default else ""
