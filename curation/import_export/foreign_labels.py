"""Labels of other programs in a file of tasks: some become suggestions or gold, the others are counted with a reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any, Final

from curation.import_export.foreign_formats import AmbiguousLabel, Fields, UnusableLabel
from curation.tasks.answer_parser import AnswerSchema
from curation.tasks.answers import Answer
from features.text_tables import pluralize
from protocol.errors import UserError

# The likeliest first. Prodigy has `accept`, `answer` and `spans`, doccano `label` and `entities`, spaCy `cats`.
LABEL_FIELDS: Final = ("label", "labels", "annotations", "predictions", "accept", "answer", "spans", "entities", "cats", "votes")
EMPTY: Final[tuple[Any, ...]] = (None, "", [], {})


class ForeignLabels:
    """Of one file. `taken`: fields that have another use there."""

    def __init__(self, question: AnswerSchema, gold_from: str, taken: Collection[str]) -> None:
        self._question, self._gold_from = question, gold_from
        self._fields = [name for name in LABEL_FIELDS if name != gold_from and name not in taken]
        self._suggested: Counter[str] = Counter()
        self._left: Counter[str] = Counter()
        self._reasons: dict[str, str] = {}

    def gold_answer(self, where: str, fields: Fields, items: int) -> Answer | None:
        """The right answer. Raises `UserError` where the field has another value."""
        said = fields.get("gold")
        if not self._gold_from or self._gold_from == "gold":
            return self.parse_label(where, "gold", said, items)
        if said not in EMPTY:
            raise UserError(f"{where}: there is `gold` beside {self._gold_from!r}: only one of them can be the right answer")
        said = fields.get(self._gold_from)
        return None if said in EMPTY else self.parse_label(where, self._gold_from, said, items)

    def parse_label(self, where: str, name: str, said: Any, items: int) -> Answer | None:
        """An answer that a person asked for. A label that another program has refused is none, and counted."""
        if isinstance(said, AmbiguousLabel):
            raise UserError(f"{where}: {name} {said}")
        if isinstance(said, UnusableLabel):
            self.count_skipped(where, name, said)
            return None
        return self._question.parse_answer(where, name, said, items)

    def find_suggestion(self, where: str, fields: Fields, items: int) -> tuple[str, Answer] | None:
        """The first label that is an answer, with its field. All others are counted."""
        found: tuple[str, Answer] | None = None
        for name in self._fields:
            said = fields.get(name)
            if said in EMPTY:
                continue
            if found is not None or name == "votes":
                self.count_skipped(where, name, f"are beside {found[0]!r}" if found else "are no labels of this project")
            elif isinstance(said, UnusableLabel):
                self.count_skipped(where, name, f"{name} {said}")
            else:
                try:
                    answer = self._question.parse_answer(where, name, said, items)
                except UserError as error:
                    self.count_skipped(where, name, str(error))
                else:
                    assert answer is not None
                    found = name, answer
        return found

    def count_suggestion(self, name: str) -> None:
        self._suggested[name] += 1

    def count_skipped(self, where: str, name: str, why: str) -> None:
        self._left[name] += 1
        self._reasons.setdefault(name, why if why.startswith(where) else f"{where}: {why}")

    @property
    def notes(self) -> list[str]:
        taken = [
            f"{pluralize(count, 'label')} of {name!r} became {'a suggestion' if count == 1 else 'suggestions'}; "
            f"--gold-from {name} takes {'it as the right answer' if count == 1 else 'them as right answers'} instead"
            for name, count in self._suggested.items()
        ]
        left = [
            f"{pluralize(count, 'label')} of {name!r} left out ({self._reasons[name]})" + self._way_out(name)
            for name, count in self._left.items()
        ]
        return taken + left

    def _way_out(self, name: str) -> str:
        if name not in self._fields or name == "votes":
            return ""
        return f"; --gold-from {name} takes such labels as right answers, --columns suggestion={name} as suggestions"
