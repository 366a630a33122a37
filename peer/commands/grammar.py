"""The language of the prompt: from a line to a word and its arguments. `peer WORD` on the command line has the same ones."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence

from features.words import Word
from peer.commands.arguments import Parser
from peer.settings.config import nearest
from protocol.errors import UserError


def parser(word: Word) -> Parser:
    made = Parser(prog=word.name, description=word.about, add_help=False)
    word.add_arguments(made)
    return made


def parse(words: Mapping[str, Word], line: str) -> argparse.Namespace | None:
    """The command in a line, None for an empty one. Raises `UserError`."""
    try:
        typed = shlex.split(line, comments=True)
    except ValueError as error:
        raise UserError(f"{line.strip()!r}: {error}; close the quotation") from None
    return parse_words(words, typed) if typed else None


def parse_words(words: Mapping[str, Word], typed: Sequence[str]) -> argparse.Namespace:
    for text in typed:
        if any("\ud800" <= character <= "\udfff" for character in text):  # as Python reads bytes that are no characters
            raise UserError(f"{text!r} is not UTF-8: type it in a UTF-8 terminal, or save the commands as UTF-8")
    meant = next((word.meaning for word in words.values() if tuple(typed[:2]) == word.phrase), typed[:2])
    name, *arguments = *meant, *typed[2:]
    word = find(words, name)
    if not {"-h", "--help"}.isdisjoint(arguments):
        return argparse.Namespace(command="help", topic=name)
    return parser(word).parse_args(arguments, argparse.Namespace(command=name))


def find(words: Mapping[str, Word], name: str) -> Word:
    if name not in words:
        raise UserError(f"no command {name!r}{nearest(name, words)}")
    return words[name]


def option_names(word: Word) -> tuple[str, ...]:
    """What its arguments may begin with, for completion."""
    return tuple(name for name in parser(word).known_options() if name.startswith("--"))


def help_text(words: Mapping[str, Word], name: str) -> str:
    """One word with its arguments. Raises `UserError`."""
    return parser(find(words, name)).format_help().strip()
