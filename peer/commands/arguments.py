"""argparse whose complaints are `UserError`s: one line that names the value and the way out."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from peer.settings.config import Config, Settings, load, nearest
from protocol.codec import COUNT_MAX
from protocol.errors import UserError


class Parser(argparse.ArgumentParser):
    elsewhere: Mapping[str, str] = {}  # no commands of this parser, but known: what to type instead

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """A command sees its own unknown arguments here, where what it does know is at hand."""
        words = sys.argv[1:] if args is None else list(args)
        option = words[0].partition("=")[0] if words else ""
        if self._subparsers and option.startswith("-") and option not in self.known_options():
            self.error(f"{option} stands before the command: write `{self.prog} COMMAND {option} …`")
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            hint = nearest(unknown[0], self.known_options()) if unknown[0].startswith("-") else ""
            self.error(f"unknown argument {unknown[0]!r}{hint}")
        return parsed, unknown

    def known_options(self) -> list[str]:
        return list(self._option_string_actions)

    def error(self, message: str) -> NoReturn:
        choice = re.match(r"argument command: invalid choice: '?(.*?)'? \(choose from (.*)\)$", message)
        if choice:
            if choice[1] in self.elsewhere:
                raise UserError(f"{choice[1]!r} belongs to the prompt: `{self.elsewhere[choice[1]]}` asks a running peer")
            known = [item.strip(" '") for item in choice[2].split(",")]
            raise UserError(f"no command {choice[1]!r}{nearest(choice[1], known)}")
        raise UserError(f"{self.prog}: {message}".removeprefix("peer: "))


def whole_number(low: int, high: int | None = None) -> Callable[[str], int]:
    """A type for argparse: integers in low..high, whose name is what argparse says of anything else."""
    most = COUNT_MAX if high is None else high

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not low <= value <= most:
            is_less = high is None and value < low
            raise argparse.ArgumentTypeError(f"{value} is less than {low}" if is_less else f"{value} is outside {low}..{most}")
        return value

    return read


def not_negative(text: str) -> float:
    """A type for argparse."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of 0 or more")
    return value


def settings_of(options: argparse.Namespace) -> Settings:
    """The settings in force for this command line. Raises `UserError`."""
    flags = {field.name: getattr(options, field.name, None) for field in dataclasses.fields(Config)}
    file = Path(options.config).expanduser().absolute() if options.config else None
    return load(flags, os.environ, file)
