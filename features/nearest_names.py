"""What a person may have meant by a name that nothing has."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

SIMILARITY_MIN = 0.65  # of difflib's ratio: a letter missing, wrong or swapped; `leave` is not near `clear`


def suggest_nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean …?`, or all the choices where nothing is near; empty where there are none."""
    known = list(known)
    if not known:
        return ""
    begun = [other for other in known if other.startswith(word)]
    close = begun if len(begun) == 1 else difflib.get_close_matches(word, known, n=1, cutoff=SIMILARITY_MIN)
    return f"; did you mean {close[0]}?" if close else f"; known: {', '.join(known)}"
