"""Formats of numbers for people."""

from __future__ import annotations


def format_bytes(count: int) -> str:
    """Format a size in GiB, or in MiB if it is less than 1 GiB."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{-(-count >> 20)} MiB"


def display_round_number(index: int) -> int:
    """Return the number of a round as people see it, from 1. The protocol, the API and `--json` count rounds from 0."""
    return index + 1


def format_round_progress(index: int, rounds: int) -> str:
    """Format a job's progress: the open round, or the last round if the job is over, and the number of all rounds."""
    return f"{min(display_round_number(index), rounds)} of {rounds}"
