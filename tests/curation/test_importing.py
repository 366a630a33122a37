"""Task files of other programs, and our own exports as input."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from curation.import_export.export_formats import FORMATS
from curation.import_export.task_import import ParsedTasks, TaskWithGold, read_tasks, split_into_pages
from curation.ledger.curation_state import ProjectSpec
from curation.limits import PAGE_BYTES_MAX, PAGE_TASKS_MAX, SALT_BYTES, TEXT_CHARACTERS_MAX
from curation.tasks.answers import QuestionKind, answer_problem, answer_words
from curation.tasks.task_pages import AnnotationTask, PageEntry, TaskPageBlob
from protocol import codec
from protocol.errors import UserError

MOODS = ("pos", "neg")


def read(
    name: str,
    data: bytes | str,
    options: Sequence[str] = MOODS,
    *,
    kind: QuestionKind = QuestionKind.LABEL,
    many: bool = False,
    gold_from: str = "",
    columns: dict[str, str] | None = None,
) -> ParsedTasks:
    encoded = data.encode() if isinstance(data, str) else data
    return read_tasks(name, encoded, kind, tuple(options), many, columns=columns or {}, gold_from=gold_from)


def lines(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def problem(*arguments: Any, **more: Any) -> str:
    with pytest.raises(UserError) as caught:
        read(*arguments, **more)
    return str(caught.value)


def texts(file: ParsedTasks) -> list[str]:
    return [one.task.text for one in file.tasks]


def suggestions(file: ParsedTasks) -> list[tuple[int, ...] | None]:
    return [None if one.task.suggestion is None else tuple(one.task.suggestion) for one in file.tasks]


def golds(file: ParsedTasks) -> list[tuple[int, ...] | None]:
    return [one.gold for one in file.tasks]


# Answers by their text ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["gold", "suggestion", "label"])
@pytest.mark.parametrize("ending", ["jsonl", "json", "csv"])
def test_a_number_is_the_option_with_that_text_in_every_format(what: str, ending: str) -> None:
    rows = [{"text": f"t{number}", what: number} for number in (1, 2, 3, 4)]
    data = {
        "jsonl": lines(*rows),
        "json": json.dumps([{"data": row} for row in rows]),
        "csv": f"text,{what}\n" + "".join(f"{row['text']},{row[what]}\n" for row in rows),
    }[ending]
    file = read(f"a.{ending}", data, "12345")
    assert (golds(file) if what == "gold" else suggestions(file)) == [(0,), (1,), (2,), (3,)]


def test_an_ambiguous_answer_names_its_line_and_both_readings() -> None:
    assert problem("a.jsonl", lines({"text": "a", "gold": "01"}, {"text": "b", "gold": 1}), ("01", "02")).startswith(
        "a.jsonl:2: gold '1' is ambiguous: the option '01' by its value, or the option '02' by its position"
    )


def test_a_value_that_json_has_not_is_named() -> None:
    assert "a.jsonl:1: invalid JSON: NaN is not valid in JSON: write null" in problem("a.jsonl", '{"text": "a", "gold": NaN}')
    assert "a.jsonl:1: invalid JSON: 'gold' is present twice" in problem("a.jsonl", '{"text": "a", "gold": 1, "gold": 0}')


# Labels ------------------------------------------------------------------------------------------------------------------

STUDIO = {"from_name": "mood", "to_name": "text", "type": "choices"}


def studio(*annotations: Any, **more: Any) -> str:
    results = [{"result": result} if isinstance(result, list) else result for result in annotations]
    return json.dumps([{"id": 1, "data": {"text": "Hello", **more}, "annotations": results}])


def choice(*choices: str, name: str = "mood") -> list[Any]:
    return [STUDIO | {"from_name": name, "value": {"choices": list(choices)}}]


LABELLED = [
    ("doccano.csv", "text,label\nHello,neg\n"),
    ("capital.csv", "Text,Label\nHello,neg\n"),
    ("doccano.jsonl", lines({"id": 1, "text": "Hello", "label": ["neg"]})),
    ("plain.jsonl", lines({"text": "Hello", "labels": "neg"})),
    ("prodigy.jsonl", lines({"text": "Hello", "label": "neg", "answer": "accept", "meta": {"src": "x"}})),
    ("choice.jsonl", lines({"text": "Hello", "accept": ["neg"], "answer": "accept", "options": [{"id": "neg", "text": "Bad"}]})),
    ("position.jsonl", lines({"text": "Hello", "label": 1})),
    ("studio.json", studio(choice("neg"))),
    ("studio.csv", 'text,label\nHello,"{""choices"": [""neg""]}"\n'),
    ("two.json", studio(choice("neg"), choice("neg"))),
    ("truth.json", studio(choice("pos"), {"result": choice("neg"), "ground_truth": True})),
    ("cancelled.json", studio({"result": choice("pos"), "was_cancelled": True}, choice("neg"))),
]  # fmt: skip


@pytest.mark.parametrize(("name", "data"), LABELLED)
def test_a_label_becomes_a_suggestion_and_the_import_says_so(name: str, data: str) -> None:
    file = read(name, data)
    assert (texts(file), suggestions(file), golds(file)) == (["Hello"], [(1,)], [None])
    assert any("1 label of" in note and "became a suggestion; --gold-from " in note for note in file.notes), file.notes


@pytest.mark.parametrize(("name", "data"), LABELLED)
def test_a_label_becomes_the_right_answer_where_its_field_is_named(name: str, data: str) -> None:
    file = read(name, data, gold_from={"plain.jsonl": "labels", "choice.jsonl": "accept"}.get(name, "label"))
    assert (suggestions(file), golds(file)) == ([None], [(1,)]), "no suggestion gives the gold away"


@pytest.mark.parametrize(
    ("name", "data", "why"),
    [
        ("spans.jsonl", lines({"text": "Hello", "spans": [{"start": 0, "end": 2, "label": "neg"}]}), "not one of the options"),
        ("sequence.jsonl", lines({"text": "Hello", "label": [[0, 2, "neg"]]}), "not one of the options"),
        ("other.jsonl", lines({"text": "Hello", "label": "angry"}), "label 'angry' is not one of the options: pos, neg"),
        ("reject.jsonl", lines({"text": "Hello", "label": "neg", "answer": "reject"}), "has the `answer` 'reject'"),
        ("ignore.jsonl", lines({"text": "Hello", "accept": ["neg"], "answer": "ignore"}), "has the `answer` 'ignore'"),
        ("differ.json", studio(choice("neg"), choice("pos")), "differs among 2 annotations"),
        ("several.json", studio(choice("neg") + choice("pos", name="topic")), "answers 2 questions: mood, topic"),
        ("regions.json", studio([STUDIO | {"value": {"start": 0, "end": 2, "labels": ["neg"]}}]), "this project does not accept"),
        ("cats.jsonl", lines({"text": "Hello", "cats": {"pos": 0.1, "neg": 0.9}}), "not one of the options"),
    ],
)  # fmt: skip
def test_labels_that_are_no_answer_are_counted_with_a_reason_and_a_way_out(name: str, data: str, why: str) -> None:
    file = read(name, data)
    assert texts(file) == ["Hello"]
    assert suggestions(file) == [None]
    (note,) = file.notes
    assert "1 label of" in note and "left out" in note and why in note and "--gold-from" in note, note


def test_choices_of_label_studio_are_texts_and_never_positions() -> None:
    assert "'1' is not one of the options" in read("a.json", studio(choice("1"))).notes[0]
    assert golds(read("a.json", studio(choice("1")), "0123", gold_from="label")) == [(1,)]
    assert golds(read("a.json", studio(choice("b", "a")), "abc", many=True, gold_from="mood")) == [(0, 1)]


def test_stars_of_label_studio_are_read_both_ways() -> None:
    def stars(options: Sequence[str], gold_from: str = "label") -> ParsedTasks:
        return read(
            "a.json",
            studio([{"from_name": "r", "type": "rating", "value": {"rating": 2}}]),
            options,
            kind=QuestionKind.RATING,
            gold_from=gold_from,
        )

    assert golds(stars("123")) == golds(stars(("bad", "good"))) == [(2,)]
    with pytest.raises(UserError, match="label 2 is ambiguous: the option '2' by its text, or the option '1' by the number"):
        stars("0123")
    assert "is ambiguous" in stars("0123", "").notes[0] and suggestions(stars("0123", "")) == [None]


def test_other_answers_of_label_studio() -> None:
    side = [{"from_name": "p", "type": "pairwise", "value": {"selected": "right"}}]
    assert golds(read("a.json", studio(side, items=["x", "y"]), (), kind=QuestionKind.PAIR, gold_from="label")) == [(1,)]
    order = [{"from_name": "p", "type": "ranker", "value": {"ranker": {"rank": ["c", "a", "b"]}}}]
    ranking = read(
        "a.json",
        studio(order, items=["x", "y", "z"], list=[{"id": one, "title": one} for one in "abc"]),
        (),
        kind=QuestionKind.RANKING,
        gold_from="label",
    )
    assert golds(ranking) == [(2, 0, 1)]


def test_predictions_stay_suggestions_beside_gold() -> None:
    row = {"data": {"text": "Hello"}, "predictions": [{"result": choice("pos")}], "annotations": [{"result": choice("neg")}]}
    file = read("a.json", json.dumps([row]), gold_from="label")
    assert (suggestions(file), golds(file)) == ([(0,)], [(1,)])


def test_no_label_becomes_a_suggestion_in_a_file_with_gold() -> None:
    file = read("a.jsonl", lines({"text": "a", "label": "neg", "gold": "neg"}, {"text": "b", "label": "pos"}))
    assert (suggestions(file), golds(file)) == ([None, None], [(1,), None])
    assert "2 labels of 'label' left out (a.jsonl:1: suggestions beside gold could reveal it)" in file.notes[0]


def test_wrong_gold_is_an_error_and_an_empty_one_is_none() -> None:
    assert golds(
        read(
            "a.jsonl",
            lines({"text": "a", "label": "neg"}, {"text": "b", "label": None}, {"text": "c", "label": []}),
            gold_from="label",
        )
    ) == [(1,), None, None]
    assert "a.csv:3: label 'angry' is not one of the options" in problem(
        "a.csv", "text,label\na,neg\nb,angry\n", gold_from="label"
    )
    assert "the field 'labels' is missing; the file has items, label, text" in problem(
        "a.jsonl", lines({"text": "a", "items": [], "label": "neg"}), gold_from="labels"
    )
    assert "only one of them can be the gold" in problem(
        "a.jsonl", lines({"text": "a", "gold": "neg", "label": "neg"}), gold_from="label"
    )
    assert golds(read("a.csv", "text,Answer\na,neg\n", gold_from="answer")) == [(1,)], "in any case"


def test_a_field_may_be_named_in_any_case() -> None:
    rows = lines({"text": "a", "label": "neg", "answer": "reject"}, {"text": "b", "label": "neg"})
    for more in ({"gold_from": "LABEL"}, {"columns": {"gold": "Label", "text": "TEXT"}}):
        file = read("a.jsonl", rows, **more)  # type: ignore[arg-type]
        assert golds(file) == [None, (1,)] and "has the `answer` 'reject'" in file.notes[0]
    assert "2 fields mean 'label': 'label', 'LABEL'" in problem("a.csv", "text,label,LABEL\na,pos,neg\n", gold_from="Label")


def test_a_field_with_another_use_is_no_label() -> None:
    file = read("a.jsonl", lines({"answer": "Hello", "label": "neg"}), columns={"text": "answer", "gold": "label"})
    assert (texts(file), golds(file), file.notes) == (["Hello"], [(1,)], ())


def test_pairs_of_preferences_are_read() -> None:
    file = read(
        "a.jsonl",
        lines({"prompt": "q", "chosen": "x", "rejected": "y"}, {"prompt": "q", "chosen": "u", "rejected": "v", "p": 0.5}),
        (),
        kind=QuestionKind.PAIR,
    )
    assert [tuple(one.task.items) for one in file.tasks] == [("x", "y"), ("u", "v")]
    assert (texts(file), suggestions(file)) == (["q", "q"], [(0,), None])
    table = read("a.csv", "prompt,chosen,rejected,p\nq,x,y,1.0\nq,u,v,0.5\n", (), kind=QuestionKind.PAIR)
    assert (texts(table), suggestions(table)) == (["q", "q"], [(0,), None])


def test_twenty_bad_lines_of_a_file_are_named() -> None:
    named = problem("a.jsonl", lines(*[{"text": ""}] * 40)).splitlines()
    assert [line.split(": ")[0] for line in named] == [f"a.jsonl:{number}" for number in range(1, 21)]


def test_a_page_holds_as_many_tasks_and_bytes_as_its_bounds_say() -> None:
    for text, count in (("x", 2 * PAGE_TASKS_MAX + 1), ("x" * TEXT_CHARACTERS_MAX, 120)):
        pages = list(split_into_pages([TaskWithGold(AnnotationTask(text, ()), None)] * count))
        sizes = [len(codec.encode(TaskPageBlob(tuple(PageEntry(bytes(SALT_BYTES), task) for task, _ in page)))) for page in pages]
        assert sum(map(len, pages)) == count and max(map(len, pages)) <= PAGE_TASKS_MAX
        assert PAGE_BYTES_MAX // 2 < max(sizes) <= PAGE_BYTES_MAX or max(map(len, pages)) == PAGE_TASKS_MAX


# Our own exports ---------------------------------------------------------------------------------------------------------

STRANGE = ("=1+1", "nul \0\x1b", "'=1", "-1", "  spaces  ", "a\r\nb\rc\nd", "\tx", 'quo"te; , |', "@x", "ﷺ 漢字")
EXPORTED = [
    (ProjectSpec("p", QuestionKind.LABEL, ("2", "1", "-1", "=x"), False, 0, None, 1, 1, False), [[0], [1], [2], [3]]),
    (ProjectSpec("p", QuestionKind.LABEL, ("a", "b; c", "=x"), True, 0, None, 1, 1, False), [[0, 2], [1], [], [0, 1, 2]]),
    (ProjectSpec("p", QuestionKind.RATING, ("0", "1", "2"), False, 0, None, 1, 1, False), [[1], [2], [3]]),
    (ProjectSpec("p", QuestionKind.PAIR, (), False, 2, None, 1, 1, False), [[0], [1], [2], [3]]),
    (ProjectSpec("p", QuestionKind.RANKING, (), False, 3, None, 1, 1, False), [[0, 1, 2], [2, 0, 1]]),
]


def exported(of: ProjectSpec, labels: list[list[int]]) -> list[Any]:
    found = []
    for number, label in enumerate(labels * 3):
        text = STRANGE[number % len(STRANGE)]
        items = [STRANGE[(number + place) % len(STRANGE)] for place in range(of.items)]
        said = {"label": label, "label_text": answer_words(of.kind, of.options, label)}
        votes = [{"annotator": "aa", "answer": label, "height": 1, "time_ms": 7}]
        found.append(
            {
                "task": f"{number:064x}",
                "number": number,
                **said,
                "height": 3,
                "time_ms": 7,
                "text": text,
                "items": items,
                "votes": votes,
            }
        )
    return found


@pytest.mark.parametrize("format", ["jsonl", "csv", "label-studio"])
@pytest.mark.parametrize(("of", "labels"), EXPORTED, ids=lambda of: of.kind if isinstance(of, ProjectSpec) else "")
def test_an_export_can_be_imported_again_with_its_labels(format: str, of: ProjectSpec, labels: list[list[int]]) -> None:
    rows = exported(of, labels)
    data = "".join(FORMATS[format].write(of, lambda: rows))
    name = {"csv": "a.csv", "label-studio": "a.json"}.get(format, "a.jsonl")
    file = read(name, data, of.options, kind=of.kind, many=of.many, gold_from="label")
    assert [(one.task.text, list(one.task.items)) for one in file.tasks] == [(row["text"], row["items"]) for row in rows]
    assert golds(file) == [tuple(row["label"]) for row in rows]
    assert suggestions(read(name, data, of.options, kind=of.kind, many=of.many)) == golds(file)


def test_an_export_of_preferences_can_be_imported_again() -> None:
    of, labels = EXPORTED[3]
    rows = exported(of, labels)
    file = read("a.jsonl", "".join(FORMATS["preferences"].write(of, lambda: rows)), (), kind=QuestionKind.PAIR)
    pairs = [tuple(row["items"] if row["label"] != [1] else row["items"][::-1]) for row in rows if row["label"] != [3]]
    assert [tuple(one.task.items) for one in file.tasks] == pairs
    assert set(suggestions(file)) == {(0,), None}, "of a tie nothing is said"


def test_an_exported_label_means_the_same_option_in_another_order() -> None:
    of = ProjectSpec("p", QuestionKind.LABEL, ("glad", "sad"), False, 0, None, 1, 1, False)
    for format, name in (("jsonl", "a.jsonl"), ("csv", "a.csv"), ("label-studio", "a.json")):
        data = "".join(FORMATS[format].write(of, lambda: exported(of, [[1]])))
        assert suggestions(read(name, data, ("sad", "glad"))) == [(0,)] * 3
        assert suggestions(read(name, data, ("other", "no"))) == [None] * 3


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("'=+-@\t\r\n,;\"")), min_size=1))
def test_any_texts_come_back_from_an_exported_table(written: list[str]) -> None:
    of = ProjectSpec("p", QuestionKind.LABEL, ("-1", "0", "=1"), False, 0, None, 1, 1, False)
    texts = [text if text.strip() else f"x{text}" for text in written]
    rows = [row | {"text": text} for row, text in zip(exported(of, [[0], [1], [2]] * len(texts)), texts, strict=False)]
    file = read("a.csv", "".join(FORMATS["csv"].write(of, lambda: rows)), of.options, gold_from="label")
    assert [(one.task.text, one.gold) for one in file.tasks] == [(row["text"], tuple(row["label"])) for row in rows]


@pytest.mark.parametrize("format", ["jsonl", "csv"])
def test_exported_lines_without_a_text_are_left_out_and_counted(format: str) -> None:
    of, labels = EXPORTED[0]
    rows = exported(of, labels)
    for name in ("text", "items"):
        del rows[1][name]
    file = read(f"a.{format}", "".join(FORMATS[format].write(of, lambda: rows)), of.options)
    assert len(file.tasks) == len(rows) - 1
    assert any(note.startswith("1 line left out: the text is redacted") for note in file.notes)


def test_votes_of_an_export_are_no_labels() -> None:
    of, labels = EXPORTED[0]
    file = read("a.jsonl", "".join(FORMATS["jsonl"].write(of, lambda: exported(of, labels))), of.options)
    assert any("12 labels of 'votes' left out" in note for note in file.notes)


def test_an_apostrophe_of_another_file_stays() -> None:
    assert texts(read("a.csv", "text\n'=1\n")) == ["'=1"]


# Separators, headers and encodings ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.csv", "text;label\nHello, you;neg\n"),
        ("a.tsv", "text\tlabel\nHello, you\tneg\n"),
        ("a.csv", "text\tlabel\nHello, you\tneg\n"),
        ("a.csv", "text|label\nHello, you|neg\n"),
        ("a.txt", "text;label\nHello, you;neg\n"),
        ("a.CSV", '"text";"label"\r\n"Hello, you";"neg"\r\n\r\n;\r\n'),
        ("a.csv", 'sep=;\r\ntext;label\r\n"Hello, you";neg\r\n'),
        ("a.csv", '"sep=:"\ntext:label\nHello, you:neg\n'),
        ("a.csv", "\ufeffsep=\t\nTEXT\tLABEL\nHello, you\tneg\n"),
        ("a.csv", '\n text ,"Label"\n"Hello, you",neg,\n,\n  \n'),
        ("a.csv", 'text,label\r"Hello, you",neg\r'),
        ("a.csv", 'Text,text,label\nnot this,"Hello, you",neg\n'),
        ("a.csv", 'note,note,text,label\n1,2,"Hello, you",neg\n'),
        ("a.csv", 'text,label,,\n"Hello, you",neg,,\n,,,\n'),
        ("a.jsonl", lines({"Text": "Hello, you", " LABEL ": "neg"})),
    ],
)
def test_separators_and_the_case_of_headers_are_recognised(name: str, data: str) -> None:
    file = read(name, data)
    assert (texts(file), suggestions(file)) == (["Hello, you"], [(1,)])


def test_a_line_break_within_quotes_stays_and_lines_are_counted_as_they_stand() -> None:
    file = read("a.csv", 'sep=;\r\ntext;gold\r\n"one\r\ntwo";neg\r\n')
    assert (texts(file), golds(file)) == (["one\r\ntwo"], [(1,)])
    assert "a.csv:4: gold 'bad'" in problem("a.csv", 'sep=;\ntext;gold\n"one";neg\ntwo;bad\n')


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("sentence,mood\na,b\n", "a.csv:1: no column is named `text`, or `item1`, `item2` and so on; it has 2 columns: 's"),
        ("sentence;mood\na;b\n", "it has 2 columns: 'sentence', 'mood'"),
        ("just a line\n", "it has one column: 'just a line'"),
        ("", "a.csv: the file has no line"),
        ("text\n", "a.csv: the file has no tasks"),
        ("text,text\na,b\n", "a.csv:1: 2 fields mean 'text': 'text', 'text'"),
        ("Text, TEXT\na,b\n", "a.csv:1: 2 fields mean 'text': 'Text', 'TEXT'"),
        ('text\n"open\nfoo\n', "a.csv:3: unexpected end of data"),
        ("text,label\na,b,c\n", "a.csv:2: this line does not have the columns of the first line"),
        ("text,label\na\n", "a.csv:2: this line does not have the columns of the first line"),
    ],
)  # fmt: skip
def test_a_message_shows_the_columns_that_were_found(data: str, said: str) -> None:
    assert said in problem("a.csv", data)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_unicode_with_a_byte_order_mark_is_read(encoding: str, name: str) -> None:
    text = "text,label\r\nCafé 漢字,neg\r\n" if name == "a.csv" else lines({"text": "Café 漢字", "label": "neg"})
    mark = "\ufeff" if encoding.endswith(("-le", "-be")) else ""
    file = read(name, (mark + text).encode(encoding))
    assert (texts(file), suggestions(file)) == (["Café 漢字"], [(1,)])


def test_windows_1252_is_read_and_the_note_shows_a_word() -> None:
    file = read("a.csv", "text\nplain\nCafé – “naïve” 5 € l’été\n".encode("windows-1252"))
    assert texts(file) == ["plain", "Café – “naïve” 5 € l’été"]
    assert file.notes == ("a.csv is read as Windows-1252, with 'Café' in line 3; save it as UTF-8 if that word is wrong",)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("text\nПривет\n".encode("windows-1251"), "a.csv:2: not text in UTF-8 (byte 0xCF) or Windows-1252"),
        ("text\nда не мы вы он но\n".encode("windows-1251"), "or Windows-1252"),
        ("text\nzażółć gęślą\n".encode("windows-1250"), "or Windows-1252; save the file as UTF-8"),
        ("text\n日本語\n".encode("shift-jis"), "or Windows-1252"),
        ("text\n中文文本\n".encode("gbk"), "or Windows-1252"),
        ("text\nΚαλημέρα\n".encode("iso-8859-7"), "or Windows-1252"),
        ("text\nCafé\n".encode() + b"Caf\xe9\n", "a.csv:3: not text in UTF-8 (byte 0xE9)"),
        (b"text\n\x81\n", "a.csv:2: not text in UTF-8 (byte 0x81)"),
        ("text\nhello\n".encode("utf-16-le"), "a.csv: the file contains zero bytes, as UTF-16 without a byte order mark"),
        ("text\nПривет\n".encode("utf-16-le"), "as UTF-16 without a byte order mark"),
        (b"\xff\xfet\x00e", "a.csv: the file begins as UTF-16, but byte 4 is invalid"),
        (b"\xef\xbb\xbftext\n\xff\n", "a.csv: the file begins as UTF-8, but byte 8 is invalid"),
    ],
)
def test_other_encodings_are_refused_by_name(data: bytes, said: str) -> None:
    assert said in problem("a.csv", data)


def test_tasks_come_with_their_gold() -> None:
    assert read("a.jsonl", lines({"text": "a", "gold": "neg"})).tasks[0] == TaskWithGold(
        read("a.jsonl", lines({"text": "a"})).tasks[0].task, (1,)
    )


# Arbitrary files ---------------------------------------------------------------------------------------------------------

NAMES = (
    *("text", "items", "item1", "label", "gold", "suggestion", "data", "annotations", "predictions", "answer", "accept", "spans"),
    *("chosen", "rejected", "p", "result", "value", "choices", "rating", "ranker", "rank", "selected", "list", "id", "votes"),
    *("label_text", "task", "number", "height"),
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.sampled_from(["pos", "1", "reject"])
VALUES = st.recursive(
    SCALARS, lambda some: st.lists(some, max_size=3) | st.dictionaries(st.sampled_from(NAMES), some, max_size=6)
)


@given(
    rows=st.lists(st.dictionaries(st.sampled_from(NAMES), VALUES), max_size=3),
    kind=st.sampled_from(QuestionKind),
    many=st.booleans(),
    gold_from=st.sampled_from(["", "label", "gold", "answer"]),
    form=st.sampled_from(["jsonl", "json", "studio"]),
)
def test_arbitrary_rows_are_tasks_or_named(rows: list[Any], kind: QuestionKind, many: bool, gold_from: str, form: str) -> None:
    items = {QuestionKind.PAIR: ["a", "b"], QuestionKind.RANKING: ["a", "b", "c"]}.get(kind, [])
    rows = [{"text": "t", "items": items, **row} for row in rows]
    options = () if items else ("pos", "1", "true")
    data = {"jsonl": lines(*rows), "json": json.dumps(rows), "studio": json.dumps([{"data": row, **row} for row in rows])}[form]
    name = "a.jsonl" if form == "jsonl" else "a.json"
    try:
        file = read(name, data, options, kind=kind, many=many and kind is QuestionKind.LABEL, gold_from=gold_from)
    except UserError:
        return
    for one in file.tasks:
        for answer in (one.gold, one.task.suggestion):
            assert answer is None or answer_problem(kind, len(options), many, len(one.task.items), tuple(answer)) is None


@given(
    data=st.binary() | st.text('text,;\t"\r\n=ié').map(str.encode), name=st.sampled_from(["a.csv", "a.tsv", "a.txt", "a.json"])
)
def test_arbitrary_bytes_are_tasks_or_named(data: bytes, name: str) -> None:
    for start in (b"", b"text,label\n", b"sep=;\n"):
        try:
            assert read(name, start + data).tasks
        except UserError:
            continue
