"""Suggestions for a mistyped name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

SIMILARITY_MIN = 0.65  # difflib's ratio: allows a letter that is missing, wrong or swapped; `leave` is not near `clear`


def suggest_nearest(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean …?", or a list of all choices if none is near, or "" if there are no choices."""
    known = list(known)
    if not known:
        return ""
    begun = [other for other in known if other.startswith(word)]
    close = begun if len(begun) == 1 else difflib.get_close_matches(word, known, n=1, cutoff=SIMILARITY_MIN)
    return f"; did you mean {close[0]}?" if close else f"; known: {', '.join(known)}"
