"""What must hold, and whether it did: a line each, and the exit status of a benchmark."""

from __future__ import annotations

from collections.abc import Iterable

MISSED = "MISSED"


def verdict(held: bool, text: str) -> str:
    return f"{'held  ' if held else MISSED} {text}"


def conclude(verdicts: Iterable[str]) -> int:
    """Prints them; the exit status: 1 if anything was missed. Where nothing was held to a bound, that is said."""
    lines = list(verdicts)
    for line in lines or ["nothing of this was held to a bound"]:
        print(line, flush=True)
    return int(any(line.startswith(MISSED) for line in lines))
