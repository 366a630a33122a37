"""Users' text files of common formats are read as text, or refused by name."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import UserError
from training.data import text_files
from training.data.text_files import TextFileReport, read_text

TEXTS = ["The fox jumps; it is quick.", "Two\nlines, with a comma and a | bar", "Grüße"]
LINES = "".join(json.dumps({"text": text, "id": 1}) + "\n" for text in TEXTS)
WHOLE = "".join(text + "\n" for text in TEXTS)
QUOTED = "".join(f'"{text}",1\n' for text in TEXTS)


def read(path: Path, column: str = "") -> tuple[str, tuple[str, ...]]:
    findings = TextFileReport()
    return b"".join(read_text(path, column, findings)).decode(), findings.report_lines()


def write(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def parquet_of(columns: dict[str, Any]) -> bytes:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow, of the extra `data`, is not installed")
    from pyarrow import parquet

    stream = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), stream)
    return stream.getvalue()


RECORDS: dict[str, str | bytes] = {
    "lines.jsonl": LINES,
    "lines.ndjson": LINES,
    "lines.json": LINES,
    "array.json": json.dumps([{"text": text} for text in TEXTS], indent=1),
    "array.jsonl": json.dumps([{"text": text} for text in TEXTS]),
    "strings.json": json.dumps(TEXTS),
    "mark.jsonl": "\ufeff" + LINES,
    "capital.jsonl": LINES.replace('"text"', '"Text"'),
    "comma.csv": "text,id\n" + QUOTED,
    "one column.csv": "text\n" + QUOTED.replace(",1\n", "\n"),
    "capital.csv": "\ufeffID, Text \n" + "".join(f'1,"{text}"\n' for text in TEXTS),
    "semicolon.csv": "text;id\n" + QUOTED.replace('",1', '";1'),
    "tab.tsv": "id\ttext\n" + "".join(f'1\t"{text}"\n' for text in TEXTS),
    "bar.csv": "sep=|\nid|text\n" + "".join(f'1|"{text}"\n' for text in TEXTS),
    "utf-16.csv": ("text,id\n" + QUOTED).encode("utf-16"),
    "one.json": json.dumps({"text": WHOLE[:-1]}, indent=1),
}


def refused(why: str, *read_from: Any) -> None:
    with pytest.raises(UserError, match=why):
        read(*read_from)


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
def test_the_texts_of_records_are_learned_and_nothing_else(tmp_path: Path, name: str, packed: bool) -> None:
    content = RECORDS[name].encode() if isinstance(RECORDS[name], str) else RECORDS[name]
    assert read(write(tmp_path / (name + ".gz" * packed), gzip.compress(content) if packed else content)) == (WHOLE, ())


def test_a_packed_text_is_unpacked_whatever_its_name(tmp_path: Path) -> None:
    assert read(write(tmp_path / "a.txt.gz", gzip.compress(WHOLE.encode()))) == (WHOLE, ())
    assert read(write(tmp_path / "a.txt", gzip.compress(WHOLE.encode()))) == (WHOLE, ())


def test_parquet_is_read_by_its_column(tmp_path: Path) -> None:
    content = parquet_of({"id": [1, 2, 3], "Text": TEXTS})
    assert read(write(tmp_path / "a.parquet", content)) == (WHOLE, ())
    assert read(write(tmp_path / "a.parquet", content), "TEXT") == (WHOLE, ())
    refused(r"column 'id' has type int64, not text", tmp_path / "a.parquet", "id")
    refused(r"no column 'body': it has 2 columns: 'id', 'Text'.*--column", tmp_path / "a.parquet", "body")
    refused(r"b\.parquet .*Parquet", write(tmp_path / "b.parquet", content[:100]))


@pytest.mark.parametrize("kind", ["large_string", "dictionary"])
def test_all_kinds_of_text_in_parquet_are_read(tmp_path: Path, kind: str) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow, of the extra `data`, is not installed")
    column = pyarrow.array(TEXTS)
    column = column.dictionary_encode() if kind == "dictionary" else column.cast(pyarrow.large_string())
    assert read(write(tmp_path / "a.parquet", parquet_of({"text": column}))) == (WHOLE, ())


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    refused(
        r"a\.parquet is Parquet.*extra `data`.*pip install pyarrow", write(tmp_path / "a.parquet", b"PAR1" + bytes(40) + b"PAR1")
    )


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", LINES.replace('"text"', '"body"')),
        ("a.json", json.dumps([{"body": text} for text in TEXTS])),
        ("a.csv", "body,id\n" + QUOTED),
    ],
)
def test_another_column_is_named_or_the_error_shows_what_there_is(tmp_path: Path, name: str, content: str) -> None:
    path = write(tmp_path / name, content)
    assert read(path, "body") == read(path, "Body") == (WHOLE, ())
    refused(rf"{re.escape(name)}.*text.*'body'.*--column", path)


def test_records_without_text_are_counted(tmp_path: Path) -> None:
    lines = '{"text": ""}\n{"text": null}\n{"text": "a"}\n'
    assert read(write(tmp_path / "a.jsonl", lines)) == ("a\n", ("records without text left out: 2",))
    assert read(write(tmp_path / "a.csv", 'id,text\n1,a\n2,\n3," "\n')) == ("a\n", ("records without text left out: 2",))


@pytest.mark.parametrize("row", ["1,unquoted, comma", "1"])
def test_a_row_that_does_not_fit_its_header_is_named(tmp_path: Path, row: str) -> None:
    refused(r"a\.csv:3: .*cell", write(tmp_path / "a.csv", f"id,text\n1,good\n{row}\n"))


def test_a_column_of_plain_text_is_an_error(tmp_path: Path) -> None:
    refused(r"a\.txt is plain text.*--column", write(tmp_path / "a.txt", WHOLE), "text")


MARKUP = {
    "page.html": "<!DOCTYPE html><html><body>Hello</body></html>",
    "page.htm": "Hello <b>you</b>",
    "dump.xml": '<?xml version="1.0"?><doc>Hello</doc>',
    "page": "\n<html lang=en>Hello",
    "feed.any": '\ufeff<?xml version="1.0"?><doc>Hello</doc>',
    "data.any": LINES,
    "data": json.dumps([{"text": "a"}], indent=1),
    "letter.rtf": "{\\rtf1 Hello}",
    "map.yaml": "text: a\n",
    "cells.ipynb": '{"cells": []}',
}


@pytest.mark.parametrize("name", MARKUP)
def test_markup_is_refused_by_name(tmp_path: Path, name: str) -> None:
    refused(rf"{name}.*(HTML|XML|JSON|RTF|YAML|notebook).*\.txt", write(tmp_path / name, MARKUP[name]))


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (MARKUP["page.html"], "HTML"),
        (MARKUP["dump.xml"], "XML"),
        (LINES, "JSON"),
        ("id,text\n1,a\n", "table"),
        ("Text;x\na;1\n", "table"),
    ],
)
def test_markup_in_a_text_file_is_said(tmp_path: Path, content: str, kind: str) -> None:
    text, notes = read(write(tmp_path / "a.txt", content))
    assert text.rstrip("\n") == content.rstrip("\n")
    assert len(notes) == 1 and re.search(rf"a\.txt .*{kind}.*learns", notes[0])


@pytest.mark.parametrize(
    "text", ["a < b\n", "<|endoftext|>\nOnce", "{x} is a set", "[1] A note", "Yes, no.\nMaybe\n", "# A\n---\n"]
)
def test_usual_text_is_not_taken_for_markup(tmp_path: Path, text: str) -> None:
    assert read(write(tmp_path / "a.txt", text)) == (text.rstrip("\n") + "\n" if text.endswith("\n") else text + "\n", ())


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        ("Grüße".encode("utf-16"), "UTF-16"),
        (codecs.BOM_UTF16_BE + "Grüße".encode("utf-16-be"), "UTF-16"),
        ("Hello all of you".encode("utf-16-le"), "UTF-16"),
        ("Grüße aus Köln".encode("cp1252"), "Windows-1252"),
        (b"%PDF-1.7\n\xe2\xe3", "PDF"),
        (b"PK\3\4" + bytes(30), "ZIP"),
        (b"\x28\xb5\x2f\xfd" + bytes(30), "Zstandard"),
        (b"BZh91AY&SY" + bytes(30), "bzip2"),
        (b"\xfd7zXZ\0" + bytes(30), "xz"),
    ],
)
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.unknown"])
def test_what_is_no_utf_8_text_is_refused_by_the_name_of_what_it_is(tmp_path: Path, name: str, content: bytes, kind: str) -> None:
    refused(rf"{re.escape(name)} is not a text file.*{kind}", write(tmp_path / name, content))


def test_a_table_in_windows_1252_is_read_and_said(tmp_path: Path) -> None:
    text, notes = read(write(tmp_path / "a.csv", "text\nGrüße aus Köln\n".encode("cp1252")))
    assert text == "Grüße aus Köln\n"
    assert len(notes) == 1 and "Windows-1252" in notes[0]


@pytest.mark.parametrize("content", [b"\x1f\x8b\x08", gzip.compress(WHOLE.encode() * 99)[:-9]])
def test_a_damaged_packed_file_is_named(tmp_path: Path, content: bytes) -> None:
    refused(r"a\.txt\.gz .*gzip", write(tmp_path / "a.txt.gz", content))


# Folders


def test_every_file_that_is_left_out_of_a_folder_is_named_with_the_reason(tmp_path: Path) -> None:
    files: dict[str, str | bytes] = {
        "a.txt": "one\n",
        "b.jsonl.gz": gzip.compress(b"no JSON"),
        "c.csv": "text\ntwo\n",
        "d.html": "<html>",
        "e.rst": "e",
        "f.txt": b"text\0text",
        "._a.txt": b"\0\1",
        ".git/config": "x",
        "sub/.hidden.txt": "x",
        "sub/g.jsonl": LINES,
        "sub/h.png": b"\x89PNG",
        "README.md": "---\nlicense: mit\n---\n",
        "LICENSE.txt": "MIT",
        "empty.txt": "",
    }
    for name, content in files.items():
        write(tmp_path / name, content)
    text, notes = read(tmp_path)
    assert text == "one\ntwo\n" + WHOLE
    named = {line.split(": ")[0].strip(): line.split(": ", 1)[1] for line in notes[1:]}
    assert named.keys() == files.keys() - {"a.txt", "c.csv", "sub/g.jsonl", ".git/config"} | {".git/"}
    assert notes[0] == f"files left out: {len(named)}"
    reasons = {"b.jsonl.gz": "not JSON", "d.html": "HTML", "e.rst": r"\.rst", "f.txt": "NUL", ".git/": "hidden"}
    reasons |= {"._a.txt": "hidden", "README.md": "describes the folder", "empty.txt": "empty"}
    for name, reason in reasons.items():
        assert re.search(reason, named[name]), named[name]


def test_a_bad_file_leaves_no_part_of_its_text(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "one\n")
    write(tmp_path / "b.jsonl", LINES * 9 + "{")
    text, notes = read(tmp_path)
    assert text == "one\n" and "b.jsonl" in notes[1] and "line 28" in notes[1]


def test_a_folder_of_which_nothing_is_left_is_an_error_that_names_its_files(tmp_path: Path) -> None:
    write(tmp_path / "a.html", "<html>")
    write(tmp_path / "b.bin", "x")
    refused(r"(?s)no text.*a\.html.*HTML.*b\.bin", tmp_path)


def test_a_column_is_of_the_records_of_a_folder_alone(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "one\n")
    write(tmp_path / "b.jsonl", LINES.replace("text", "body"))
    assert read(tmp_path, "body") == ("one\n" + WHOLE, ())


def test_a_readme_alone_is_text(tmp_path: Path) -> None:
    write(tmp_path / "README.md", "one\n")
    assert read(tmp_path) == ("one\n", ())


def test_links_to_nothing_and_to_folders_are_named(tmp_path: Path) -> None:
    write(tmp_path / "data/a.txt", "one\n")
    write(tmp_path / "other/b.txt", "two\n")
    (tmp_path / "data/c.txt").symlink_to(tmp_path / "nowhere")
    (tmp_path / "data/d").symlink_to(tmp_path / "other")
    text, notes = read(tmp_path / "data")
    assert text == "one\n"
    assert len(notes) == 3 and "c.txt" in notes[1] + notes[2] and "d/: a link" in notes[1] + notes[2]


def test_the_list_of_what_is_left_out_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert text_files.FILES_NAMED_MAX <= 200
    monkeypatch.setattr(text_files, "FILES_NAMED_MAX", 3)
    write(tmp_path / "a.txt", "one\n")
    for number in range(5):
        write(tmp_path / f"{number}.png", "x")
    _, notes = read(tmp_path)
    assert (notes[0], len(notes), notes[-1]) == ("files left out: 5", 5, "  and 2 more")


def test_names_with_line_breaks_stay_on_their_line(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "one\n")
    write(tmp_path / "b\nc.png", "x")
    _, notes = read(tmp_path)
    assert all("\n" not in note for note in notes)


def test_pyarrow_is_an_extra() -> None:
    assert 'data = ["pyarrow>=' in (Path(__file__).parents[2] / "pyproject.toml").read_text()


@pytest.mark.parametrize("name", ["array.json", "array.jsonl", "comma.csv"])
def test_what_must_be_in_memory_whole_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    path = write(tmp_path / name, RECORDS[name])
    monkeypatch.setattr(text_files, "WHOLE_BYTES_MAX", path.stat().st_size)
    assert read(path)[0] == WHOLE
    monkeypatch.setattr(text_files, "WHOLE_BYTES_MAX", path.stat().st_size - 1)
    refused(rf"{re.escape(name)}.*larger than", path)


def test_a_field_of_a_table_may_be_long(tmp_path: Path) -> None:
    long = "word " * 100_000
    assert read(write(tmp_path / "a.csv", f'text\n"{long}"\n'))[0] == long + "\n"
