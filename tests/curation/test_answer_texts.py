"""Answers as files and people write them."""

from __future__ import annotations

from typing import Any

import pytest

from curation.tasks.answers import AnswerSchema, OptionText, QuestionKind
from protocol.errors import UserError


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
        (1, ("2", "1"), 1),  # options that are positions of one another
        (0, ("1", "0"), 1),
        (-1, ("-1", "0", "1"), 0),
        (1, ("-1", "0", "1"), 2),
        ("-1", ("-1", "0", "1"), 0),
        (1.0, ("1", "2"), 0),  # as pandas writes a column with gaps
        (1e0, ("1", "2"), 0),
        ("1.0", ("1", "2"), 0),  # the same in CSV
        (1.5, ("1", "1.5"), 1),
        (1, ("1.0", "1"), 1),  # the text goes before the value
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
        (1, ("glad", "sad"), 1),  # no option is a number: a position
        ("1", ("glad", "sad"), 1),
        (1, ("false", "true"), 1),  # both readings agree
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
        (0, ("1", "2", "3"), ("none of the options: 1, 2, 3", "by its position it would be '1'")),
        (2, ("-1", "0", "1"), ("none of the options: -1, 0, 1", "by its position it would be '1'")),
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
        assert "is none of the options: glad, sad" in problem(said, "glad", "sad")


def test_ratings_are_read_by_their_text_before_their_number() -> None:
    assert read(1, "0", "1", "2", kind=QuestionKind.RATING) == (2,)
    assert read(1, "1", "2", "3", kind=QuestionKind.RATING) == (1,)
    assert read(1, "bad", "good", kind=QuestionKind.RATING) == (1,)
    assert read(1, "01", "02", kind=QuestionKind.RATING) == (1,), "value and number agree"
    assert "is none of the options: bad, good" in problem(0, "bad", "good", kind=QuestionKind.RATING)


def test_several_options_may_stand_in_one_text() -> None:
    options = ("glad", "sad", "so; so", "1", "2")
    assert read([2, "glad"], *options, many=True) == (0, 4)
    for said in ("sad; glad", "glad;sad", "glad, sad", "glad|sad", "sad\nglad"):
        assert read(said, *options, many=True) == (0, 1)
    assert read("2,1", *options, many=True) == (3, 4)
    assert read("so; so", *options, many=True) == (2,)
    assert read([], *options, many=True) == read("none of them", *options, many=True) == ()
    assert "has 2 readings: 'a' and 'b', or 'a; b'" in problem("a; b", "a", "b", "a; b", many=True)
    assert "is none of the options" in problem("glad;sad", *options)
    assert "is none of the options" in problem("glad; bad", *options, many=True)


def test_answers_of_pairs_have_names() -> None:
    said = {"the first": 0, "second": 1, "tie": 2, "both bad": 3, "bad": 3, "1": 1, 0: 0, 3: 3}
    assert [read(name, kind=QuestionKind.PAIR, items=2) for name in said] == [(place,) for place in said.values()]
    for other in ("left", 4, "7", True):
        assert "is none of the options: the first, the second, a tie, both bad" in problem(other, kind=QuestionKind.PAIR, items=2)


def test_items_of_a_ranking_count_from_0_or_from_1() -> None:
    for said in ([2, 0, 1], [3, 1, 2], "3; 1; 2", "2 > 0 > 1", ["2", "0", "1"]):
        assert read(said, kind=QuestionKind.RANKING, items=3) == (2, 0, 1)
    for other in ([0, 1, 3], [1, 1, 2], [1, 2], "best", [True, 0, 2], 5):
        assert "a.jsonl:1: gold " in problem(other, kind=QuestionKind.RANKING, items=3)


def test_the_text_of_an_option_is_never_its_number() -> None:
    assert read([OptionText("1")], "0", "1") == (1,)
    assert "is none of the options" in problem([OptionText("1")], "glad", "sad")
