"""The words that a job names: their bytes, and which of the job's texts they block."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final

from protocol.errors import UserError

# of a packed list: its entries, with a line break each, as `rlhf.moderation.word_matcher` bounds them
BYTES_MAX: Final = 10_000 * (4 * 64 + 1)
OPEN_MAX: Final = 4  # lists at once, of as many jobs


class Blocklist:
    """Implemented by `rlhf.moderation.word_matcher`, whose tables nobody loads before a text is looked at."""

    def __init__(self, blob: bytes) -> None:
        """Raises `UserError` for what is no packed list: whoever started the job is to blame, and no trainer."""
        from rlhf.moderation.word_matcher import ENTRIES_MAX, ENTRY_CHARACTERS_MAX, WordMatcher, parse_word_list

        assert BYTES_MAX == ENTRIES_MAX * (4 * ENTRY_CHARACTERS_MAX + 1)
        entries = parse_word_list("the list that the job names", blob)
        if pack_entries(entries) != blob:
            raise UserError(
                "the list that the job names is not packed: its entries do not ascend, or there is more than they are"
            )
        self._filter = WordMatcher(entries)

    def blocks_text(self, text: bytes) -> bool:
        return self._filter.find_entry(text.decode(errors="replace")) is not None

    def blocks_response(self, prompt: bytes, response: bytes) -> bool:
        """Alone, as people see it, or behind its prompt: neither half of a word may be left to the other."""
        return self.blocks_text(response) or self.blocks_text(prompt + response)


@lru_cache(maxsize=OPEN_MAX)
def read_blocklist(path: Path) -> Blocklist:
    """Of a file whose bytes never change: a blob."""
    with path.open("rb") as file:
        return Blocklist(file.read(BYTES_MAX + 1))


def pack_entries(entries: Sequence[str]) -> bytes:
    """The bytes of a list, of which a job names the digest. The entries ascend, as `rlhf.moderation.word_matcher.parse_word_list`
    gives them.
    """
    return "\n".join(entries).encode()
