"""Completion scripts of `peer` for shells, generated from the grammar of the command line.

`peer console COMMAND` completes like `peer COMMAND`, since these two have the same arguments.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from peer.commands.command_line_parser import CommandLineParser

SHELLS = ("bash", "zsh", "fish")


# Kinds of values that the shell itself completes, and the metavars of arguments with such a value.
DIRECTORY, FILE = "directory", "file"
PATH_METAVARS = {"DIR": DIRECTORY, "FILE": FILE, "PATH": FILE}
COMMAND_METAVAR = "COMMAND"  # metavar of an argument whose value is the name of a command


@dataclass(frozen=True, slots=True)
class ValueSpec:
    """The value of an option or of a command's first argument. Without `choices` and `place`, any text is valid."""

    metavar: str
    choices: tuple[str, ...]
    place: str | None  # kind of path, `DIRECTORY` or `FILE`; None for other values
    is_line: bool = False  # True for `peer console`, whose value is the first word of a command


@dataclass(frozen=True, slots=True)
class OptionSpec:
    names: tuple[str, ...]
    about: str
    value: ValueSpec | None  # None for a flag without a value


@dataclass(frozen=True, slots=True)
class CommandSpec:
    name: str
    about: str
    options: tuple[OptionSpec, ...]
    value: ValueSpec | None


def completion_script(shell: str, parser: CommandLineParser, words: Iterable[str]) -> str:
    """Return the completion script for a shell. `words` are the commands of the prompt."""
    return "\n".join([*{"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](tuple(_commands(parser, tuple(words)))), ""])


# Grammar -------------------------------------------------------------------------------------------------------------


def _commands(parser: CommandLineParser, words: tuple[str, ...]) -> Iterator[CommandSpec]:
    abouts = parser.command_help()

    def value(action: argparse.Action) -> ValueSpec:
        metavar = str(action.metavar or action.dest).split()[0]
        if action.nargs == argparse.REMAINDER:
            return ValueSpec(metavar, words, None, is_line=True)
        choices = tuple(abouts) if metavar == COMMAND_METAVAR else tuple(map(str, action.choices or ()))
        return ValueSpec(metavar, choices, PATH_METAVARS.get(metavar))

    for name, command in parser.commands().items():
        options, values = [], []
        for action in command._actions:
            if action.option_strings:
                takes = None if action.nargs == 0 else value(action)
                options.append(OptionSpec(tuple(action.option_strings), action.help or "", takes))
            else:
                values.append(value(action))
        yield CommandSpec(name, abouts[name], tuple(options), values[0] if values else None)


# Shells --------------------------------------------------------------------------------------------------------------


def _bash(commands: tuple[CommandSpec, ...]) -> Iterator[str]:
    names = " ".join(command.name for command in commands)
    first = " ".join(word for command in commands if command.value and command.value.is_line for word in command.value.choices)
    yield from (
        '# Completes `peer` in bash: eval "$(peer completion bash)", for instance in ~/.bashrc.',
        "_peer() {",
        '    local current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD - 1]}" command="${COMP_WORDS[1]}"',
        '    local words="" place="" word',
        "    ((COMP_CWORD == 1)) && command=",
        "    if [[ $command == console ]]; then  # its first word that is a command has the arguments of that command",
        '        for word in "${COMP_WORDS[@]:2:COMP_CWORD-2}"; do',
        f'            [[ " {first} " == *" $word "* ]] && command="$word" && break',
        "        done",
        "    fi",
        '    case "$command" in',
        f'        "") words="{names}" ;;',
    )
    for command in commands:
        words = [name for option in command.options for name in option.names]
        words += command.value.choices if command.value else ()
        place = f" place={command.value.place}" if command.value and command.value.place else ""
        yield f'        {command.name}) words="{" ".join(words)}"{place} ;;'
    yield from (
        "    esac",
        '    case "$command $previous" in',
    )
    for command in commands:
        for option in command.options:
            if option.value is not None:
                patterns = "|".join(f'"{command.name} {name}"' for name in option.names)
                place = option.value.place or ""
                yield f'        {patterns}) words="{" ".join(option.value.choices)}" place={place} ;;'
    yield from (
        "    esac",
        "    local IFS=$'\\n'",
        '    case "$place" in',
        '        directory) compopt -o filenames 2>/dev/null; COMPREPLY=($(compgen -d -- "$current")) ;;',
        '        file) compopt -o filenames 2>/dev/null; COMPREPLY=($(compgen -f -- "$current")) ;;',
        "        *) COMPREPLY=() ;;",
        "    esac",
        "    IFS=$' \\t\\n'",
        '    COMPREPLY+=($(compgen -W "$words" -- "$current"))',
        "}",
        "complete -F _peer peer",
    )


def _zsh(commands: tuple[CommandSpec, ...]) -> Iterator[str]:
    described = [shlex.quote(f"{command.name}:{command.about}") for command in commands]
    yield from (
        "#compdef peer",
        "# Completes `peer` in zsh: source <(peer completion zsh), behind compinit in ~/.zshrc.",
        "_peer_commands() {",
        "    local -a commands",
        f"    commands=({' '.join(described)})",
        "    _describe command commands",
        "}",
        "_peer_arguments() {",
        "    case $words[1] in",
    )
    for command in commands:
        rules = [rule for option in command.options for rule in _zsh_option(option)]
        if command.value is not None and command.value.is_line:
            rules += [shlex.quote(f"1{_zsh_value(command.value)}"), shlex.quote("*:: :_peer_arguments")]
        elif command.value is not None:
            rules.append(shlex.quote(f"*{_zsh_value(command.value)}"))
        yield f"        {command.name}) _arguments {' '.join(rules)} ;;"
    yield from (
        "    esac",
        "}",
        "_peer() { _arguments '1: :_peer_commands' '*:: :_peer_arguments' }",
        "compdef _peer peer",
    )


def _zsh_option(option: OptionSpec) -> Iterator[str]:
    about = option.about.replace("[", "\\[").replace("]", "\\]").replace(":", "\\:")
    for name in option.names:
        yield shlex.quote(f"{name}[{about}]{_zsh_value(option.value) if option.value else ''}")


def _zsh_value(value: ValueSpec) -> str:
    actions = {DIRECTORY: "_directories", FILE: "_files", None: f"({' '.join(value.choices)})"}
    return f":{value.metavar.replace(':', ' ')}:{actions[value.place]}"


def _fish(commands: tuple[CommandSpec, ...]) -> Iterator[str]:
    yield from (
        "# Completes `peer` in fish: peer completion fish > ~/.config/fish/completions/peer.fish",
        "complete -c peer -f",
    )
    for command in commands:
        yield f"complete -c peer -n __fish_use_subcommand -a {command.name} -d {_fish_text(command.about)}"
    for command in commands:
        behind = f"complete -c peer -n {_fish_text(f'__fish_seen_subcommand_from {command.name}')}"
        for option in command.options:
            names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names)
            value = f" -x{_fish_value(option.value)}" if option.value else ""
            yield f"{behind} {names}{value} -d {_fish_text(option.about)}"
        if command.value is not None and (chosen := _fish_value(command.value)):
            yield f"{behind}{chosen}"


def _fish_value(value: ValueSpec) -> str:
    if value.place is not None:
        return " -a '(__fish_complete_directories)'" if value.place is DIRECTORY else " -a '(__fish_complete_path)'"
    return f" -a {_fish_text(' '.join(value.choices))}" if value.choices else ""


def _fish_text(text: str) -> str:
    """Return a text quoted for fish, in which a backslash also escapes inside single quotes."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
