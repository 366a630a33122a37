"""The words that a job names: their bytes, and which of the job's texts they block."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final

from protocol.errors import UserError

BYTES_MAX: Final = 10_000 * (4 * 64 + 1)  # of a packed list: its entries, with a line break each, as `rlhf.filter` bounds them
WITHHELD: Final = "withheld: it holds a word of the list that the job names"  # in the place of a text
OPEN_MAX: Final = 4  # lists at once, of as many jobs


class Blocklist:
    """Implemented by `rlhf.filter`, whose tables nobody loads before a text is looked at."""

    def __init__(self, blob: bytes) -> None:
        """Raises `UserError` for what is no packed list."""
        from rlhf.filter import Filter

        self._filter = Filter(unpacked(blob))

    def blocks(self, text: bytes) -> bool:
        return self._filter.find(text.decode(errors="replace")) is not None

    def blocks_response(self, prompt: bytes, response: bytes) -> bool:
        """Alone, as people see it, or behind its prompt: neither half of a word may be left to the other."""
        return self.blocks(response) or self.blocks(prompt + response)


@lru_cache(maxsize=OPEN_MAX)
def read(path: Path) -> Blocklist:
    """Of a file whose bytes never change: a blob."""
    with path.open("rb") as file:
        return Blocklist(file.read(BYTES_MAX + 1))


def packed(entries: Sequence[str]) -> bytes:
    """The bytes of a list, of which a job names the digest. The entries ascend, as `rlhf.filter.read_words` gives them."""
    return "\n".join(entries).encode()


def unpacked(blob: bytes) -> tuple[str, ...]:
    """The entries. `UserError` unless these are the bytes of a list: whoever started the job is to blame, and no trainer."""
    from rlhf.filter import ENTRIES_MAX, ENTRY_CHARACTERS_MAX, read_words

    assert BYTES_MAX == ENTRIES_MAX * (4 * ENTRY_CHARACTERS_MAX + 1)
    entries = read_words("the list that the job names", blob)
    if packed(entries) != blob:
        raise UserError("the list that the job names is not packed: its entries do not ascend, or there is more than they are")
    return entries
