"""The page of exit statuses: those of all commands from constants, and those of single commands from their declarations."""

from __future__ import annotations

from features.exit_statuses import COMMON_EXIT_STATUSES
from peer import cli
from tools.reference import table

INTRODUCTION = """\
# Exit statuses

`python -m tools.reference` writes this page from the code.

A script reads the outcome of a command from its exit status. A bug of the program ends with a traceback and exit status 1. A
signal that ends a command gives 128 plus its number in most shells. `peer run` ends with 0 after SIGTERM, SIGINT, and `quit`.
"""


def render() -> str:
    common = ((str(status), meaning) for status, meaning in COMMON_EXIT_STATUSES.items())
    further = (
        (f"[`peer {name}`](commands.md#peer-{name})", str(status), meaning)
        for name, parser in cli.build_parser().commands().items()
        for status, meaning in parser.exit_statuses.items()
    )
    parts = [INTRODUCTION, "## All commands\n", *table(("status", "meaning"), common)]
    parts += ["## Commands with further statuses\n", *table(("command", "status", "meaning"), further)]
    return "\n".join(parts)
