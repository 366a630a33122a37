"""The language of the prompt: from a line to a command and its arguments, as in `peer COMMAND`."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence

from features.commands import Command
from features.nearest_names import suggest_nearest
from peer.commands.command_line_parser import CommandLineParser
from protocol.errors import UserError


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
