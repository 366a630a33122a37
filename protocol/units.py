"""Numbers as people read them."""

from __future__ import annotations


def bytes_in_words(count: int) -> str:
    """In the unit that leaves few digits."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{-(-count >> 20)} MiB"
