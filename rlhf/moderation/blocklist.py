"""The blocklist of a job: its packed bytes, and the texts that it blocks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final

from protocol.errors import UserError

# Largest size of a packed list in bytes: the limits of `rlhf.moderation.word_matcher`, with a line break after each entry.
BYTES_MAX: Final = 10_000 * (4 * 64 + 1)
OPEN_MAX: Final = 4  # unpacked lists in memory, each of another job


class Blocklist:
    """A packed list that is ready to match texts. The large tables of `rlhf.moderation.word_matcher` load with the first list."""

    def __init__(self, blob: bytes) -> None:
        """Unpack the list in a blob.

        Raises `UserError` for malformed bytes: the job's author chose the bytes, and no trainer did.
        """
        from rlhf.moderation.word_matcher import ENTRIES_MAX, ENTRY_CHARACTERS_MAX, WordMatcher, parse_word_list

        assert BYTES_MAX == ENTRIES_MAX * (4 * ENTRY_CHARACTERS_MAX + 1)
        entries = parse_word_list("the list that the job names", blob)
        if pack_entries(entries) != blob:
            raise UserError("the job's blocklist is malformed: its entries do not ascend, or it has further bytes")
        self._filter = WordMatcher(entries)

    def blocks_text(self, text: bytes) -> bool:
        return self._filter.find_entry(text.decode(errors="replace")) is not None

    def blocks_response(self, prompt: bytes, response: bytes) -> bool:
        """Return True if the list blocks the response, alone or after its prompt: a blocked word may begin in the prompt."""
        return self.blocks_text(response) or self.blocks_text(prompt + response)


@lru_cache(maxsize=OPEN_MAX)
def read_blocklist(path: Path) -> Blocklist:
    """Return the blocklist in a blob's file. The list is cached, because a blob's bytes never change."""
    with path.open("rb") as file:
        return Blocklist(file.read(BYTES_MAX + 1))


def pack_entries(entries: Sequence[str]) -> bytes:
    """Return the packed list of ascending entries from `rlhf.moderation.word_matcher.parse_word_list`. A job names its digest."""
    return "\n".join(entries).encode()
