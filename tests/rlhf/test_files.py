"""Files of instructions and preferences: common forms are read, and bad lines are reported, or skipped and counted."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any, cast

import pytest

from protocol import codec
from protocol.errors import UserError
from rlhf.api.supervised_jobs import TruncationSide, count_stop_texts, prepare_records
from rlhf.data.dataset_files import MISFITS_NAMED_MAX, InvalidLines, read_records
from rlhf.data.preference_sets import PreferencePair, read_examples, read_preference_file, split_held_out
from rlhf.data.tokenized_records import tokenize_responses
from rlhf.objectives.supervised_objectives import REWARD, DpoTerms, InstructTerms
from tests.rlhf.test_supervised import OF
from training.api.job_notes import preparation_notes
from training.data.tokenizer import BpeTokenizer, ByteTokenizer, Tokenizer, train_bpe
from training.job_spec import JobSpec, PreparationCounts
from training.transformer import BYTES, BYTES_WITH_END, ModelSpec

USER = "User: {}\nAssistant: "
HELLO = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}


def lines(*rows: Any) -> io.BytesIO:
    return io.BytesIO("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows).encode())


def messages(*said: Any) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in zip(("user", "assistant") * 3, said, strict=False)]


# Forms ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "prompt", "response"),
    [
        ({"instruction": "Say 0", "input": "", "output": "It is 0"}, USER.format("Say 0"), "It is 0"),
        ({"instruction": "Add", "input": "1 2", "output": "3"}, USER.format("Add\n1 2"), "3"),
        ({"instruction": "Add", "output": "3", "system": "Be short."}, "Be short.\n" + USER.format("Add"), "3"),
        (
            {"instruction": "Add", "output": "3", "history": [["Hi", "Hello."]]},
            USER.format("Hi") + "Hello.\n" + USER.format("Add"),
            "3",
        ),
        ({"instruction": "Add", "context": "1 2", "response": "3"}, USER.format("Add\n1 2"), "3"),
        ({"question": "Why?", "answer": "So.\n#### 3"}, USER.format("Why?"), "So.\n#### 3"),
        ({"conversations": HELLO}, USER.format("Hi"), "Hello."),
        ({"conversations": [{"from": "system", "value": "Be short."}, *HELLO]}, "Be short.\n" + USER.format("Hi"), "Hello."),
        ({"conversations": HELLO, "system": "Be short."}, "Be short.\n" + USER.format("Hi"), "Hello."),
        ({"conversations": messages("Hi", "Hello.")}, USER.format("Hi"), "Hello."),
        ({"messages": messages([{"type": "text", "text": "Hi"}], "Hello.")}, USER.format("Hi"), "Hello."),
        (
            {"messages": messages("Hi", [{"type": "text", "text": part} for part in ("Hel", "lo.")])},
            USER.format("Hi"),
            "Hello.",
        ),
        ({"messages": [{"role": "developer", "content": "x"}, *messages("Hi", "Hello.")]}, "x\n" + USER.format("Hi"), "Hello."),
        *(
            ({"conversations": [*HELLO[:1], {"from": role, "value": "Hello."}]}, USER.format("Hi"), "Hello.")
            for role in ("chatgpt", "model", "bot", "assistant")
        ),
        ({"messages": messages("Hi", "\n\nSure.")}, USER.format("Hi"), "\n\nSure."),
    ],
)
def test_forms_of_instructions(row: dict[str, Any], prompt: str, response: str) -> None:
    for stream in (lines(row), lines([row]), io.BytesIO(json.dumps([row], indent=1).encode())):
        [found] = read_examples("f", stream)
        assert (found.prompt, found.response) == (prompt, response)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"messages": [*messages("Hi"), CALL]}, "response has a message with tool_calls: tool calls are not supported"),
        ({"messages": [*messages("Hi"), CALL, {"role": "tool", "content": "x"}, messages("", "Yes.")[1]]}, "with tool_calls"),
        (
            {"messages": [*messages("Hi"), {"role": "assistant", "content": "", "function_call": {"name": "f"}}]},
            "with function_call",
        ),
        (
            {"messages": [*messages("Hi", "x"), {"role": "tool", "content": "x"}]},
            'of the role "tool": only roles of system',
        ),
        ({"messages": messages("Hi", "Hello."), "tools": [{"type": "function"}]}, "tools are not supported"),
        ({"conversations": [*HELLO, {"from": "function_call", "value": "x"}]}, 'of the role "function_call"'),
        ({"conversations": HELLO[:1]}, "the last message of response is of the role 'user', not 'assistant'"),
        ({"messages": messages([{"type": "image_url", "image_url": {}}], "A cat.")}, 'a part of the type "image_url"'),
        ({"instruction": "Add", "input": 3, "output": "3"}, "input and system must be texts"),
        ({"instruction": "Add", "history": ["a"], "output": "3"}, "history must be pairs of texts"),
        ({"prompt": "a", "completion": "b", "label": "science"}, 'label must be true or false .*, not "science"'),
        ({"prompt": "a", "completion": "b", "label": None}, "not null"),
    ],
)
def test_what_cannot_be_learned_as_text_is_refused_by_name(row: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=f"f:1: .*{why}"):
        read_examples("f", lines(row))
    assert [found.response for found in read_examples("f", lines({"prompt": "a", "response": "b"}, row), InvalidLines(True))] == [
        "b"
    ]


@pytest.mark.parametrize("bad", [False, 0, 0.0, "false", "False", "0"])
def test_a_completion_that_is_labelled_as_bad_is_left_out_and_counted(bad: Any) -> None:
    rows = [{"prompt": "q", "completion": text, "label": good} for text, good in (("BAD", bad), ("good", True), ("fine", 1))]
    misfits = InvalidLines()
    assert [one.response for one in read_examples("f", lines(*rows), misfits)] == ["good", "fine"] and misfits.left_out == 1
    weighted = {"messages": [*messages("q"), {"role": "assistant", "content": "BAD", "weight": 0}]}
    assert [one.response for one in read_examples("f", lines(weighted, rows[1]))] == ["good"]
    with pytest.raises(UserError, match="the file has no response"):
        read_examples("f", lines(rows[0]))


def hh(*turns: str) -> str:
    return "".join(f"\n\n{('Human', 'Assistant')[number % 2]}: {turn}" for number, turn in enumerate(turns))


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt", "answers"),
    [
        (hh("Tree?", "Dig."), hh("Tree?", "Dog."), "Human: Tree?\n\nAssistant:", (" Dig.", " Dog.")),
        (
            hh("Who?", "I am called Assistant: a helper."),
            hh("Who?", "A car."),
            "Human: Who?\n\nAssistant:",
            (" I am called Assistant: a helper.", " A car."),
        ),
        (
            hh("Who?", "Assistant: x"),
            hh("Who?", "Assistant: y"),
            "Human: Who?\n\nAssistant:",
            (" Assistant: x", " Assistant: y"),
        ),
        (
            hh("Say Assistant: x", "So:\n\nAssistant: x"),
            hh("Say Assistant: x", "No."),
            "Human: Say Assistant: x\n\nAssistant:",
            (" So:\n\nAssistant: x", " No."),
        ),
        (hh("a", "b", "c", "d"), hh("a", "b", "c", "e"), "Human: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:", (" d", " e")),
    ],
)
def test_transcripts_part_at_the_last_turn_that_they_share(
    chosen: str, rejected: str, prompt: str, answers: tuple[str, str]
) -> None:
    [found] = read_preference_file("f", lines({"chosen": chosen, "rejected": rejected}))
    assert (found.prompt, found.responses) == (prompt, answers)


@pytest.mark.parametrize(
    ("chosen", "rejected", "why"),
    [
        (hh("Fruit.", "Apple.", "More?", "Pear."), hh("Fruit.", "A car.", "No.", "Sorry."), "differ before their last turn"),
        (hh("Fruit.", "Apple.", "More?", "Pear."), hh("Fruit.", "A car."), "differ before their last turn"),
        (hh("Fruit.", "Apple."), hh("Fruit.", ""), 'rejected must be a text that is not empty, not ""'),
        (hh("Fruit.", "Apple."), "\n\nHuman: Fruit.\n\nAssistant:", "rejected must be a text that is not empty"),
        (hh("Fruit.", "Apple."), hh("Tree.", "Apple."), "have different prompts"),
    ],
)
def test_transcripts_that_are_no_pair_are_named_or_left_out(chosen: str, rejected: str, why: str) -> None:
    rows = [{"prompt": "q", "chosen": "a", "rejected": "b"}, {"chosen": chosen, "rejected": rejected}]
    with pytest.raises(UserError, match=f"f:2: .*{why}"):
        read_preference_file("f", lines(*rows))
    misfits = InvalidLines(True)
    assert len(read_preference_file("f", lines(*rows), misfits)) == 1 and misfits.left_out == 1


def test_preferences_with_turns_before_them() -> None:
    answers = {"chosen": {"from": "gpt", "value": "Yes."}, "rejected": {"from": "gpt", "value": "No."}}
    for before in (
        {"conversations": HELLO[:1]},
        {"question": "Hi"},
        {"instruction": "Hi", "input": ""},
        {"prompt": messages("Hi")},
    ):
        [found] = read_preference_file("f", lines(before | answers))
        assert (found.prompt, *found.responses) == (USER.format("Hi"), "Yes.", "No.")


# Misfits --------------------------------------------------------------------------------------------------------------


def test_twenty_misfits_are_named_with_line_and_reason_and_the_others_counted() -> None:
    rows = [{"prompt": "a", "response": "b"} if number % 2 else {"prompt": "a"} for number in range(60)]
    with pytest.raises(UserError, match=r"30 lines cannot be used, of which the first 20 are named here$"):
        read_examples("f", lines(*rows))
    with pytest.raises(UserError) as caught:
        read_examples("f", lines(*rows), InvalidLines(False))
    named = str(caught.value).splitlines()
    assert len(named) == MISFITS_NAMED_MAX + 1 == 21
    assert [line.split(": ")[0] for line in named[:20]] == [f"f:{number}" for number in range(1, 41, 2)]
    assert named[20] == "30 lines cannot be used, of which the first 20 are named here: --skip-bad leaves them out"
    misfits = InvalidLines(True)
    assert len(read_examples("f", lines(*rows), misfits)) == misfits.left_out == 30


def test_a_line_of_any_kind_can_be_left_out() -> None:
    good = json.dumps({"prompt": "a", "response": "b"})
    data = "\n".join((good, "{", "[1]", "x" * (3 << 20), good)).encode() + b"\n\xff\xfe\n"
    misfits = InvalidLines(True)
    found = read_examples("f", io.BytesIO(data), misfits)
    assert [int.from_bytes(one.id, "big") for one in found] == [1, 5] and misfits.left_out == 4


@pytest.mark.parametrize(("indent", "what"), [(None, "elements"), (1, "elements"), (0, "lines")])
def test_a_file_has_so_many_records(indent: int | None, what: str) -> None:
    rows = [{"prompt": "a", "response": str(number)} for number in range(4)]

    def read(count: int) -> int:
        text = json.dumps(rows[:count], indent=indent) if what == "elements" else "\n".join(map(json.dumps, rows[:count]))
        return len(read_records("f", io.BytesIO(text.encode()), "row", "{}", 3, lambda number, row: row, InvalidLines()))

    assert read(3) == 3
    with pytest.raises(UserError, match=f"f: more than 3 {what}: use a part of the file"):
        read(4)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b'[\n{"prompt": "a", "response": "b"},\n]', "f:3: invalid JSON"),
        (b'[{"prompt": "a", "response": "b"}]\n{"prompt": "a", "response": "b"}', "f:2: text follows the array"),
        (b'[{"prompt": "a", "response": "b"}, 3]', "f:2: a line must be a JSON object"),
        (b"[]", "the file has no response"),
        (b'["a", "b"]\n', "f:1: a line must be a JSON object"),
    ],
)
def test_an_array_that_is_none_is_named(data: bytes, why: str) -> None:
    with pytest.raises(UserError, match=why):
        read_examples("f", io.BytesIO(data))


# The context ----------------------------------------------------------------------------------------------------------

BPE = BpeTokenizer(train_bpe(["the cat sat on the mat, Grüße 🙂 and then some more text of it\n".encode() * 9], 290))
TOKENIZERS: list[Tokenizer] = [ByteTokenizer(BYTES_WITH_END), BPE]
KINDS = ("instruct", "dpo", "reward")


def spec_of(kind: str, tokenizer: Tokenizer, context: int = 16) -> JobSpec:
    model = ModelSpec(vocabulary=tokenizer.vocabulary, context=context, width=8, layers=1, heads=2, kv_heads=1, hidden=8)
    end = tokenizer.end_of_text
    terms = {"instruct": InstructTerms(stop_token=end), "dpo": DpoTerms(stop_token=end)}.get(kind)
    settings = codec.encode(terms) if terms else b""
    return replace(OF["instruct"], objective=kind, model=model, objective_settings=settings, held_out_permille=0)


def long_of(kind: str) -> Any:
    long = "Grüße the cat 🙂 sat on the mat and then some more 🙂 ü"
    row = {"prompt": long, "response": "ab"} if kind == "instruct" else {"prompt": long, "chosen": "ab", "rejected": "c"}
    read: Any = read_examples if kind == "instruct" else read_preference_file
    return read("f", lines(row, {key: text[::-1][:4] for key, text in row.items()}))


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["bytes", "bpe"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_text_beyond_the_context_is_named_left_out_or_shortened(kind: str, tokenizer: Tokenizer) -> None:
    spec, some = spec_of(kind, tokenizer), long_of(kind)
    with pytest.raises(UserError, match=r"f: line 1: .* are \d+ tokens, more than the context of 16; --truncate"):
        prepare_records("f", spec, some, tokenizer, InvalidLines(), TruncationSide.NOTHING)
    kept, counts = prepare_records("f", spec, some, tokenizer, InvalidLines(True), TruncationSide.NOTHING)
    assert kept == some[1:] and counts == PreparationCounts(left_out=1)
    (short, same), counts = prepare_records("f", spec, some, tokenizer, InvalidLines(), TruncationSide.LEFT)
    assert same is some[1] and counts == PreparationCounts(shortened=1)
    assert short.responses == some[0].responses and some[0].prompt.endswith(short.prompt) and short.prompt
    assert "line shortened to the context of 16" in preparation_notes(replace(spec, preparation=counts))[0]
    if kind != "reward":
        found = tokenize_responses(spec, [short], tokenizer)
        assert 12 <= max(found.train_split.starts[1:] - found.train_split.starts[:-1]) <= 16, (
            "the job takes it, and little was cut"
        )


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["bytes", "bpe"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_right_shortens_each_long_response_alone(kind: str, tokenizer: Tokenizer) -> None:
    long = "so " + "Grüße the cat 🙂 sat on the mat" * 2
    row = {"prompt": "q: ", "response": long} if kind == "instruct" else {"prompt": "q: ", "chosen": long, "rejected": "c"}
    read: Any = read_examples if kind == "instruct" else read_preference_file
    spec, [one] = spec_of(kind, tokenizer), read("f", lines(row))
    [short], counts = prepare_records("f", spec, [one], tokenizer, InvalidLines(), TruncationSide.RIGHT)
    assert counts.shortened == 1 and short.prompt == one.prompt and long.startswith(short.responses[0])
    assert short.responses[1:] == one.responses[1:] and len(short.responses[0]) >= 5
    [too_long] = read("f", lines(row | {"prompt": "q" * 40}))
    with pytest.raises(UserError, match=r"more than the context of 16$"):
        prepare_records("f", spec, [too_long], tokenizer, InvalidLines(), TruncationSide.RIGHT)


def test_a_cut_leaves_as_much_as_the_context_holds() -> None:
    tokenizer = ByteTokenizer(BYTES_WITH_END)
    [example] = read_examples("f", lines({"prompt": "0123456789abcdef", "response": "xyz"}))
    [pair] = read_preference_file("f", lines({"prompt": "0123", "chosen": "x" * 20, "rejected": "y" * 11}))
    for kind, record, truncate, kept in (
        ("instruct", example, TruncationSide.LEFT, ("456789abcdef", "xyz")),  # 16 tokens with the end of the text
        ("dpo", pair, TruncationSide.RIGHT, ("0123", "x" * 11, "y" * 11)),
        ("reward", pair, TruncationSide.RIGHT, ("0123", "x" * 12, "y" * 11)),
    ):
        spec, some = spec_of(kind, tokenizer), [cast(Any, record)]
        [short], counts = prepare_records("f", spec, some, tokenizer, InvalidLines(), truncate)
        assert (short.prompt, *short.responses) == kept and counts == PreparationCounts(shortened=1)


def test_a_record_without_a_prompt_is_named_or_left_out_where_responses_are_learned() -> None:
    tokenizer = TOKENIZERS[0]
    pairs = read_preference_file("f", lines(*({"prompt": prompt, "chosen": "a", "rejected": "b"} for prompt in ("q", ""))))
    with pytest.raises(UserError, match="f: line 2: the prompt is empty"):
        prepare_records("f", spec_of("dpo", tokenizer), pairs, tokenizer, InvalidLines(False), TruncationSide.NOTHING)
    kept, counts = prepare_records("f", spec_of("dpo", tokenizer), pairs, tokenizer, InvalidLines(True), TruncationSide.NOTHING)
    assert kept == pairs[:1] and counts == PreparationCounts(left_out=1)
    assert (
        prepare_records("f", spec_of("reward", tokenizer), pairs, tokenizer, InvalidLines(), TruncationSide.NOTHING)[0] == pairs
    )


@pytest.mark.parametrize("kind", ["dpo", "reward"])
def test_pairs_of_equal_answers_are_named_also_where_the_cut_makes_them_equal(kind: str) -> None:
    tokenizer = TOKENIZERS[0]
    spec = replace(spec_of(kind, tokenizer), objective=kind)
    rows = [("same", "same"), ("a", "b"), ("x" * 30 + "a", "x" * 30 + "b")]
    some = read_preference_file("f", lines(*({"prompt": "q: ", "chosen": one, "rejected": other} for one, other in rows)))
    with pytest.raises(UserError) as caught:
        prepare_records("f", spec, some, tokenizer, InvalidLines(), TruncationSide.RIGHT)
    assert [line.split(":")[1] for line in str(caught.value).splitlines()[:2]] == [" line 1", " line 3"]
    assert str(caught.value).count("both responses are the same") == 2
    kept, counts = prepare_records("f", spec, some, tokenizer, InvalidLines(True), TruncationSide.RIGHT)
    assert [one.first for one in kept] == ["a"] and counts.left_out == 2
    with pytest.raises(UserError, match="f: no line is usable"):
        prepare_records("f", spec, some[:1], tokenizer, InvalidLines(True), TruncationSide.RIGHT)
    assert REWARD.name == "reward"


def test_responses_that_hold_the_stop_text_are_counted_with_the_way_out() -> None:
    texts = ("- one\n- two", "plain", "ends\n", "\n\nSure.", "two\n\n")
    some = read_examples("f", lines(*({"prompt": "q", "response": text} for text in texts)))
    tokenizer = TOKENIZERS[0]
    assert [count_stop_texts(some, tokenizer, stop) for stop in (10, BYTES, None)] == [3, 0, 0]
    assert (
        count_stop_texts(read_preference_file("f", lines({"prompt": "q", "chosen": "a\nb", "rejected": "c\nd"})), tokenizer, 10)
        == 2
    )
    of = {kind: replace(spec_of(kind, tokenizer), preparation=PreparationCounts(holding_stop=3)) for kind in KINDS}
    assert all(
        "3 responses with the stop text" in preparation_notes(spec)[0] and "--set stop_token=none" in preparation_notes(spec)[0]
        for spec in of.values()
    )
    assert (
        "train --from JOB FILE" in preparation_notes(of["dpo"])[0]
        and "leave `stop_token` out" in preparation_notes(of["instruct"])[0]
    )
    assert not preparation_notes(spec_of("dpo", tokenizer))


# Held-out pairs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["Speak: ", "q", "0", "1", "2", "3", "4", "5", "6", "7", "8", "9"])
def test_pairs_of_one_prompt_are_held_out_one_by_one(prompt: str) -> None:
    """The split does not depend on the hash of the prompt."""
    pairs = [PreferencePair(bytes([n]), prompt, f"Avast {n % 39}", f"Hello {n % 39}", 1000) for n in range(40)]
    train, held_out = split_held_out(pairs)
    assert len(train) + len(held_out) == 40 and 3 <= len(held_out) <= 5
    assert not {pair.responses for pair in train} & {pair.responses for pair in held_out}, "equal pairs are on one side"
    assert split_held_out(pairs[::-1])[1] == held_out[::-1], "the order of the lines says nothing"
    few, none = split_held_out(pairs[:5])
    assert len(few) == 5 and not none, "a tenth of five is none"
