"""argparse whose complaints are `UserError`s: one line that names the value and the way out. Of the shell and of the prompt."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from features.nearest_names import suggest_nearest
from peer.settings.config import ResolvedSettings, load_settings, setting_descriptions
from protocol.errors import UserError

if TYPE_CHECKING:
    from features.commands import Command


class CommandLineParser(argparse.ArgumentParser):
    _is_mixing = False

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """A command sees its own unknown arguments here, where what it does know is at hand."""
        words = sys.argv[1:] if args is None else list(args)
        option = words[0].partition("=")[0] if words else ""
        if self._subparsers and option.startswith("-") and option not in self.known_options():
            if option in ("-v", "-V"):
                self.error(f"{option} is no option; did you mean --version?")
            self.error(f"{option} stands before the command: write `{self.prog} COMMAND {option} …`")
        parsed, unknown = super().parse_known_args(args, namespace)
        if self._is_mixing:
            return parsed, unknown
        if unknown and not unknown[0].startswith("-") and not self._subparsers:
            # One that need not be there was taken to be missing before an option: `rlhf filter --blocklist FILE IN.jsonl`.
            self._is_mixing = True
            try:
                parsed, unknown = super().parse_known_intermixed_args(args, namespace)
            finally:
                self._is_mixing = False
        if unknown:
            hint = suggest_nearest(unknown[0], self.known_options()) if unknown[0].startswith("-") else ""
            self.error(f"unknown argument {unknown[0]!r}{hint}")
        return parsed, unknown

    def known_options(self) -> list[str]:
        return list(self._option_string_actions)

    def commands(self) -> dict[str, CommandLineParser]:
        """By name, in their order."""
        return {name: command for action in self._commands_actions() for name, command in action.choices.items()}

    def command_help(self) -> dict[str, str]:
        """What the help says of each command, in one line."""
        return {choice.dest: choice.help or "" for action in self._commands_actions() for choice in action._choices_actions}

    def _commands_actions(self) -> list[argparse._SubParsersAction[CommandLineParser]]:
        return [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]

    def _print_message(self, message: str, file: Any = None) -> None:
        """argparse hides what comes of writing, such as that the disk is full."""
        (file or sys.stderr).write(message)

    def error(self, message: str) -> NoReturn:
        choice = re.match(r"argument command: invalid choice: '?(.*?)'? \(choose from (.*)\)$", message)
        if choice:
            known = [item.strip(" '") for item in choice[2].split(",")]
            raise UserError(f"no command {choice[1]!r}{suggest_nearest(choice[1], known)}")
        raise UserError(f"{self.prog}: {message}{self._choices_in(message)}".removeprefix("peer: "))

    def _choices_in(self, message: str) -> str:
        """Behind what argparse says of an argument: the nearest of its values, or all of them where one is missing."""
        if found := re.match(r"argument (\S+): invalid choice: '(.*?)' \(", message):
            close = suggest_nearest(found[2], (str(value) for value in self._values_of(found[1])))
            return close if "did you mean" in close else ""  # argparse has listed all of them
        for name in re.findall(r"[^ ,]+", message.partition("arguments are required: ")[2]):
            if (values := self._values_of(name)) and values != [name]:
                return f"; {name} is one of {', '.join(values)}"
        return ""

    def _values_of(self, name: str) -> list[str]:
        """Of an argument, as argparse calls it in what it says; none, where it takes anything."""
        actions = [action for action in self._actions if name in (action.metavar, "/".join(action.option_strings))]
        return [str(value) for action in actions for value in action.choices or ()]


def settings_from_options(options: argparse.Namespace) -> ResolvedSettings:
    """The settings in force for this command line. Raises `UserError`."""
    flags = {name: getattr(options, name, None) for name in setting_descriptions()}
    return load_settings(flags, os.environ, Path(options.config).expanduser().absolute() if options.config else None)


def make_command_parser(word: Command) -> CommandLineParser:
    made = CommandLineParser(prog=word.name, description=word.about, add_help=False)
    word.add_arguments(made)
    return made


def parse_line(words: Mapping[str, Command], line: str) -> argparse.Namespace | None:
    """The command in a line, None for an empty one. Raises `UserError`."""
    try:
        typed = shlex.split(line, comments=True)
    except ValueError as error:
        raise UserError(f"{line.strip()!r}: {error}; close the quotation") from None
    return parse_tokens(words, typed) if typed else None


def parse_tokens(words: Mapping[str, Command], typed: Sequence[str]) -> argparse.Namespace:
    for text in typed:
        if any("\ud800" <= character <= "\udfff" for character in text):  # as Python reads bytes that are no characters
            raise UserError(f"{text!r} is not UTF-8: type it in a UTF-8 terminal, or save the commands as UTF-8")
    meant = next((word.alias_target for word in words.values() if tuple(typed[:2]) == word.alias), typed[:2])
    name, *arguments = *meant, *typed[2:]
    word = find_command(words, name)
    if not {"-h", "--help"}.isdisjoint(arguments):
        return argparse.Namespace(command="help", topic=name)
    return make_command_parser(word).parse_args(arguments, argparse.Namespace(command=name))


def find_command(words: Mapping[str, Command], name: str) -> Command:
    if name not in words:
        raise UserError(f"no command {name!r}{suggest_nearest(name, words)}")
    return words[name]


def option_names(word: Command) -> tuple[str, ...]:
    """What its arguments may begin with, for completion."""
    return tuple(name for name in make_command_parser(word).known_options() if name.startswith("--"))


def help_text(words: Mapping[str, Command], name: str) -> str:
    """One word with its arguments. Raises `UserError`."""
    return make_command_parser(find_command(words, name)).format_help().strip()
