from __future__ import annotations

import io
import json
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from curation.ledger.curation_state import AssignmentState, ProjectSpec, Redaction, TaskPageRow, TaskRow, TaskStage
from curation.ledger.transaction_types import ReviewTask
from curation.tasks.answers import QuestionKind
from curation.tasks.task_pages import AnnotationTask, PageEntry, TaskPageBlob, assignment_id, task_id
from protocol import codec
from protocol.errors import RemoteProtocolError, UserError
from rlhf.data import preference_sets
from rlhf.data.preference_sets import (
    PAIRS_MAX,
    PreferencePair,
    decode_records,
    encode_records,
    is_held_out,
    read_preference_file,
    rounds_for_epochs,
    split_held_out,
)
from rlhf.data.tokenized_records import draw_pairs, draw_pairs_by_epoch
from rlhf.ledger.decided_pairs import decided_pairs
from tests.curation.room import AUTHOR, Room, annotators
from training.corpus import DataManifest, split_into_shards

# Sets ---------------------------------------------------------------------------------------------------------------------


def pair(number: int, prompt: str = "q", first: str = "a", second: str = "b", p: int = 1000) -> PreferencePair:
    return PreferencePair(number.to_bytes(8, "big"), prompt, first, second, p)


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
SOME = st.builds(lambda *parts: PreferencePair(bytes(8), *parts), TEXTS, *[TEXTS.filter(bool)] * 2, st.integers(0, 1000))


@settings(max_examples=30)
@given(st.lists(SOME, min_size=1, max_size=8))
def test_a_set_is_found_again_in_its_shards(found: list[PreferencePair]) -> None:
    pairs = [replace(some, id=number.to_bytes(8, "big")) for number, some in enumerate(found)]
    shards: list[bytes] = []
    manifest = split_into_shards(encode_records(pairs), shards.append)
    assert decode_records(io.BytesIO(b"".join(shards)), PreferencePair) == pairs
    assert DataManifest.decode(manifest.encode()) == manifest and manifest.size == sum(map(len, shards))


def frame(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "empty"),
        (b"".join(encode_records([pair(1), pair(1)])), "ascend"),
        (b"".join(encode_records([pair(2), pair(1)])), "ascend"),
        (b"".join(encode_records([pair(1)]))[:-1], "ends within"),
        (b"".join(encode_records([pair(1)])) + b"\0\0", "ends within"),
        (b"\xff\xff\xff\xff", "ends within"),
        (b"\0\0\0\0", "ends within"),
        (frame(codec.encode([bytes(8), "q", "a", "b", 1001])), "1001"),
        (frame(codec.encode([bytes(8), "q", "", "b", 1])), "empty"),
        (frame(codec.encode([bytes(8), "q", "a", "b"])), "Pair"),
        (frame(codec.encode(pair(1)) + b"\0"), "trailing bytes"),
    ],
)
def test_other_bytes_are_no_set(data: bytes, why: str) -> None:
    with pytest.raises(RemoteProtocolError, match=why):
        decode_records(io.BytesIO(data), PreferencePair)


def test_a_set_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preference_sets, "PAIRS_MAX", 2)
    data = b"".join(encode_records(map(pair, range(3))))
    with pytest.raises(RemoteProtocolError, match="more than 2 records"):
        decode_records(io.BytesIO(data), PreferencePair)
    with pytest.raises(UserError, match="f: more than 2 lines"):
        read_preference_file("f", io.BytesIO(b"\n" * 3))


# Files --------------------------------------------------------------------------------------------------------------------


def line(**fields: Any) -> bytes:
    return json.dumps({"prompt": "q", "chosen": "a", "rejected": "b"} | fields).encode() + b"\n"


def test_a_file_is_read_by_lines_and_its_first_response_is_the_chosen_one() -> None:
    data = b"\xef\xbb\xbf" + line() + b"  \r\n" + line(p=0.5, more=1) + line(p=0, prompt="")[:-1]
    assert read_preference_file("f.jsonl", io.BytesIO(data)) == [pair(1), pair(3, p=500), pair(4, prompt="", p=0)]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "f: the file has no pair"),
        (b"\n \n", "f: the file has no pair"),
        (line() + b'{"a": \r\n', "f:2: invalid JSON: Expecting value at character 9"),
        (line() + b"\n" + b'["q", "a", "b"]', "f:3: a line must be a JSON object"),
        (b"\xff", "f:1: not UTF-8 text"),
        (b"[" * 100_000, "f:1: invalid JSON"),
        (line(chosen=None), "f:1: chosen must be a text that is not empty, not null"),
        (line(rejected=""), 'f:1: rejected must be a text that is not empty, not ""'),
        (b'{"chosen": "a", "rejected": "b"}', "f:1: prompt must be a text, not null"),
        (line(prompt="x" * 20_001), "f:1: prompt has 20001 characters, more than 20000"),
        (line(prompt="\ud800"), "f:1: prompt has half a surrogate pair"),
        *((line(p=p), "f:1: p must be a number in 0..1, not ") for p in (-0.001, 1.001, "1", True, None, [], 1e400)),
        (line(p=float("nan")), "f:1: p must be a number in 0..1, not NaN"),
        (b" " * (1 << 20) + b"\n", "f:1: this line is longer than 1 MB"),
    ],
)
def test_a_broken_line_is_named_in_one_line(data: bytes, message: str) -> None:
    with pytest.raises(UserError) as error:
        read_preference_file("f", io.BytesIO(data))
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_the_longest_line_that_a_set_can_hold_is_read() -> None:
    longest = "\U0001f600" * 20_000
    (found,) = read_preference_file("f", io.BytesIO(line(prompt=longest, chosen=longest, rejected=longest)))
    assert decode_records(io.BytesIO(b"".join(encode_records([found]))), PreferencePair) == [found]


# Projects -----------------------------------------------------------------------------------------------------------------

ASKED = ProjectSpec("pairs", QuestionKind.PAIR, (), False, 2, None, 3, 0, False)
TASKS = 12
PAGE = TaskPageBlob(
    tuple(PageEntry(bytes([n]) * 16, AnnotationTask(f"prompt {n}", (f"first {n}", f"second {n}"))) for n in range(TASKS))
)


@pytest.fixture(scope="module")
def decided() -> tuple[Room, bytes]:
    """Return a room of twelve pairs and three people. The answers to tasks repeat 0, 1, 2, 3; one vote on task 8 differs."""
    # Two people are asked first, chosen by a hash. The different vote must come from one of them.
    room, project = next(made for made in map(answered, range(3)) if task_of(*made, 8).opened == 3)
    if task_of(room, project, 8).stage is TaskStage.REVIEW:  # if two of three votes are not certain enough
        room.say(AUTHOR, "curation/review-task", ReviewTask(task_id(project, 8), (0,)))
    room.say(AUTHOR, "curation/redact", Redaction(project, 0, 4, bytes(32), bytes([1]) * 32, 100))
    return room, project


def answered(other: int) -> tuple[Room, bytes]:
    """Return a room in which three people have answered all tasks. Person `other` gives a different vote on task 8."""
    room = Room()
    project, people = room.project(ASKED, TASKS), annotators(3)

    def answer(place: int, number: int) -> tuple[int, ...]:
        return (1 if (place, number) == (other, 8) else number % 4,)

    for _ in range(2):  # a third person is asked only after the different vote is opened, which may be the last one
        room.worked(people, answer)
        for place, who in enumerate(people):  # the first to commit had nothing to open yet
            keys = {number: assignment_id(task_id(project, number), who.public) for number in range(TASKS)}
            mine = {number: room.curation.assignments.get_record(key) for number, key in keys.items()}
            waiting = [number for number, vote in mine.items() if vote and vote.state is AssignmentState.COMMITTED]
            room.batch(openings=[room.opening(who, keys[number], answer(place, number)) for number in waiting])
    return room, project


def task_of(room: Room, project: bytes, number: int) -> TaskRow:
    row = room.curation.tasks.get_record(task_id(project, number))
    assert row is not None
    return row


def page(key: bytes, entry: TaskPageRow) -> TaskPageBlob:
    assert key[-4:] == bytes(4) and entry.count == TASKS
    return PAGE


def found(room: Room, project: bytes, height: int | None = None) -> dict[int, PreferencePair]:
    pairs = decided_pairs(room.curation, project, room.state.height if height is None else height, page)
    assert [some.id for some in pairs] == sorted(some.id for some in pairs)
    numbers = {task_id(project, number): number for number in range(TASKS)}
    return {numbers[some.id]: some for some in pairs}


@pytest.mark.real("processes")
def test_the_pairs_of_a_project_are_those_that_people_compared(decided: tuple[Room, bytes]) -> None:
    room, project = decided
    pairs = found(room, project)
    assert set(pairs) == {number for number in range(TASKS) if number % 4 != 3} - {4}, "not: both bad, redacted"
    for number, some in pairs.items():
        assert (some.prompt, some.first, some.second) == (f"prompt {number}", f"first {number}", f"second {number}")
        assert some.p == {0: 1000, 1: 0, 2: 500}[number % 4] if number != 8 else some.p == 667, "two of three votes"
    assert decode_records(io.BytesIO(b"".join(encode_records(sorted(pairs.values(), key=lambda some: some.id)))), PreferencePair)


@pytest.mark.real("processes")
def test_a_pair_that_was_decided_later_is_not_among_them(decided: tuple[Room, bytes]) -> None:
    room, project = decided
    heights = {number: task_of(room, project, number).height for number in found(room, project)}
    middle = sorted(heights.values())[len(heights) // 2]
    before = found(room, project, middle - 1)
    assert set(before) == {number for number, height in heights.items() if height < middle} < set(heights)
    assert set(found(room, project, middle)) == {number for number, height in heights.items() if height <= middle}


@pytest.mark.real("processes")
def test_a_page_that_lost_a_text_gives_no_pair_of_it(decided: tuple[Room, bytes]) -> None:
    room, project = decided
    entries = list(PAGE.entries)
    entries[0] = PageEntry(None, None, bytes(32))
    pairs = decided_pairs(room.curation, project, room.state.height, lambda *_: TaskPageBlob(tuple(entries)))
    assert {some.id for some in pairs} == {some.id for some in found(room, project).values()} - {task_id(project, 0)}


@pytest.mark.real("processes")
def test_what_is_no_project_of_pairs_is_refused(decided: tuple[Room, bytes]) -> None:
    room, _ = decided
    for project in (room.project(tasks=1), bytes(32)):
        with pytest.raises(UserError, match="does not compare pairs"):
            decided_pairs(room.curation, project, 9, page)


# Steps --------------------------------------------------------------------------------------------------------------------

DRAW = partial(draw_pairs, bytes(32), 3, b"t" * 32, 1, count=64, pairs=1000, seed=0)


def test_the_pairs_of_a_step_follow_from_all_that_names_it_and_from_nothing_else() -> None:
    drawn = DRAW().tolist()
    assert drawn == DRAW().tolist() and all(0 <= number < 1000 for number in drawn) and len(set(drawn)) > 50
    others = [
        draw_pairs(b"j" * 32, 3, b"t" * 32, 1, count=64, pairs=1000, seed=0),
        draw_pairs(bytes(32), 4, b"t" * 32, 1, count=64, pairs=1000, seed=0),
        draw_pairs(bytes(32), 3, b"u" * 32, 1, count=64, pairs=1000, seed=0),
        draw_pairs(bytes(32), 3, b"t" * 32, 2, count=64, pairs=1000, seed=0),
        DRAW(seed=1),
    ]
    assert len({tuple(other) for other in (drawn, *others)}) == 6
    assert DRAW(count=10).tolist() == drawn[:10]


def test_every_pair_is_drawn_about_equally_often() -> None:
    drawn = Counter(
        number for step in range(100) for number in draw_pairs(bytes(32), 0, bytes(32), step, count=50, pairs=50, seed=0)
    )
    assert set(drawn) == set(range(50)) and max(drawn.values()) < 150


def test_a_trainer_meets_all_pairs_before_it_meets_one_again_each_in_an_order_of_its_own() -> None:
    def met(job: bytes = bytes(32), trainer: bytes = bytes(32), seed: int = 0) -> list[int]:
        """Return the pairs drawn in 20 rounds of five steps with three pairs."""
        of = partial(draw_pairs_by_epoch, steps=5, count=3, pairs=100, seed=seed)
        return [int(number) for round in range(20) for step in range(5) for number in of(job, round, trainer, step)]

    passes = [met()[start : start + 100] for start in range(0, 300, 100)]
    assert all(sorted(one) == list(range(100)) for one in passes)
    others = [met(job=b"j" * 32)[:100], met(trainer=b"t" * 32)[:100], met(seed=1)[:100]]
    assert len({tuple(one) for one in (*passes, *others)}) == 6
    assert len(set(met()[:50]) - set(met(trainer=b"t" * 32)[:50])) > 10, "two trainers do not meet the same ones"


def test_a_prompt_is_on_one_side_in_every_set() -> None:
    pairs = [pair(number, prompt=f"prompt {number % 200}", first=str(number)) for number in range(1000)]
    train, held_out = split_held_out(pairs)
    assert {some.prompt for some in train}.isdisjoint({some.prompt for some in held_out})
    assert sorted((*train, *held_out), key=lambda some: some.id) == pairs
    assert 10 <= len({some.prompt for some in held_out}) <= 35, "a tenth of 200"
    assert all(is_held_out(some.prompt) for some in held_out)
    assert split_held_out(pairs, 0) == (pairs, [])
    with pytest.raises(UserError, match="all pairs are held out"):
        split_held_out(pairs, 1000)


@pytest.mark.parametrize(("epochs", "pairs", "rounds"), [(1, 32, 1), (1, 33, 2), (3, 100, 10), (1, PAIRS_MAX, 32_768)])
def test_an_epoch_is_as_many_draws_as_pairs(epochs: int, pairs: int, rounds: int) -> None:
    assert rounds_for_epochs(epochs, pairs, trainers=2, steps=4, batch=4) == rounds
