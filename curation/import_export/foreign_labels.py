"""Rows and labels from files of other programs, and from our own exports. Rows get our field names. Some labels become
suggestions or gold; all others are left out, and counted with a reason.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any, Final

from curation.import_export.csv_injection import unquote_cell
from curation.tasks.answers import NONE_OF_THEM, PAIR_ANSWERS, Answer, AnswerSchema, OptionText, QuestionKind
from features.text_tables import pluralize
from protocol.errors import UserError

Fields = dict[str, Any]
EXPORTED_COLUMNS: Final = frozenset(("number", "text", "label", "votes", "agree", "height", "task"))  # columns of exports in CSV
_EXPORTED_LINE: Final = frozenset(("task", "number", "label", "label_text", "height", "votes"))
_EXPORTED_DATA: Final = frozenset(("task", "number", "height", "items"))  # fields in `data` of a task in exports for Label Studio
_EVEN: Final = 0.5  # `p` in exported preferences of a tie, and of a pair with equally many votes for each item
_REFUSED: Final = ("reject", "ignore")  # values of Prodigy's `answer` that reject the label
# Fields that may have a label, the most likely field first. Prodigy has `accept`, `answer` and `spans`, doccano `label` and
# `entities`, spaCy `cats`.
LABEL_FIELDS: Final = ("label", "labels", "annotations", "predictions", "accept", "answer", "spans", "entities", "cats", "votes")
EMPTY: Final[tuple[Any, ...]] = (None, "", [], {})


class UnusableLabel(str):
    """Reason why a label is no answer, such as "is a tie". It is stored in place of the label."""


class AmbiguousLabel(UnusableLabel):
    """Reason why a label may mean two different answers. It is stored in place of the label."""


def standard_fields(fields: Fields, question: AnswerSchema) -> Fields | None:
    """Return the row with our field names.

    None: an exported line without text, since its task was redacted or its page missing.
    """
    fields = {name: value if name == "text" else _choices(value, question) for name, value in fields.items()}
    if isinstance(fields.get("data"), dict) and "text" not in fields:
        return _of_label_studio(fields, question)
    if fields.keys() >= EXPORTED_COLUMNS:
        return _of_csv_export(fields)
    if fields.keys() >= _EXPORTED_LINE:
        return _of_export(fields, question)
    if question.kind is QuestionKind.PAIR and {"chosen", "rejected"} <= fields.keys() and "items" not in fields:
        return _of_preference(fields)
    if fields.get("answer") in _REFUSED and ("label" in fields or "accept" in fields):
        name = "label" if "label" in fields else "accept"
        return fields | {name: UnusableLabel(f"has the `answer` {fields['answer']!r}"), "answer": None}
    if fields.get("answer") == "accept" and ("label" in fields or "accept" in fields):
        return fields | {"answer": None}
    return fields


def _choices(value: Any, question: AnswerSchema) -> Any:
    """Return the value of a field. Label Studio's choices, also as JSON in a CSV cell, become the texts of the options."""
    if isinstance(value, str) and value.startswith('{"choices"'):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return value
    match value:
        case {"choices": list(choices)}:
            return _texts(choices, question)
    return value


def _of_csv_export(fields: Fields) -> Fields | None:
    read = {name: unquote_cell(cell) if isinstance(cell, str) else cell for name, cell in fields.items()}
    read["items"] = [unquote_cell(item) for item in fields.get("items", [])]
    if not read["text"] and not any(read["items"]):
        return None
    return read | {"label": OptionText(read["label"]) if read["label"] else None, "votes": None}


def _of_export(fields: Fields, question: AnswerSchema) -> Fields | None:
    if "text" not in fields:
        return None
    return fields | {"label": _texts(fields["label_text"], question), "label_text": None}


def _texts(said: Any, question: AnswerSchema) -> Any:
    """Return the texts of options as `OptionText`. The numbers of a ranking do not change."""
    if question.kind is QuestionKind.RANKING or not isinstance(said, list):
        return said
    if not said and question.many:
        return OptionText(NONE_OF_THEM)  # an empty list would count as a missing label
    return [OptionText(part) if isinstance(part, str) else part for part in said]


def _of_preference(fields: Fields) -> Fields:
    label: Any = PAIR_ANSWERS[0]
    if fields.get("p") in (_EVEN, str(_EVEN)):
        label = UnusableLabel("is a tie, or was decided by the author: p is 0.5")
    prompt = {"text": fields["prompt"]} if "prompt" in fields and "text" not in fields else {}
    return fields | prompt | {"items": [fields["chosen"], fields["rejected"]], "label": label}


# Label Studio ------------------------------------------------------------------------------------------------------------


def _of_label_studio(fields: Fields, question: AnswerSchema) -> Fields:
    data = dict(fields["data"])
    is_ours = data.keys() >= _EXPORTED_DATA
    prediction = _only(_answers(fields, "predictions", question, is_ours))
    if prediction is not None:
        data["predictions" if isinstance(prediction, UnusableLabel) or data.get("suggestion") is not None else "suggestion"] = (
            prediction
        )
    labels = _answers(fields, "annotations", question, is_ours)
    if labels:
        data["label" if data.get("label") is None else "annotations"] = _only(labels)
    return data | {control: said for control, said in labels.items() if data.get(control) is None}


def _only(answers: Fields) -> Any:
    if len(answers) > 1:
        return UnusableLabel(f"answers {len(answers)} questions: {', '.join(answers)}")
    return next(iter(answers.values()), None)


def _answers(fields: Fields, name: str, question: AnswerSchema, is_ours: bool) -> Fields:
    """Return the answer by the name of each control in Label Studio.

    All annotations must agree; if some are marked as the ground truth, only these count.
    """
    given = [one for one in _objects(fields.get(name)) if not one.get("was_cancelled")]
    given = [one for one in given if one.get("ground_truth") is True] or given
    found: dict[str, list[Any]] = {}
    for one in given:
        of_one: dict[str, list[Any]] = {}
        for result in _objects(one.get("result")):
            said = _of_result(result.get("value"), fields["data"], question, is_ours)
            of_one.setdefault(str(result.get("from_name", "label")), []).append(said)
        for control, several in of_one.items():
            found.setdefault(control, []).append(
                several[0] if len(several) == 1 else UnusableLabel(f"has {len(several)} regions")
            )
    return {
        control: said[0] if all(one == said[0] for one in said) else UnusableLabel(f"differs among {len(said)} annotations")
        for control, said in found.items()
    }


def _objects(found: Any) -> Iterator[Fields]:
    return (one for one in found if isinstance(one, dict)) if isinstance(found, list) else iter(())


def _of_result(value: Any, data: Fields, question: AnswerSchema, is_ours: bool) -> Any:
    match value:
        case {"choices": list(choices)}:
            return _texts(choices, question)
        case {"selected": "left" | "right" as side}:
            return PAIR_ANSWERS[side == "right"]
        case {"ranker": {"rank": list(ids)}}:
            places = {str(item.get("id")): place for place, item in enumerate(_objects(data.get("list")))}
            return [places.get(str(one), one) for one in ids]
        case {"rating": int(stars)}:
            return _of_stars(stars, question, is_ours)
        case {"number": int() | float() as number}:
            return number
    kind = ", ".join(map(str, value)) if isinstance(value, dict) else value
    return UnusableLabel(f"is of the type {kind}, which this project does not accept")


def _of_stars(stars: int, question: AnswerSchema, is_ours: bool) -> Any:
    """Return the option for a number of Label Studio's stars, which count from 1.

    It is ambiguous if the text of another option is this number.
    """
    if question.kind is not QuestionKind.RATING or not 1 <= stars <= len(question.options):
        return stars
    counted = OptionText(question.options[stars - 1])
    if is_ours or str(stars) not in question.options or counted == str(stars):
        return counted
    by_text = f"the option {str(stars)!r} by its text"
    return AmbiguousLabel(f"{stars} is ambiguous: {by_text}, or the option {counted!r} by the number of stars")


class ForeignLabels:
    """Labels of one file. `taken`: fields that `--columns` assigns to another purpose."""

    def __init__(self, question: AnswerSchema, gold_from: str, taken: Collection[str]) -> None:
        self._question, self._gold_from = question, gold_from
        self._fields = [name for name in LABEL_FIELDS if name != gold_from and name not in taken]
        self.suggested: Counter[str] = Counter()
        self._left: Counter[str] = Counter()
        self._reasons: dict[str, str] = {}

    def gold_answer(self, where: str, fields: Fields, items: int) -> Answer | None:
        """Return the right answer of a task, or None if its row has none.

        Raises `UserError` if the field's value is no answer.
        """
        said = fields.get("gold")
        if not self._gold_from or self._gold_from == "gold":
            return self.parse_label(where, "gold", said, items)
        if said not in EMPTY:
            raise UserError(f"{where}: both `gold` and {self._gold_from!r} are present: only one of them can be the gold")
        said = fields.get(self._gold_from)
        return None if said in EMPTY else self.parse_label(where, self._gold_from, said, items)

    def parse_label(self, where: str, name: str, said: Any, items: int) -> Answer | None:
        """Return the answer in the field `name`.

        A label that another program has rejected gives None, and is counted as skipped.
        """
        if isinstance(said, AmbiguousLabel):
            raise UserError(f"{where}: {name} {said}")
        if isinstance(said, UnusableLabel):
            self.count_skipped(where, name, said)
            return None
        return self._question.parse_answer(where, name, said, items)

    def find_suggestion(self, where: str, fields: Fields, items: int) -> tuple[str, Answer] | None:
        """Return the first label that is an answer, with its field name. All other labels are counted as skipped."""
        found: tuple[str, Answer] | None = None
        for name in self._fields:
            said = fields.get(name)
            if said in EMPTY:
                continue
            if found is not None or name == "votes":
                self.count_skipped(
                    where, name, f"the task already has {found[0]!r}" if found else "votes are not imported as labels"
                )
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

    def count_skipped(self, where: str, name: str, why: str) -> None:
        self._left[name] += 1
        self._reasons.setdefault(name, why if why.startswith(where) else f"{where}: {why}")

    @property
    def notes(self) -> list[str]:
        taken = [
            f"{pluralize(count, 'label')} of {name!r} became {'a suggestion' if count == 1 else 'suggestions'}; "
            f"--gold-from {name} imports {'it' if count == 1 else 'them'} as gold instead"
            for name, count in self.suggested.items()
        ]
        left = [
            f"{pluralize(count, 'label')} of {name!r} left out ({self._reasons[name]})" + self._way_out(name)
            for name, count in self._left.items()
        ]
        return taken + left

    def _way_out(self, name: str) -> str:
        if name not in self._fields or name == "votes":
            return ""
        return f"; --gold-from {name} imports such labels as gold, --columns suggestion={name} as suggestions"
