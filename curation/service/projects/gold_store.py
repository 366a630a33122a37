"""Right answers that the author of a project knows: durable here before their page is decided, and secret until it says them."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from curation.annotator_statements import Salt
from curation.ledger.curation_state import Choices
from curation.ledger.transaction_types import GoldAnswerProof
from curation.limits import PAGE_TASKS_MAX, SALT_BYTES
from curation.service.sqlite_database import open_database
from curation.tasks.answers import gold_leaf
from protocol import codec, merkle
from protocol.codec import Count, Digest, Length

_SCHEMA = "CREATE TABLE IF NOT EXISTS golds (root BLOB PRIMARY KEY, page BLOB NOT NULL) WITHOUT ROWID"


@dataclass(frozen=True, slots=True)
class KnownGold:
    index: Count
    salt: Salt
    answer: Choices


@dataclass(frozen=True, slots=True)
class GoldPage:
    """Leaves of all tasks of a page. Those of tasks that are no gold are drawn: nobody can tell which."""

    leaves: Annotated[tuple[Digest, ...], Length(1, PAGE_TASKS_MAX)]
    known: Annotated[tuple[KnownGold, ...], Length(0, PAGE_TASKS_MAX)]

    @classmethod
    def make_page(cls, golds: Sequence[tuple[int, ...] | None]) -> GoldPage:
        """`golds`: the right answer of each task, where it is known."""
        known = [KnownGold(index, secrets.token_bytes(SALT_BYTES), gold) for index, gold in enumerate(golds) if gold is not None]
        leaves = [secrets.token_bytes(32) for _ in golds]
        for gold in known:
            leaves[gold.index] = gold_leaf(gold.salt, tuple(gold.answer))
        return cls(tuple(leaves), tuple(known))

    @property
    def root(self) -> bytes:
        return merkle.merkle_root(self.leaves)

    def prove_answer(self, known: KnownGold) -> GoldAnswerProof:
        return GoldAnswerProof(known.index, known.answer, known.salt, tuple(merkle.merkle_proof(self.leaves, known.index)))


class GoldStore:
    """Pages with gold, by the roots that AddPage names."""

    def __init__(self, path: Path) -> None:
        self._database = open_database(path, _SCHEMA)

    def store_page(self, page: GoldPage) -> None:
        """Waits for the disk."""
        self._database.execute("INSERT OR REPLACE INTO golds VALUES (?, ?)", (page.root, codec.encode(page)))

    def load_page(self, root: bytes) -> GoldPage | None:
        found = self._database.execute("SELECT page FROM golds WHERE root = ?", (root,)).fetchone()
        return None if found is None else codec.decode(GoldPage, found[0])

    def close(self) -> None:
        self._database.close()
