"""Verdicts on the bounds of a benchmark, one per line, and its exit status."""

from __future__ import annotations

from collections.abc import Iterable

MISSED = "MISSED"


def verdict(held: bool, text: str) -> str:
    return f"{'held  ' if held else MISSED} {text}"


def conclude(verdicts: Iterable[str]) -> int:
    """Print the verdicts and return the exit status: 1 if a bound was missed. A message replaces an empty list."""
    lines = list(verdicts)
    for line in lines or ["no figure of this run has a bound"]:
        print(line, flush=True)
    return int(any(line.startswith(MISSED) for line in lines))
