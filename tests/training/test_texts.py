from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator

import pytest

from protocol.sampling import SamplingOptions
from training import worker_protocol
from training.text_generation import OPEN_MAX, StopSequenceDecoder, TextGeneration, TextGenerations

TEXT = "Grüße, 世界 🙂 the end. The end? ababac".encode()


def through(stops: StopSequenceDecoder, parts: list[bytes]) -> list[str]:
    shown = []
    for part in parts:
        shown.append(stops.feed_bytes(part))
        if stops.has_ended:
            return shown
    return [*shown, stops.flush_text()]


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ((), TEXT.decode()),
        (("never",), TEXT.decode()),
        (("end", "The"), "Grüße, 世界 🙂 the "),
        (("界",), "Grüße, 世"),
        ((" 🙂 t",), "Grüße, 世界"),
        (("abac",), "Grüße, 世界 🙂 the end. The end? ab"),
        (("d. The end", "end. The", ". T"), "Grüße, 世界 🙂 the end"),
        (("G",), ""),
    ],
)
def test_a_text_ends_at_the_first_stop_text_wherever_tokens_end(stop: tuple[str, ...], expected: str) -> None:
    draw = random.Random(1)
    cuts = [sorted(draw.sample(range(1, len(TEXT)), count)) for count in (0, 1, 5, 20, len(TEXT) - 1) for _ in range(5)]
    for cut in cuts:
        parts = [TEXT[a:b] for a, b in itertools.pairwise([0, *cut, len(TEXT)])]
        assert "".join(through(StopSequenceDecoder(stop), parts)) == expected


def test_nothing_is_shown_that_a_stop_text_or_half_a_character_would_take_back() -> None:
    stops = StopSequenceDecoder(["\n\n", "User:"])
    parts = (b"one", b"\n", b"Us", b"e", b"d ", "ü".encode()[:1], "ü".encode()[1:], b"\n")
    assert [stops.feed_bytes(part) for part in parts] == [
        "one", "", "\n", "", "Used ", "", "ü", ""
    ]  # fmt: skip
    assert stops.flush_text() == "\n"


def test_bytes_that_are_no_text_are_shown_as_such() -> None:
    assert through(StopSequenceDecoder([]), [b"a\xff", b"b\xc3"]) == ["a\ufffd", "b", "\ufffd"]


def made(pieces: str) -> Iterator[bytes]:
    return (character.encode() for character in pieces)


def generate(number: int, told: int = 0) -> worker_protocol.GenerateRequest:
    return worker_protocol.GenerateRequest(bytes(32), "/model", "p", SamplingOptions(), text_number=number, told_characters=told)


def told_in(
    texts: TextGenerations, number: int, pieces: str, withheld: str = ""
) -> tuple[list[str], worker_protocol.GenerateReply]:
    parts: list[str] = []
    while True:
        begin = TextGeneration(
            made(pieces),
            StopSequenceDecoder([]),
            len("".join(parts)),
            (lambda text: withheld.encode() in text) if withheld else None,
        )
        done = texts.next_slice(generate(number, len("".join(parts))), lambda begin=begin: begin)  # type: ignore[misc]
        parts.append(done.text)
        if done.is_over:
            return parts, done


@pytest.fixture
def one_token_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    monkeypatch.setattr("training.text_generation.SLICE_SECONDS", 0.0)


@pytest.mark.usefixtures("one_token_a_slice")
def test_a_text_that_may_be_withheld_is_told_when_all_of_it_was_checked() -> None:
    parts, done = told_in(TextGenerations(), 1, "a bad word", withheld="bad")
    assert "".join(parts) == "" and done.is_withheld
    parts, done = told_in(TextGenerations(), 1, "a good word", withheld="bad")
    assert parts == [*[""] * 11, "a good word"] and not done.is_withheld


@pytest.mark.usefixtures("one_token_a_slice")
def test_a_text_that_is_not_kept_any_more_begins_anew_and_comes_to_the_same() -> None:
    texts = TextGenerations()
    told = "".join(
        texts.next_slice(generate(1, told), lambda: TextGeneration(made("a text"), StopSequenceDecoder([]), 0)).text
        for told in range(3)
    )
    assert told == "a t"
    for number in range(2, OPEN_MAX + 2):
        texts.next_slice(generate(number), lambda: TextGeneration(made("others"), StopSequenceDecoder([]), 0))
    begun: list[TextGeneration] = []

    def begin() -> TextGeneration:
        begun.append(TextGeneration(made("a text"), StopSequenceDecoder([]), 3))
        return begun[-1]

    while len(told) < 6:
        told += texts.next_slice(generate(1, len(told)), begin).text
    assert told == "a text" and len(begun) == 1
    texts = TextGenerations()
    told += texts.next_slice(generate(1, len(told)), lambda: TextGeneration(made("a text"), StopSequenceDecoder([]), 6)).text
    assert told == "a text"


@pytest.mark.usefixtures("one_token_a_slice")
def test_a_text_that_nobody_waits_for_any_more_is_dropped() -> None:
    def cancelled() -> Iterator[bytes]:
        yield b"a"
        raise RuntimeError("nobody waits")

    texts = TextGenerations()
    assert texts.next_slice(generate(1), lambda: TextGeneration(cancelled(), StopSequenceDecoder([]), 0)).text == "a"
    with pytest.raises(RuntimeError):
        texts.next_slice(generate(1, 1), lambda: pytest.fail("it is here"))
    assert not texts._open


def test_a_text_as_long_as_a_message_can_be_ends() -> None:
    pieces = itertools.repeat(b"x" * 1_000)
    text, told = TextGeneration(pieces, StopSequenceDecoder([]), 0), ""
    while not text.is_over:
        told += text.make_slice(0.0)
    assert 0 < worker_protocol.TEXT_BYTES_MAX - len(told) < 1_000
