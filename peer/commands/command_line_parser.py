"""A parser for the command line and the prompt. Its errors are `UserError`s: one line with the wrong value and a remedy."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from features.nearest_names import suggest_nearest
from peer.settings.config import ResolvedSettings, load_settings, setting_descriptions
from protocol.errors import UserError

if TYPE_CHECKING:
    from features.commands import Action, Command


class CommandHelpFormatter(argparse.HelpFormatter):
    """A formatter that wraps each paragraph and list item on its own, and keeps examples as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        import textwrap

        lines: list[str] = []
        for block in text_blocks(text):
            if block.startswith("    ") or not block:
                lines.append((indent + block).rstrip())
                continue
            further = indent + "  " * block.startswith("- ")
            lines += textwrap.wrap(block, width, initial_indent=indent, subsequent_indent=further, break_on_hyphens=False)
        return "\n".join(lines)


def text_blocks(text: str) -> list[str]:
    """Return the paragraphs, list items and lines of examples of a description, with empty texts between paragraphs."""
    blocks: list[str] = []
    for line in cleandoc(text).splitlines():
        starts_block = not line or line.startswith(("- ", "    "))
        if starts_block or not blocks or not blocks[-1] or blocks[-1].startswith("    "):
            blocks.append(line.rstrip())
        else:
            blocks[-1] += f" {line.strip()}"
    return blocks


class CommandLineParser(argparse.ArgumentParser):
    _is_mixing = False

    def __init__(
        self,
        *,
        about: str = "",
        details: str = "",
        actions: Sequence[Action] = (),
        exit_statuses: Mapping[int, str] | None = None,
        **options: Any,
    ) -> None:
        """Make a parser whose help begins with the texts `about` and `details`, and ends with actions and exit statuses."""
        self.about, self.details, self.actions = about, cleandoc(details), tuple(actions)
        self.exit_statuses = dict(exit_statuses or {})
        self.topics: dict[str, list[str]] = {}  # section of the help -> names of its subcommands
        options.setdefault("formatter_class", CommandHelpFormatter)
        has_help = options.pop("add_help", True)
        super().__init__(allow_abbrev=False, add_help=False, **options)
        if has_help:
            self.add_argument("-h", "--help", action="help", help="Show this help")

    def format_help(self) -> str:
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description or "\n\n".join(filter(None, (self.about and f"{self.about}.", self.details))))
        for action in self.actions:
            formatter.start_section(action.usage)
            formatter.add_text("\n\n".join(filter(None, (f"{action.about}.", cleandoc(action.description)))))
            formatter.end_section()
        for topic, names in self.topics.items():
            formatter.start_section(topic)
            formatter.add_arguments([choice for choice in self._command_choices() if choice.dest in names])
            formatter.end_section()
        for group in self._action_groups[1:] if self.topics else self._action_groups:
            formatter.start_section(group.title)
            formatter.add_text(group.description)
            formatter.add_arguments(group._group_actions)
            formatter.end_section()
        if self.exit_statuses:
            formatter.start_section("exit status")
            formatter.add_text("\n".join(f"- {status}: {meaning}" for status, meaning in self.exit_statuses.items()))
            formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse the arguments, and reject unknown ones here.

        The parent parser would do so, too, but does not know the options to suggest.
        """
        words = sys.argv[1:] if args is None else list(args)
        option = words[0].partition("=")[0] if words else ""
        if self._subparsers and option.startswith("-") and option not in self.known_options():
            if option in ("-v", "-V"):
                self.error(f"unknown option {option}; did you mean --version?")
            self.error(f"{option} must follow the command: write `{self.prog} COMMAND {option} …`")
        parsed, unknown = super().parse_known_args(args, namespace)
        if self._is_mixing:
            return parsed, unknown
        if unknown and not unknown[0].startswith("-") and not self._subparsers:
            # In `rlhf filter --blocklist FILE IN.jsonl`, argparse takes the optional argument IN.jsonl as missing, since an
            # option precedes it.
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
        """Return the parsers of the subcommands by name, in the order of the help."""
        return {name: command for action in self._commands_actions() for name, command in action.choices.items()}

    def command_help(self) -> dict[str, str]:
        """Return the one-line help of each subcommand."""
        return {choice.dest: choice.help or "" for choice in self._command_choices()}

    def _command_choices(self) -> list[argparse.Action]:
        """Return argparse's help entries, one for each subcommand."""
        return [choice for action in self._commands_actions() for choice in action._choices_actions]

    def _commands_actions(self) -> list[argparse._SubParsersAction[CommandLineParser]]:
        return [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]

    def _print_message(self, message: str, file: Any = None) -> None:
        """Write a message of argparse.

        Errors of the write, such as a full disk, are raised here; the method of argparse hides them.
        """
        (file or sys.stderr).write(message)

    def error(self, message: str) -> NoReturn:
        choice = re.match(r"argument command: invalid choice: '?(.*?)'? \(choose from (.*)\)$", message)
        if choice:
            known = [item.strip(" '") for item in choice[2].split(",")]
            raise UserError(unknown_command(choice[1], known))
        raise UserError(f"{self.prog}: {message}{self._choices_in(message)}".removeprefix("peer: "))

    def _choices_in(self, message: str) -> str:
        """Return a suffix for an error message of argparse: the nearest valid value, or all values of a missing argument."""
        if found := re.match(r"argument (\S+): invalid choice: '(.*?)' \(", message):
            close = suggest_nearest(found[2], (str(value) for value in self._values_of(found[1])))
            # Without a near value no suffix: argparse has listed all valid values.
            return close if "did you mean" in close else ""
        for name in re.findall(r"[^ ,]+", message.partition("arguments are required: ")[2]):
            if (values := self._values_of(name)) and values != [name]:
                return f"; {name} is one of {', '.join(values)}"
        return ""

    def _values_of(self, name: str) -> list[str]:
        """Return the allowed values of an argument, or an empty list if any value is allowed.

        `name` is the one in argparse's messages.
        """
        actions = [action for action in self._actions if name in (action.metavar, "/".join(action.option_strings))]
        return [str(value) for action in actions for value in action.choices or ()]


def settings_from_options(options: argparse.Namespace) -> ResolvedSettings:
    """Return the settings for this command line. Raises `UserError` if a setting is invalid."""
    flags = {name: getattr(options, name, None) for name in setting_descriptions()}
    return load_settings(flags, os.environ, Path(options.config).expanduser().absolute() if options.config else None)


def help_parts(word: Command) -> dict[str, Any]:
    """Return keyword arguments of `CommandLineParser` for the command's help: all sections except its first line."""
    return {"details": word.description, "actions": word.actions, "exit_statuses": word.exit_statuses}


def make_command_parser(word: Command) -> CommandLineParser:
    made = CommandLineParser(prog=word.name, about=word.about, add_help=False, **help_parts(word))
    word.add_arguments(made)
    return made


def parse_line(words: Mapping[str, Command], line: str) -> argparse.Namespace | None:
    """Return the parsed command of a line, or None for an empty line. Raises `UserError` if the line is no valid command."""
    try:
        typed = shlex.split(line, comments=True)
    except ValueError as error:
        raise UserError(f"{line.strip()!r}: {error}; close the quotation") from None
    return parse_tokens(words, typed) if typed else None


def parse_tokens(words: Mapping[str, Command], typed: Sequence[str]) -> argparse.Namespace:
    """Return the parsed command of these words. A leading word `peer` is dropped, because texts name commands as in a shell."""
    if typed[0] == "peer" and len(typed) > 1:
        typed = typed[1:]
    for text in typed:
        if any("\ud800" <= character <= "\udfff" for character in text):  # Python decodes invalid bytes as surrogates
            raise UserError(f"{text!r} is not UTF-8: type it in a UTF-8 terminal, or save the commands as UTF-8")
    meant = next((word.alias_target for word in words.values() if tuple(typed[:2]) == word.alias), typed[:2])
    name, *arguments = *meant, *typed[2:]
    word = find_command(words, name)
    if not {"-h", "--help"}.isdisjoint(arguments):
        return argparse.Namespace(command="help", topic=name)
    return make_command_parser(word).parse_args(arguments, argparse.Namespace(command=name))


def unknown_command(name: str, known: Iterable[str]) -> str:
    """Return the error about an unknown command. There are too many commands to list them all in it."""
    hint = suggest_nearest(name, known)
    return f"unknown command {name!r}{hint if 'did you mean' in hint else '; `help` lists all commands'}"


def find_command(words: Mapping[str, Command], name: str) -> Command:
    if name not in words:
        raise UserError(unknown_command(name, words))
    return words[name]


def option_names(word: Command) -> tuple[str, ...]:
    """Return the names of a command's options, for completion."""
    return tuple(name for name in make_command_parser(word).known_options() if name.startswith("--"))


def help_text(words: Mapping[str, Command], name: str) -> str:
    """Return the help of one command. Raises `UserError` if there is no such command."""
    return make_command_parser(find_command(words, name)).format_help().strip()
