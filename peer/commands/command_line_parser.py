"""argparse whose complaints are `UserError`s: one line that names the value and the way out."""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path
from typing import Any, NoReturn

from features.nearest_names import suggest_nearest
from peer.settings.config import ResolvedSettings, load_settings, setting_names
from protocol.errors import UserError


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
    flags = {name: getattr(options, name, None) for name in setting_names()}
    file = Path(options.config).expanduser().absolute() if options.config else None
    return load_settings(flags, os.environ, file)
