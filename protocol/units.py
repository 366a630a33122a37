"""Numbers as people read them."""

from __future__ import annotations


def format_bytes(count: int) -> str:
    """In the unit that leaves few digits."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{-(-count >> 20)} MiB"


def display_round_number(index: int) -> int:
    """The number of a round for people, from 1. The protocol, the API and `--json` count from 0."""
    return index + 1


def format_round_progress(index: int, rounds: int) -> str:
    """How far a job is, by its open round, or the last one if it is over."""
    return f"{min(display_round_number(index), rounds)} of {rounds}"
