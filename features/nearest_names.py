"""Suggestions for a mistyped name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# Least ratio of difflib for a suggestion: one letter may be missing, wrong or swapped, but `leave` is not near `clear`.
SIMILARITY_MIN = 0.65


def suggest_nearest(word: str, known: Iterable[str]) -> str:
    """Return the end of an error: "; did you mean …?", or all choices if none is near, or "" if there are no choices."""
    known = list(known)
    if not known:
        return ""
    begun = [other for other in known if other.startswith(word)]
    close = begun if len(begun) == 1 else difflib.get_close_matches(word, known, n=1, cutoff=SIMILARITY_MIN)
    return f"; did you mean {close[0]}?" if close else f"; known: {', '.join(known)}"
