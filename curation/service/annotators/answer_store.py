"""Answers that are not opened yet: durable here before anybody is told that they count."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from curation.service.sqlite_database import open_database
from curation.tasks.answers import Answer, answer_commitment
from protocol import codec

_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS answers"
    " (assignment BLOB PRIMARY KEY, salt BLOB NOT NULL, answer BLOB NOT NULL, signature BLOB NOT NULL) WITHOUT ROWID"
)


@dataclass(frozen=True, slots=True)
class UnopenedAnswer:
    assignment: bytes
    salt: bytes
    answer: Answer
    signature: bytes  # by the annotator, over the commitment

    @property
    def commitment(self) -> bytes:
        return answer_commitment(self.assignment, self.salt, self.answer)


@dataclass(frozen=True, slots=True)
class _Answer:
    choices: tuple[int, ...]


class AnswerStore:
    def __init__(self, path: Path) -> None:
        self._database = open_database(path, _SCHEMA)

    # Each of these is one statement: a transaction of several would take in what another thread does meanwhile.

    def store_answer(self, kept: UnopenedAnswer) -> None:
        """Waits for the disk."""
        row = (kept.assignment, kept.salt, codec.encode(_Answer(kept.answer)), kept.signature)
        self._database.execute("INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?)", row)

    def delete_answers(self, assignments: Sequence[bytes]) -> None:
        """Waits for the disk."""
        self._database.execute(f"DELETE FROM answers WHERE assignment IN ({', '.join('?' * len(assignments))})", assignments)

    def load_answers(self) -> Iterator[UnopenedAnswer]:
        for assignment, salt, answer, signature in self._database.execute("SELECT * FROM answers"):
            yield UnopenedAnswer(assignment, salt, codec.decode(_Answer, answer).choices, signature)

    def close(self) -> None:
        self._database.close()
