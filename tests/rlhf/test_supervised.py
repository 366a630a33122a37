"""Supervised learning: only responses are learned, files have the forms of TRL, and pairs are drawn by step."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from features.lazy_import import import_object
from peer.worker.main import WorkerRequestHandler
from protocol import codec
from protocol.blob_digest import blob_digest
from protocol.errors import StorageError, UserError
from protocol.identity import peer_id
from protocol.verdicts import Verdict
from rlhf.api import pair_trace
from rlhf.api.pair_trace import find_pair, iter_pair_draws
from rlhf.api.supervised_jobs import attach_set
from rlhf.data import tokenized_records
from rlhf.data.preference_sets import (
    InstructionExample,
    PreferencePair,
    PromptRecord,
    read_examples,
    read_preference_file,
    split_held_out,
)
from rlhf.data.tokenized_records import response_batch, tokenize_pairs, tokenize_responses
from rlhf.objectives.supervised_objectives import NATS, DpoTerms, InstructTerms
from tests.rlhf.seat import JOB, TRAINER, Seat, write
from tests.rlhf.test_reward import MEAN, SPEC, some_pairs
from training import worker_protocol
from training.data.tokenizer import ByteTokenizer
from training.engines.pytorch.backend import BACKEND
from training.engines.request_handlers import WorkerContext
from training.job_spec import JobSpec
from training.objectives.objective import InnerStep
from training.replicated.replicated_model import ReplicatedModel
from training.replicated.tensor_layout import float32_bytes, layout_of

OF = {
    "instruct": replace(SPEC, objective="instruct", objective_settings=codec.encode(InstructTerms())),
    "dpo": replace(SPEC, objective="dpo", objective_settings=codec.encode(DpoTerms(beta=0.5))),
}


def some_examples(count: int = 60) -> list[InstructionExample]:
    return [
        InstructionExample(number.to_bytes(8, "big"), f"q{number}: ", "aeiou"[number % 3 :]) for number in range(1, count + 1)
    ]


def records(name: str) -> list[PromptRecord]:
    return [*some_examples()] if name == "instruct" else [*some_pairs()]


def seat_of(folder: Path, name: str) -> Seat:
    return Seat(folder, OF[name], records(name))


@pytest.mark.parametrize("name", OF)
def test_an_honest_proposal_passes_every_check_and_one_of_other_responses_none(tmp_path: Path, name: str) -> None:
    world = seat_of(tmp_path, name)
    other = world.worker(micro_batch=3)
    world.propose(world.worker())
    assert world.audited(other) is Verdict.ACCEPT
    false: list[PromptRecord] = [replace(example, response="zzz") for example in some_examples()]
    if name == "dpo":
        false = [replace(pair, p=1000 - pair.p) for pair in some_pairs()]
    world.propose(world.worker(write(tmp_path / "false", false)))
    assert world.audited(other) is Verdict.REPLAY


@pytest.mark.parametrize("name", OF)
def test_it_learns_and_is_measured_on_prompts_that_were_never_trained_on(tmp_path: Path, name: str) -> None:
    world = seat_of(tmp_path, name)
    found = import_object(world.spec.resolved_objective.data_reader)(world.spec, Path(world.set), ByteTokenizer())
    parameters = ReplicatedModel.initial(JOB, world.spec).parameters
    engine = BACKEND.open_engine(world.spec, found, ByteTokenizer(), parameters)
    before = engine.compute_metrics(parameters)
    for number in range(4):
        delta, _ = engine.local_steps(parameters, JOB, number, TRAINER)
        parameters = parameters - delta
    after = engine.compute_metrics(parameters)
    if name == "dpo":
        assert before["held_out_accuracy"] < 0.8 and after["held_out_accuracy"] == 1.0
    else:
        assert abs(before[NATS] - np.log(256)) < 0.5 and after[NATS] < before[NATS] - 1
    assert len(found.held_out_split) and len(found.train_split) + len(found.held_out_split) == 60


def test_the_reference_of_a_pair_is_what_the_first_model_gives_it_token_by_token(tmp_path: Path) -> None:
    world = seat_of(tmp_path, "dpo")
    found = import_object(world.spec.resolved_objective.data_reader)(world.spec, Path(world.set), ByteTokenizer())
    first = ReplicatedModel.initial(JOB, world.spec).parameters
    engine = BACKEND.open_engine(world.spec, found, ByteTokenizer(), first)
    delta, _ = engine.local_steps(first + np.float32(0.1), JOB, 0, TRAINER)
    assert not np.isnan(delta).any()
    known = ~np.isnan(found.train_split.reference)
    assert 0 < known.sum() < len(known) and np.isnan(found.held_out_split.reference).all()
    engine.load_parameters(first)  # type: ignore[attr-defined]
    for text in np.flatnonzero(known)[:5]:
        start, response, end = (
            found.train_split.starts[text],
            found.train_split.responses[text],
            found.train_split.starts[text + 1],
        )
        ids = torch.from_numpy(found.train[start:end].astype(np.int64))
        logp = engine.model.logits(engine.model.features(ids[None, :-1])).log_softmax(-1)[0]  # type: ignore[attr-defined]
        summed = sum(logp[at - 1, ids[at]] for at in range(int(response - start), len(ids)))
        assert found.train_split.reference[text] == pytest.approx(float(summed.detach()), abs=1e-4)


def test_only_the_tokens_of_a_response_and_its_stop_are_learned() -> None:
    some = [InstructionExample(b"1", "ab", "xy"), InstructionExample(b"2", "c", "z\n")]
    found = tokenize_responses(replace(OF["instruct"], held_out_permille=0), some, ByteTokenizer())
    x, y, mask = response_batch(found.train, found.train_split, np.array([0, 1]))
    assert [bytes(row.astype(np.uint8)) for row in x] == [b"abxy", b"cz\0\0"]
    assert [bytes(y[row][mask[row]].astype(np.uint8)) for row in range(2)] == [b"xy\n", b"z\n"]
    assert found.train_split.tokens_mean == 2.5
    unstopped = replace(OF["instruct"], held_out_permille=0, objective_settings=codec.encode(InstructTerms(stop_token=None)))
    assert bytes(tokenize_responses(unstopped, some, ByteTokenizer()).train) == b"abxycz\n"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", r"f:2: invalid JSON"),
        ('{"prompt": "a"}', "f:2: response must be a text that is not empty, not null"),
        ('{"prompt": "a", "response": ""}', 'f:2: response must be a text that is not empty, not ""'),
        (
            json.dumps({"prompt": "a" * 9, "response": "b" * 9}),
            "line 2: prompt and response are 19 tokens",
        ),
        ('{"prompt": "", "response": "b"}', "line 2: the prompt is empty"),
    ],
)
def test_a_line_that_cannot_be_learned_is_named(line: str, why: str) -> None:
    file = f'{{"prompt": "a", "response": "b"}}\n{line}\n'
    with pytest.raises(UserError, match=why):
        tokenize_responses(
            replace(OF["instruct"], held_out_permille=0), read_examples("f", io.BytesIO(file.encode())), ByteTokenizer()
        )


def test_a_file_without_a_response_is_refused() -> None:
    with pytest.raises(UserError, match="f: the file has no response"):
        read_examples("f", io.BytesIO(b"\n"))


@pytest.mark.parametrize(
    ("objective", "other", "why"),
    [
        ("instruct", {"data": None}, "learns from responses"),
        ("dpo", {"objective_settings": codec.encode(DpoTerms(beta=0.0))}, "beta must be positive"),
        (
            "dpo",
            {"objective_settings": codec.encode(DpoTerms(stop_token=256))},
            "stop_token 256 is not in the vocabulary of",
        ),
        ("instruct", {"objective_settings": codec.encode(DpoTerms())}, ""),
    ],
)
def test_a_job_that_cannot_be_is_told_why(objective: str, other: dict[str, object], why: str) -> None:
    assert why in (replace(OF[objective], **other).problem() or "")


def test_the_reference_of_a_job_that_starts_from_parameters_is_these(tmp_path: Path) -> None:
    values = np.arange(layout_of(OF["instruct"]).size, dtype=np.float32) / 1e6
    (tmp_path / "start").write_bytes(float32_bytes(values))
    spec = replace(OF["instruct"], initial_model=blob_digest(float32_bytes(values))).validated()
    assert spec.initial_model is not None
    opening = worker_protocol.OpenJobRequest(
        JOB, spec.encode(), write(tmp_path / "set", some_examples()), None, files={spec.initial_model: str(tmp_path / "start")}
    )
    engine = WorkerRequestHandler(WorkerContext(BACKEND, lambda: None, 1 << 30))
    engine.handle_request(opening)
    reference = engine.context.find_engine(JOB).first_parameters
    assert reference is not None and np.array_equal(reference, values)
    (tmp_path / "start").write_bytes(float32_bytes(values[::-1]))
    with pytest.raises(StorageError, match="does not contain the parameters"):
        WorkerRequestHandler(WorkerContext(BACKEND, lambda: None, 1 << 30)).handle_request(opening)


@pytest.mark.parametrize("objective", ["reward", "dpo", "instruct"])
def test_without_a_number_of_rounds_a_job_goes_over_its_set_so_many_times(objective: str) -> None:
    spec, pairs = {**OF, "reward": SPEC}[objective], some_pairs()
    records = (
        [InstructionExample(pair.id, pair.prompt or "x", pair.first) for pair in pairs] if objective == "instruct" else pairs
    )
    state = SimpleNamespace(
        members=SimpleNamespace(
            members={bytes([number]) * 32: SimpleNamespace(roles=(spec.resolved_objective.role,)) for number in range(2)}
        )
    )
    peer: Any = SimpleNamespace(state=state, blobs=SimpleNamespace(add_bytes=blob_digest))
    tokenize = tokenized_records.tokenize_pairs if objective == "reward" else tokenize_responses
    tokens: Any = tokenize(spec, records, ByteTokenizer())
    made, manifest = attach_set(peer, spec, records, tokens, None, epochs=3)
    a_round = 2 * spec.local_steps * spec.batch  # records, of two trainers
    assert made.rounds == math.ceil(3 * len(tokens.train_split) / a_round) and made.data == manifest.digest
    assert attach_set(peer, spec, records, tokens, 7, epochs=3)[0].rounds == 7


PAIRS = [PreferencePair(bytes([number]) * 32, f"q{number % 20}", "a", "b", 1000) for number in range(40)]
TRAINERS = {b"t" * 32: True, b"u" * 32: False}
ROUNDS = dict.fromkeys((0, 2), TRAINERS)
EVERYWHERE = [(number, trainer, step) for number in ROUNDS for trainer in TRAINERS for step in range(SPEC.local_steps)]


def drawn(pair: PreferencePair, spec: JobSpec = SPEC) -> set[tuple[int, bytes, int]]:
    """Return the places (round, trainer, step) at which the objective draws this pair."""
    data = tokenize_pairs(spec, PAIRS, ByteTokenizer())
    train, _ = split_held_out(PAIRS, spec.held_out_permille)
    return {
        (number, trainer, step)
        for number, trainer, step in EVERYWHERE
        if pair
        in [
            train[place]
            for place in spec.resolved_objective.draw_examples(spec, InnerStep(JOB, number, trainer, step), spec.batch, data)
        ]
    }


def traced(pair: PreferencePair, spec: JobSpec = SPEC) -> set[tuple[int, bytes, int]]:
    by_id = {peer_id(trainer): trainer for trainer in TRAINERS}
    views = list(iter_pair_draws(JOB, spec, PAIRS, pair, ROUNDS))
    assert all(view.job == JOB.hex() and view.accepted == TRAINERS[by_id[view.trainer]] for view in views)
    assert len(set(views)) == len(views)
    return {(view.round, by_id[view.trainer], view.step) for view in views}


@pytest.mark.parametrize("spec", [SPEC, MEAN], ids=["by a hash", "in turn"])
def test_a_trace_has_the_steps_in_which_a_pair_is_drawn_and_no_others(spec: JobSpec) -> None:
    train, held_out = split_held_out(PAIRS, spec.held_out_permille)
    assert held_out and all(traced(pair, spec) == drawn(pair, spec) for pair in PAIRS)
    assert any(traced(pair, spec) for pair in train) and not any(traced(pair, spec) for pair in held_out)


def test_a_job_of_means_meets_each_pair_once_in_its_first_rounds_whoever_trains() -> None:
    rounds, count = 5, MEAN.batch
    for trainer in TRAINERS:
        steps = [InnerStep(JOB, number, trainer, step) for number in range(rounds) for step in range(MEAN.local_steps)]
        met = [
            int(pair)
            for step in steps
            for pair in MEAN.resolved_objective.draw_example_numbers(MEAN, step, count, len(steps) * count)
        ]
        assert sorted(met) == list(range(len(steps) * count))


def test_a_trace_that_counts_held_out_pairs_or_forgets_the_trainer_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as planted:
        planted.setattr(pair_trace, "split_held_out", lambda pairs, permille: (pairs, []))
        assert any(traced(pair) != drawn(pair) for pair in PAIRS)
    monkeypatch.setattr(pair_trace, "InnerStep", lambda job, number, trainer, step: InnerStep(job, number, bytes(32), step))
    assert any(traced(pair) != drawn(pair) for pair in PAIRS)


def test_people_name_a_pair_by_the_beginning_of_its_task_or_by_its_line() -> None:
    lines = [PreferencePair(number.to_bytes(8, "big"), "q", "a", "b", 1) for number in (1, 12, 256)]
    assert [find_pair(lines, text) for text in ("1", "12", "256", "2", "0000000000000001")] == [*lines, None, lines[0]]
    assert (
        find_pair(PAIRS, "0B0B0B0B") == PAIRS[11] and find_pair(PAIRS, "0b0b0b") is None and find_pair(PAIRS, "ff" * 32) is None
    )
    alike = [PreferencePair(bytes([7]) * 31 + bytes([last]), "q", "a", "b", 1) for last in range(2)]
    with pytest.raises(UserError, match="'07070707' matches 2 pairs, such as task 0707070707070707: type more"):
        find_pair(alike, "07070707")


HI, ASKED, OTHER = ({"role": "user", "content": text} for text in ("Hi {}", "Why?", "Else?"))
HELLO, YES, NO = ({"role": "assistant", "content": text} for text in ("Hello.", "Yes.", "No."))
SYSTEM = {"role": "system", "content": "Be short."}
FIRST = "User: Hi {}\nAssistant: "
SECOND = f"{FIRST}Hello.\nUser: Why?\nAssistant: "
HH = "\n\nHuman: Why?\n\nAssistant:"


def lines(*rows: Any) -> io.BytesIO:
    return io.BytesIO("\n".join(map(json.dumps, rows)).encode())


@pytest.mark.parametrize(
    ("row", "prompt", "response"),
    [
        ({"prompt": "a", "response": "b"}, "a", "b"),
        ({"prompt": "a", "completion": "b"}, "a", "b"),
        ({"prompt": [HI], "completion": [HELLO]}, FIRST, "Hello."),
        ({"messages": [HI, HELLO]}, FIRST, "Hello."),
        ({"messages": [SYSTEM, HI, HELLO, ASKED, YES]}, f"Be short.\n{SECOND}", "Yes."),
        ({"prompt": "Hi {}", "messages": [HI, HELLO]}, FIRST, "Hello."),
    ],
)
def test_responses(row: dict[str, Any], prompt: str, response: str) -> None:
    [read] = read_examples("a.jsonl", lines(row))
    assert (read.prompt, read.response) == (prompt, response)


@pytest.mark.parametrize(
    ("row", "prompt", "chosen", "rejected"),
    [
        ({"prompt": "a", "chosen": "Yes.", "rejected": "No."}, "a", "Yes.", "No."),
        ({"prompt": [HI], "chosen": [YES], "rejected": [NO]}, FIRST, "Yes.", "No."),
        ({"prompt": "plain", "chosen": [YES], "rejected": [NO]}, "plain", "Yes.", "No."),
        ({"chosen": [HI, YES], "rejected": [HI, NO]}, FIRST, "Yes.", "No."),
        ({"prompt": "Hi {}", "chosen": [HI, YES], "rejected": [HI, NO]}, FIRST, "Yes.", "No."),
        ({"prompt": [HI], "chosen": [HI, YES], "rejected": [HI, NO]}, FIRST, "Yes.", "No."),
        ({"prompt": [HI], "chosen": [HELLO, ASKED, YES], "rejected": [HELLO, ASKED, NO]}, SECOND, "Yes.", "No."),
        ({"chosen": f"{HH} Yes.", "rejected": f"{HH} Yet."}, HH.strip(), " Yes.", " Yet."),
    ],
)
def test_preferences(row: dict[str, Any], prompt: str, chosen: str, rejected: str) -> None:
    [read] = read_preference_file("a.jsonl", lines(row))
    assert (read.prompt, *read.responses) == (prompt, chosen, rejected)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"chosen": [HI, YES], "rejected": [OTHER, NO]}, "a.jsonl:1: chosen and rejected answer different messages"),
        ({"chosen": [HI], "rejected": [HI]}, "the last message of chosen is of the role 'user', not 'assistant'"),
        ({"prompt": "a", "chosen": [], "rejected": [NO]}, "chosen must be a text, or messages"),
        ({"prompt": "a", "chosen": [{"role": "tool", "content": "x"}], "rejected": [NO]}, "of system, user, assistant"),
        ({"prompt": "a", "chosen": [{"role": "user", "content": [1]}], "rejected": [NO]}, "chosen must be a text, or messages"),
        ({"chosen": "Yes.", "rejected": "No."}, "prompt must be a text, not null"),
        ({"chosen": [YES], "rejected": "No."}, "prompt must be a text, not null"),
    ],
)
def test_what_is_no_message_is_named(row: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        read_preference_file("a.jsonl", lines(row))
