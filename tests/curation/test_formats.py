"""Export files, made from the records of settled tasks."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from curation import commands
from curation.import_export.csv_injection import FORMULA_STARTS, quote_cell, unquote_cell
from curation.import_export.export_formats import FORMATS
from curation.import_export.task_import import read_tasks
from curation.ledger.curation_state import ProjectSpec
from curation.tasks.answers import AnswerSchema, OptionText, QuestionKind
from protocol.errors import UserError

TIME_MS, TIME = 1_795_871_185_007, "2026-11-28T13:06:25.007Z"


def asked(kind: QuestionKind, *options: str, many: bool = False) -> ProjectSpec:
    return ProjectSpec("p", kind, options, many, 0, None, 1, 1, False)


def line(number: int, label: list[int], text: str | None = "?", items: tuple[str, ...] = (), votes: tuple[int, ...] = ()) -> Any:
    shown = {} if text is None else {"text": text, "items": list(items)}
    said = [{"annotator": "aa", "answer": [vote], "height": 1, "time_ms": TIME_MS - 5} for vote in votes]
    return {"task": f"{number:064x}", "number": number, "label": label, "height": 3, "time_ms": TIME_MS, **shown, "votes": said}


def written(name: str, of: ProjectSpec, *lines: Any) -> str:
    return "".join(FORMATS[name].write(of, lambda: lines))


@pytest.mark.parametrize(
    ("of", "said", "expected"),
    [
        (asked(QuestionKind.LABEL, "glad", "sad"), line(0, [1]), ("label", "text", "choices", {"choices": ["sad"]})),
        (
            asked(QuestionKind.LABEL, "a", "b", "c", many=True),
            line(0, [0, 2]),
            ("label", "text", "choices", {"choices": ["a", "c"]}),
        ),
        (asked(QuestionKind.RATING, "bad", "good"), line(0, [2]), ("rating", "text", "rating", {"rating": 2})),
        (asked(QuestionKind.PAIR), line(0, [1], items=("x", "y")), ("pair", "item1,item2", "pairwise", {"selected": "right"})),
        (asked(QuestionKind.PAIR), line(0, [2], items=("x", "y")), ("neither", "item1", "choices", {"choices": ["a tie"]})),
        (
            asked(QuestionKind.RANKING),
            line(0, [2, 0, 1], items=("x", "y", "z")),
            ("rank", "list", "ranker", {"ranker": {"rank": ["2", "0", "1"]}}),
        ),
    ],
)
def test_label_studio_gets_the_label_and_the_file_can_be_imported_again(of: ProjectSpec, said: Any, expected: Any) -> None:
    text = written("label-studio", of, said, line(1, said["label"], None))
    (task,) = json.loads(text)
    ((result,),) = [annotation["result"] for annotation in task["annotations"]]
    assert (task["annotations"][0]["created_at"], task["data"]["time_ms"]) == (TIME, TIME_MS)
    assert (result["from_name"], result["to_name"], result["type"], result["value"]) == expected
    assert [task["data"].get(f"item{place}") for place in range(1, len(said["items"]) + 1)] == said["items"]
    ((again, _),) = read_tasks("again.json", text.encode(), of.kind, of.options, of.many).tasks
    assert (again.text, list(again.items)) == (said["text"], said["items"])
    assert json.loads(written("label-studio", of)) == []


def test_a_table_for_spreadsheets_has_labels_in_words_and_can_be_imported_again() -> None:
    of = asked(QuestionKind.LABEL, "glad", "sad", "odd", many=True)
    lines = [line(0, [0, 2], 'a, "b"\nc'), line(1, [1], None, votes=(1, 1, 0))]
    assert list(csv.reader(io.StringIO(written("csv", of, *lines), newline=""))) == [
        ["number", "text", "label", "votes", "agree", "height", "task", "time"],
        ["0", 'a, "b"\nc', "glad; odd", "0", "0", "3", "0" * 64, TIME],
        ["1", "", "sad", "3", "2", "3", f"{1:064x}", TIME],
    ]
    ((again, _),) = read_tasks("again.csv", written("csv", of, lines[0]).encode(), of.kind, of.options, of.many).tasks
    assert again.text == 'a, "b"\nc'


@pytest.mark.parametrize(
    ("of", "said", "expected"),
    [
        (asked(QuestionKind.RATING, "bad", "good"), line(0, [2]), "0,?,good,0,0,3"),
        (asked(QuestionKind.PAIR), line(0, [3], items=("x", "y")), "0,?,x,y,both bad,0,0,3"),
        (asked(QuestionKind.RANKING), line(0, [2, 0, 1], items=("x", "y", "z")), "0,?,x,y,z,3; 1; 2,0,0,3"),
    ],
)
def test_a_label_in_words(of: ProjectSpec, said: Any, expected: str) -> None:
    assert written("csv", of, said).splitlines()[1].startswith(expected)


def test_preferences_say_who_was_preferred_and_how_clearly() -> None:
    lines = [
        line(0, [1], "q", ("x", "y"), (1, 1, 0, 2)),  # 2 ½ of 4
        line(1, [2], "q", ("u", "v"), (0, 1)),
        line(2, [3], "q", ("u", "v"), (3, 3)),
        line(3, [0], None),
        line(4, [0], "q", ("a", "b")),  # reviewed
        line(5, [0], "q", ("c", "d"), (0, 1, 1)),  # the label is weighted by annotator
        line(6, [0], "q", ("e", "f"), (0, 3)),
    ]
    found = [json.loads(row) for row in written("preferences", asked(QuestionKind.PAIR), *lines).splitlines()]
    assert [(int(row["id"], 16), row["chosen"], row["rejected"], row["p"]) for row in found] == [
        (0, "y", "x", 0.625), (1, "u", "v", 0.5), (4, "a", "b", 1.0), (5, "c", "d", 0.5), (6, "e", "f", 1.0),
    ]  # fmt: skip
    assert all(set(row) == {"id", "prompt", "chosen", "rejected", "p", "time_ms"} for row in found), "every item occurs once"
    with pytest.raises(UserError, match="pairs"):
        written("preferences", asked(QuestionKind.LABEL, "a", "b"), line(0, [0]))


def test_items_of_several_pairs_of_one_prompt_have_a_score() -> None:
    lines = [line(0, [0], "q", ("x", "y")), line(1, [0], "q", ("x", "z")), line(2, [1], "other", ("x", "y"))]
    first, second, third = (json.loads(row) for row in written("preferences", asked(QuestionKind.PAIR), *lines).splitlines())
    assert first["chosen_score"] == second["chosen_score"] > 1 and "rejected_score" not in first
    assert third.keys() == {"id", "prompt", "chosen", "rejected", "p", "time_ms"}, "another prompt"


def test_a_time_beyond_the_calendar_is_its_last_moment() -> None:
    of, said = asked(QuestionKind.LABEL, "glad", "sad"), line(0, [1]) | {"time_ms": 2**53 - 1}
    assert written("csv", of, said).endswith(",9999-12-31T23:59:59.999Z\n")


@pytest.mark.parametrize("digits", ["7" * 3, "7" * 5_000])
def test_a_number_of_any_length_is_no_option(digits: str) -> None:
    with pytest.raises(UserError, match="suggestion"):
        read_tasks(
            "long.jsonl", json.dumps({"text": "a", "suggestion": digits}).encode(), QuestionKind.LABEL, ("glad", "sad"), False
        )


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("a.csv", "id,prompt,good,bad,item_id\n7,q,x,y,z\n"),
        ("a.jsonl", '{"prompt": "q", "good": "x", "bad": "y", "text": "other"}'),
        ("a.json", '[{"id": 7, "data": {"prompt": "q", "good": "x", "bad": "y"}}]'),
    ],
)
def test_a_file_may_call_its_columns_as_it_likes(name: str, file: str) -> None:
    columns = {"text": "prompt", "item1": "good", "item2": "bad"}
    ((task, gold),) = read_tasks(name, file.encode(), QuestionKind.PAIR, (), False, columns=columns).tasks
    assert (task.text, task.items, gold) == ("q", ("x", "y"), None)
    with pytest.raises(UserError, match=r"the field 'prompts' is missing; the file has .*prompt"):
        read_tasks(name, file.encode(), QuestionKind.PAIR, (), False, columns=columns | {"text": "prompts"})


def test_a_column_of_labels_may_be_the_gold() -> None:
    file = b"sentence,label\nWe won.,glad\nIt rains.,\n"
    tasks = read_tasks(
        "a.csv", file, QuestionKind.LABEL, ("glad", "sad"), False, columns={"text": "sentence", "gold": "label"}
    ).tasks
    assert [(task.text, gold) for task, gold in tasks] == [("We won.", (0,)), ("It rains.", None)]


def test_answers_of_pairs_have_names() -> None:
    def said(answer: str) -> Any:
        return AnswerSchema(QuestionKind.PAIR, (), False).parse_answer("tasks", "label", answer, 2)

    assert [said(name) for name in ("the first", "second", "tie", "both bad", "bad", "1")] == [(0,), (1,), (2,), (3,), (3,), (1,)]
    with pytest.raises(UserError, match="'left' is not one of the options: the first, the second, a tie, both bad"):
        said("left")


def test_the_command_line_names_all_formats() -> None:
    """The command line has its own list, since its help must not import the writers."""
    assert tuple(FORMATS) == commands.FORMATS


@pytest.mark.parametrize(
    "text", ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", "\r=1", "＝1", "--1", "-", "+49 170", "-1.", "'=1"]
)
def test_a_formula_gets_an_apostrophe(text: str) -> None:
    assert quote_cell(text) == f"'{text}"


@pytest.mark.parametrize("text", ["", "-1", "+1", "-0.5", "1", "a=b", "'quoted'", "it's", " =1", "'"])
def test_other_texts_and_plain_numbers_stay(text: str) -> None:
    assert quote_cell(text) == text


@given(st.one_of(st.text(), st.text("'=+-@1.\t\ra", max_size=6)))
def test_the_quoting_can_be_undone_exactly(text: str) -> None:
    quoted = quote_cell(text)
    assert unquote_cell(quoted) == text
    assert quoted[:1] not in FORMULA_STARTS or quoted.lstrip("+-").replace(".", "").isdecimal()


def read(
    said: Any, *options: str, kind: QuestionKind = QuestionKind.LABEL, many: bool = False, items: int = 0
) -> tuple[int, ...] | None:
    return AnswerSchema(kind, options, many).parse_answer("a.jsonl:1", "gold", said, items)


def problem(said: Any, *options: str, **more: Any) -> str:
    with pytest.raises(UserError) as caught:
        read(said, *options, **more)
    return str(caught.value)


@pytest.mark.parametrize(
    ("said", "options", "place"),
    [
        (1, ("1", "2", "3"), 0),
        (3, ("1", "2", "3"), 2),
        ("3", ("1", "2", "3"), 2),
        (1, ("2", "1"), 1),  # the options are also positions of one another
        (0, ("1", "0"), 1),
        (-1, ("-1", "0", "1"), 0),
        (1, ("-1", "0", "1"), 2),
        ("-1", ("-1", "0", "1"), 0),
        (1.0, ("1", "2"), 0),  # as pandas writes a column with gaps
        (1e0, ("1", "2"), 0),
        ("1.0", ("1", "2"), 0),  # the same in CSV
        (1.5, ("1", "1.5"), 1),
        (1, ("1.0", "1"), 1),  # text takes precedence over value
        (1.0, ("1", "1.0"), 1),
        (2020, ("2019", "2020"), 1),
        (5, ("0", "05"), 1),
        (True, ("true", "false"), 0),
        (False, ("true", "false"), 1),
        (True, ("False", "True"), 1),
        ("TRUE", ("true", "false"), 0),  # as a spreadsheet writes it
        (True, ("true", "True"), 0),
        ("sad ", ("glad", "sad"), 1),
        ("sad ", ("sad", "sad "), 1),
        (1, ("glad", "sad"), 1),  # no option is a number, so this is a position
        ("1", ("glad", "sad"), 1),
        (1, ("false", "true"), 1),  # both interpretations agree
    ],
)
def test_a_value_whose_text_is_an_option_is_that_option(said: Any, options: tuple[str, ...], place: int) -> None:
    assert read(said, *options) == (place,)
    assert read([said], *options) == (place,)
    assert read([said], *options, many=True) == (place,)


@pytest.mark.parametrize(
    ("said", "options", "readings"),
    [
        (1, ("01", "02"), ("'01' by its value", "'02' by its position")),
        ("1", ("01", "02"), ("'01' by its value", "'02' by its position")),
        (1, ("01", "1.0"), ("'01' by its value", "'1.0' by its value")),
        (1, ("true", "false"), ("'true' by its meaning", "'false' by its position")),
        (0, ("yes", "no"), ("'no' by its meaning", "'yes' by its position")),
        ("tRue", ("true", "True"), ("'true' by its value", "'True' by its value")),
        (0, ("1", "2", "3"), ("not one of the options: 1, 2, 3", "by its position it would be '1'")),
        (2, ("-1", "0", "1"), ("not one of the options: -1, 0, 1", "by its position it would be '1'")),
    ],
)
def test_two_readings_are_an_error_that_shows_both(said: Any, options: tuple[str, ...], readings: tuple[str, ...]) -> None:
    found = problem(said, *options)
    assert found.startswith("a.jsonl:1: gold ") and all(reading in found for reading in readings), found


@pytest.mark.parametrize(
    "said",
    [True, None, [None], [[0]], [["glad"]], {"glad": 1}, 0.0, 0.5, "1e0", -1, 2, "²", "7" * 5_000, float("nan"), "Glad", ""],
)
def test_other_values_are_no_option(said: Any) -> None:
    if said is None:
        assert read(None, "glad", "sad") is None
    else:
        assert "is not one of the options: glad, sad" in problem(said, "glad", "sad")


def test_ratings_are_read_by_their_text_before_their_number() -> None:
    assert read(1, "0", "1", "2", kind=QuestionKind.RATING) == (2,)
    assert read(1, "1", "2", "3", kind=QuestionKind.RATING) == (1,)
    assert read(1, "bad", "good", kind=QuestionKind.RATING) == (1,)
    assert read(1, "01", "02", kind=QuestionKind.RATING) == (1,), "value and number agree"
    assert "is not one of the options: bad, good" in problem(0, "bad", "good", kind=QuestionKind.RATING)


def test_several_options_may_stand_in_one_text() -> None:
    options = ("glad", "sad", "so; so", "1", "2")
    assert read([2, "glad"], *options, many=True) == (0, 4)
    for said in ("sad; glad", "glad;sad", "glad, sad", "glad|sad", "sad\nglad"):
        assert read(said, *options, many=True) == (0, 1)
    assert read("2,1", *options, many=True) == (3, 4)
    assert read("so; so", *options, many=True) == (2,)
    assert read([], *options, many=True) == read("none of them", *options, many=True) == ()
    assert "is ambiguous: 'a' and 'b', or 'a; b'" in problem("a; b", "a", "b", "a; b", many=True)
    assert "is not one of the options" in problem("glad;sad", *options)
    assert "is not one of the options" in problem("glad; bad", *options, many=True)


def test_typed_answers_of_pairs_have_names() -> None:
    said = {"the first": 0, "second": 1, "tie": 2, "both bad": 3, "bad": 3, "1": 1, 0: 0, 3: 3}
    assert [read(name, kind=QuestionKind.PAIR, items=2) for name in said] == [(place,) for place in said.values()]
    for other in ("left", 4, "7", True):
        assert "is not one of the options: the first, the second, a tie, both bad" in problem(
            other, kind=QuestionKind.PAIR, items=2
        )


def test_items_of_a_ranking_count_from_0_or_from_1() -> None:
    for said in ([2, 0, 1], [3, 1, 2], "3; 1; 2", "2 > 0 > 1", ["2", "0", "1"]):
        assert read(said, kind=QuestionKind.RANKING, items=3) == (2, 0, 1)
    for other in ([0, 1, 3], [1, 1, 2], [1, 2], "best", [True, 0, 2], 5):
        assert "a.jsonl:1: gold " in problem(other, kind=QuestionKind.RANKING, items=3)


def test_the_text_of_an_option_is_never_its_number() -> None:
    assert read([OptionText("1")], "0", "1") == (1,)
    assert "is not one of the options" in problem([OptionText("1")], "glad", "sad")
