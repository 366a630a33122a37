"""Formats of numbers for people."""

from __future__ import annotations


def format_bytes(count: int) -> str:
    """Format a size in GiB, or in MiB if it is less than 1 GiB."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{-(-count >> 20)} MiB"


def display_round_number(index: int) -> int:
    """Return a round's number for people, from 1. The protocol, the API and `--json` count from 0."""
    return index + 1


def format_round_progress(index: int, rounds: int) -> str:
    """Format a job's progress: its open round, or its last one if the job is over."""
    return f"{min(display_round_number(index), rounds)} of {rounds}"
