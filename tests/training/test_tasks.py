from __future__ import annotations

from dataclasses import replace

import pytest

from protocol.errors import RemoteProtocolError
from protocol.reasons import Finding, Verdict
from training import tasks
from training.replicated.codec import Mode, payload_bytes_max
from training.replicated.layout import layout_of
from training.spec import Compression, JobSpec
from training.transformer import PARAMETERS_MAX, ModelSpec

MESSAGES = [
    tasks.OpenJob(bytes(32), b"spec", "/text", None),
    tasks.Propose(bytes(32), 1, bytes(32), "/model", "/buffer", "/payload", "/out"),
    tasks.Reexecute(bytes(32), 1, bytes(32), "/model", "/inner", "/states"),
    tasks.Audit(bytes(32), 1, bytes(32), "/model", "/payload", "/buffer", None, None),
    tasks.Replay(
        bytes(32), 1, bytes(32), 3, "/model", "/payload", bytes(32), None, None, "/trace", {bytes(32): "/state"}, bytes(32), None
    ),
    tasks.Evaluate(bytes(32), "/model"),
    tasks.Generate(bytes(32), "/model", "Grüße", 10, 0.5, 7),
    tasks.Ping(),
    tasks.Describe(),
    tasks.Cancel(),
]
ANSWERS = [
    tasks.Ready("torch", 1, (tasks.Device("cuda:0", "a GPU", 80_000, 70_000, 3_000, True),), {"numpy": "2"}),
    tasks.Beat(),
    tasks.Opened(1, 2, 3),
    tasks.Proposed(b"p" * (2 << 20), bytes(32), bytes(32), 1.5, 0.1),
    tasks.Reexecuted(bytes(32)),
    tasks.Audited(Verdict.REPLAY, 0.5, 0.1),
    tasks.Replayed(Finding.MISMATCH, 0.5, 0.1),
    tasks.Evaluated({"bits": 2.5}, 0.1),
    tasks.Generated(b"\xff"),
    tasks.Pong(),
    tasks.Failed("why"),
]


@pytest.mark.parametrize("kinds, messages", [(tasks.TO_WORKER, MESSAGES), (tasks.FROM_WORKER, ANSWERS)])
def test_every_message_survives_its_frame(kinds: tuple[type, ...], messages: list[object]) -> None:
    assert {type(message) for message in messages} == set(kinds)
    for message in messages:
        frame = tasks.frame(7, message)
        length, number = tasks.parse_header(frame[: tasks.FRAME_HEADER_BYTES])
        assert number == 7 and length == len(frame) - tasks.FRAME_HEADER_BYTES
        assert tasks.parse_body(frame[tasks.FRAME_HEADER_BYTES :], kinds) == message


def test_a_message_of_the_other_direction_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="unknown-message"):
        tasks.parse_body(tasks.frame(0, tasks.Ping())[tasks.FRAME_HEADER_BYTES :], tasks.FROM_WORKER)


def test_a_frame_longer_than_any_message_is_refused_before_it_is_read() -> None:
    with pytest.raises(RemoteProtocolError, match="oversized"):
        tasks.parse_header(b"\xff" * tasks.FRAME_HEADER_BYTES)


LARGEST = [
    replace(model, vocabulary=(PARAMETERS_MAX - model.parameters) // model.width + model.vocabulary)
    for model in (ModelSpec(width=1024, layers=10, hidden=2816), ModelSpec(width=64, layers=1024))
]


@pytest.mark.parametrize("model", LARGEST, ids=["wide", "deep"])
@pytest.mark.parametrize("keep", [None, 4096, 3072, 2049, 2048, 1025, 4])
def test_the_longest_payload_of_any_valid_job_fits_a_frame(model: ModelSpec, keep: int | None) -> None:
    mode = {"compression": Compression.DENSE} if keep is None else {"compression": Compression.SPARSE, "keep": keep}
    spec = JobSpec(name="large", tokenizer=bytes(32), data=bytes(32), model=model, bits=8, **mode).checked()  # type: ignore[arg-type]
    assert PARAMETERS_MAX - model.width < model.parameters <= PARAMETERS_MAX
    others = len(tasks.frame(0, tasks.Proposed(b"-", bytes(32), bytes(32), 0.5, 0.5, bytes(32), bytes(32)))) + 8
    assert payload_bytes_max(layout_of(spec), Mode.of(spec)) + others <= tasks.FRAME_BYTES_MAX


def test_what_the_round_waits_for_is_most_urgent_then_sampled_audits_which_can_lapse_then_what_can_be_done_any_time() -> None:
    assert tasks.OpenJob.PRIORITY < tasks.Propose.PRIORITY < tasks.Audit.PRIORITY < tasks.Replay.PRIORITY
    assert tasks.Replay.PRIORITY < tasks.Evaluate.PRIORITY == tasks.Generate.PRIORITY == tasks.Reexecute.PRIORITY
