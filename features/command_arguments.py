"""Arguments that several commands share. Each argument is declared once, with the parameters of argparse."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any

from protocol.codec import COUNT_MAX
from protocol.errors import UserError

LIST_ROWS_DEFAULT = 20  # default number of entries in a list


class Argument:
    def __init__(self, *names: str, **settings: Any) -> None:
        """Declare an argument with the parameters of argparse's `add_argument`."""
        self._names, self._settings = names, settings

    def add_to(self, parser: argparse._ActionsContainer) -> None:
        parser.add_argument(*self._names, **self._settings)


def parse_integer_in(low: int, high: int | None = None) -> Callable[[str], int]:
    """Return a parser for argparse's `type` that accepts integers from `low` to `high`, or to `COUNT_MAX` without `high`."""
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


def parse_count(text: str) -> int:
    """Parse a count such as 300 or 300M, for argparse's `type`. K, M, B and T are thousands, millions, billions and trillions."""
    unit = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}.get(text[-1:].upper(), 1)
    try:
        value = int(text) if unit == 1 else round(float(text[:-1]) * unit)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a count: write a number such as 300 or 300M") from None
    if not 1 <= value <= COUNT_MAX:
        raise argparse.ArgumentTypeError(f"{value} is outside 1..{COUNT_MAX}")
    return value


def parse_non_negative(text: str) -> float:
    """Parse a finite number of 0 or more, for argparse's `type`."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of 0 or more")
    return value


SKIP_BAD = Argument("--skip-bad", action="store_true", help="Leave out and count lines that cannot be learned")
TRUNCATE = Argument(
    "--truncate",
    choices=("left", "right"),
    default="",
    help="Shorten long texts to the context: `left` cuts the beginning of prompts, `right` the end of responses",
)
JSON = Argument("--json", action="store_true", help="Print JSON for programs")
LAST_COUNT = Argument(
    "last",
    nargs="?",
    type=parse_integer_in(1),
    default=LIST_ROWS_DEFAULT,
    metavar="N",
    help=f"Number of entries (default {LIST_ROWS_DEFAULT})",
)


def member_argument(name: str, metavar: str) -> Argument:
    """Return a positional argument with which a person names a member."""
    return Argument(name, metavar=metavar, help="Name of a member, or the first characters of its peer id")


def parse_set_options(items: Sequence[str]) -> dict[str, str]:
    """Return the values by field from the items FIELD=VALUE of `--set`.

    Raises `UserError` if an item has no field or no `=`, or if two items give one field different values.
    """
    overrides: dict[str, str] = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals or not name:
            raise UserError(f"--set {item!r} is not FIELD=VALUE, such as --set local_steps=10")
        if overrides.setdefault(name, value) != value:
            raise UserError(f"--set {name}={overrides[name]} and --set {name}={value} contradict each other: leave one out")
    return overrides
