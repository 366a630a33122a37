from __future__ import annotations

import io
import itertools
import json
import string
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest

from peer import cli
from protocol.errors import UserError
from rlhf.moderation import confusables
from rlhf.moderation import word_matcher as filter_module
from rlhf.moderation.word_matcher import ENTRIES_MAX, READINGS_MAX, WordMatcher, entry_problem, filter_jsonl, parse_word_list

LIST = parse_word_list("list", b"moron*\nscum\n*fool*\ncad\nhell\nbl*er\nwhore\nanus\nloaf\n# nothing\n\ntit\n")


@pytest.fixture(scope="module")
def words() -> WordMatcher:
    return WordMatcher(LIST)


FOUND = [
    ("what scum!", "scum"),
    ("SCUM", "scum"),
    ("two morons", "moron*"),
    ("a tomfoolery", "*fool*"),
    ("you blunder", "bl*er"),
    ("ѕсum", "scum"),  # Cyrillic
    ("ѕсυм", "scum"),
    ("σℯѕcum of Scum", "scum"),
    ("ｍｏｒｏｎ", "moron*"),
    ("𝓂𝑜𝓇𝑜𝓃", "moron*"),
    ("ⓜⓞⓡⓞⓝ", "moron*"),
    ("🅼🅾🆁🅾🅽", "moron*"),
    ("mörön", "moron*"),
    ("s\u0336c\u0336u\u0336m", "scum"),
    ("mo\u200bro\u2060n", "moron*"),
    ("mo\U000e0001ron", "moron*"),
    ("sc\u00adum", "scum"),
    ("s c u m", "scum"),
    ("a s c u m I know", "scum"),
    ("such a c a d", "cad"),
    ("y o u   m o r o n s", "moron*"),
    ("s.c.u.m", "scum"),
    ("s-c_u.m", "scum"),
    ("sc-um", "scum"),
    ("mo rons", "moron*"),
    ("m oron", "moron*"),
    ("sc um", "scum"),
    ("s\u200b c\u0301 U m", "scum"),
    ("scuuuum", "scum"),
    ("m0r0n", "moron*"),
    ("$cum!", "scum"),
    ("sc(um", "scum"),
    ("heII", "hell"),  # capital i
    ("scum123", "scum"),
    ("sc*m, m#r*ns", "scum"),
    ("m*r*ns", "moron*"),
    ("s\U0001f342um", "scum"),
    ("mor\u4e00n", "moron*"),
    ("s1c2u3m", "scum"),
]


@pytest.mark.parametrize(("text", "word"), FOUND)
def test_a_word_is_found_however_it_is_written(words: WordMatcher, text: str, word: str) -> None:
    assert words.find_entry(text) == word


PASSING = [
    "",
    "scumble, Scummy, a cadet, shell, hello",
    "blurb and eraser",
    "he'll see, she'll go, we'll",
    "who re-elected an us-versus-them party",
    "an us and a who re",
    "a cade-t, s-caden, lo-af-er",
    "s c u m b l e and s.c.u.m.b.l.e",
    "S. Cum, U.S. cum laude; C. A. Dent",
    "don't it; can't its",
    "A1 2B 3CAD4E 5C0M",
    "tit1e and c@det",
    "1 0 1 | ! $ @",
    "http://sc.um.example/a",
    "s**m*n, **sc** c*d s*c*u",
    "how are you, Том, как сам?",
    "今日は天気",
    "sc um".title() + " Um",
    "a m  s   c    u     m",
]


@pytest.mark.parametrize("text", PASSING)
def test_a_text_without_one_passes(words: WordMatcher, text: str) -> None:
    assert words.find_entry(text) is None


def test_stars_stand_for_letters_in_their_order() -> None:
    found = [
        word
        for n in range(1, 7)
        for word in map("".join, itertools.product("abcd", repeat=n))
        if WordMatcher(("a*bc*d",)).find_entry(word)
    ]
    assert found == [
        word
        for n in range(1, 7)
        for word in map("".join, itertools.product("abcd", repeat=n))
        if word[0] == "a" and word[-1] == "d" and len(word) > 3 and "bc" in word[1:-1]
    ]


def test_every_character_has_a_place_and_no_letter_is_invisible() -> None:
    for letter, characters in confusables.LETTERS.items():
        assert len(set(characters)) == len(characters), f"twice at {letter}: {[c for c in characters if characters.count(c) > 1]}"
        assert all(not c.isascii() and c not in confusables.SPACES for c in characters)
    ranges = sorted(confusables.INVISIBLE)
    assert all(first <= last for first, last in ranges)
    assert all(last < first for (_, last), (first, _) in itertools.pairwise(ranges)), "no range lies in another"


def test_every_space_of_this_python_is_one_of_the_table() -> None:
    """The table fits other versions of Python, too: Unicode has added no space since 2002."""
    spaces = {chr(code) for code in range(sys.maxunicode + 1) if chr(code).isspace() or unicodedata.category(chr(code)) == "Zs"}
    assert spaces <= set(confusables.SPACES)


@pytest.mark.parametrize("text", ["η" * 2_000, "η " * 1_000, "ηη-" * 700, "1!" * 1_000, "I l" * 700, "fool" * 500, "sl" * 1_000])
def test_the_work_grows_with_the_text_and_no_faster(text: str, words: WordMatcher, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = 0
    real = WordMatcher._entry

    def counted(self: WordMatcher, word: str) -> str | None:
        nonlocal looked
        looked += 1
        return real(self, word)

    monkeypatch.setattr(WordMatcher, "_entry", counted)
    words.find_entry(text)
    assert looked <= READINGS_MAX * len(text)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "w: the file has no words"),
        (b"# all\n \n", "w: the file has no words"),
        (b"good\nno good\n", "w:2: 'no good' is not a valid entry"),
        (b"a\n*\n", "w:2: '*' is not a valid entry"),
        (b"a.b", "w:1: 'a.b' is not a valid entry"),
        (b"x" * 65, f"w:1: '{'x' * 64}'… is longer than 64 characters"),
        (b"a\n\xff", "w:2: not UTF-8 text"),
        ("\n".join(f"w{n}" for n in range(ENTRIES_MAX + 1)).encode(), f"w: {ENTRIES_MAX + 1} words are more than {ENTRIES_MAX}"),
    ],
)
def test_a_list_says_what_is_wrong_with_it(data: bytes, message: str) -> None:
    with pytest.raises(UserError) as error:
        parse_word_list("w", data)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_a_list_has_one_digest_whatever_the_order_of_its_lines() -> None:
    one, other = parse_word_list("w", b"\xef\xbb\xbfa1\r\nb*\n"), parse_word_list("w", b"b*\n\na1\na1")
    assert one == other == ("a1", "b*")
    assert entry_problem("сука") is None and WordMatcher(("сука",)).find_entry("Сука!") == "сука"


@pytest.mark.real("processes")
@pytest.mark.parametrize("order", ["options first", "file first"])
def test_the_command_needs_no_peer_and_its_file_may_stand_anywhere(
    order: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, texts = tmp_path / "words", tmp_path / "in.jsonl"
    words.write_text("scum\n")
    texts.write_text('{"id": 7, "text": "s c u m"}\n{"id": "b", "text": "scumble"}\n')
    options = ["--blocklist", str(words)]
    assert cli.main(["rlhf", "filter", *(options if order == "options first" else ()), str(texts), *options, "--json"]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        {"id": 7, "blocked": True, "word": "scum"},
        {"id": "b", "blocked": False, "word": None},
    ]
    assert cli.main(["rlhf", "filter", str(texts), *options]) == 0
    assert capsys.readouterr().out == "7: scum\n1 of 2 texts are blocked\n"
    texts.write_text("{")
    assert cli.main(["rlhf", "filter", str(texts), *options]) == 2
    assert capsys.readouterr().err.startswith(f"peer: error: {texts}:1: invalid JSON")
    assert cli.main(["rlhf", "filter", str(texts)]) == 2 and "--blocklist FILE" in capsys.readouterr().err


# Wrong filters, each of which one of the texts above must show -------------------------------------------------------------


def no_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filter_module, "_runs", lambda pieces: iter(()))


def parts_of_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant: a part of a run of letters counts as a word."""
    monkeypatch.setattr(filter_module, "PIECES_MAX", 4)


def any_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant: two adjacent English words count as one split word."""
    monkeypatch.setattr(filter_module, "SHORT_WORDS", frozenset())


def parts_of_leetspeak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filter_module, "_is_part", lambda pieces, place: False)


def numbers_as_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filter_module, "_is_leetspeak", lambda units: True)


def contractions_as_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filter_module, "SUFFIXES", ())


def visible_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confusables, "INVISIBLE", ())


def only_latin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filter_module, "_READINGS", {c: (c.lower(),) for c in string.ascii_letters})


WRONG = (
    *(no_runs, parts_of_runs, any_pieces, parts_of_leetspeak),
    *(numbers_as_words, contractions_as_pieces, visible_marks, only_latin),
)


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_the_texts_show_a_wrong_filter(wrong: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    filter_module._unit.cache_clear()
    wrong(monkeypatch)
    words = WordMatcher(LIST)
    found = [(text, word) for text, word in FOUND if words.find_entry(text) != word] + [
        text for text in PASSING if words.find_entry(text)
    ]
    filter_module._unit.cache_clear()
    assert found


def test_lines_of_a_file_keep_their_ids() -> None:
    data = b"".join(
        json.dumps(row).encode() + b"\n" for row in ({"id": 7, "text": "s c u m"}, {"id": "b", "text": "scumble", "more": 1})
    )
    assert list(filter_jsonl(LIST, "f", io.BytesIO(data))) == [
        {"id": 7, "blocked": True, "word": "scum"},
        {"id": "b", "blocked": False, "word": None},
    ]
    for bad in (b'{"id": 1}', b'{"text": "a"}', b'{"id": 1, "text": 2}'):
        with pytest.raises(UserError, match="f:2: a line needs an id and a text"):
            list(filter_jsonl(LIST, "f", io.BytesIO(b'{"id": 0, "text": ""}\n' + bad)))
