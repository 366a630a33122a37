"""The page of exit statuses: those of all commands from constants, and those of single commands from their declarations."""

from __future__ import annotations

from features.exit_statuses import COMMON_EXIT_STATUSES
from peer import cli

INTRODUCTION = """\
# Exit statuses

`python -m tools.reference` writes this page from the code.

A script reads the outcome of a command from its exit status. A bug of the program ends with a traceback and exit status 1. A
signal that ends a command gives 128 plus its number in most shells. `peer run` ends with 0 after SIGTERM, SIGINT, and `quit`.
"""


def render() -> str:
    parts = [INTRODUCTION, "## All commands\n", "| status | meaning |", "|---|---|"]
    parts += [f"| {status} | {meaning} |" for status, meaning in COMMON_EXIT_STATUSES.items()]
    parts += ["", "## Commands with further statuses\n", "| command | status | meaning |", "|---|---|---|"]
    for name, parser in cli.build_parser().commands().items():
        parts += [
            f"| [`peer {name}`](commands.md#peer-{name}) | {status} | {meaning} |"
            for status, meaning in parser.exit_statuses.items()
        ]
    return "\n".join(parts) + "\n"
