from __future__ import annotations

import pytest

from ledger.audits.loss_commitments import LOSS_MAX
from protocol.errors import RemoteProtocolError
from protocol.limits import DECLARATION_BYTES_MAX, TRANSACTION_BYTES_MAX
from protocol.sampling import SamplingOptions
from protocol.verdicts import Verdict
from training import tasks

MESSAGES = [
    tasks.OpenJob(bytes(32), b"spec", "/text", None),
    tasks.Propose(bytes(32), 1, bytes(32), "/model", "/buffer", "/payload", "/out"),
    tasks.Audit(bytes(32), 1, bytes(32), "/model", "/payload", "/buffer", None, None),
    tasks.Evaluate(bytes(32), "/model"),
    tasks.Generate(bytes(32), "/model", "Grüße", SamplingOptions(10, 0.5, stop=("\n",)), 7, ("Hallo",), 3, 9),
    tasks.Ping(),
    tasks.Describe(),
    tasks.Cancel(),
]
ANSWERS = [
    tasks.Ready("torch", 1, (tasks.Device("cuda:0", "a GPU", 80_000, 70_000, 3_000, True),), {"numpy": "2"}),
    tasks.Beat(),
    tasks.Opened(1, 2, 3),
    tasks.Proposed(bytes(32), 2 << 40, bytes(32), 1.5, 0.1),
    tasks.Audited(Verdict.REPLAY, 0.5, 0.1),
    tasks.Evaluated({"bits": 2.5}, 0.1),
    tasks.Generated("ß", is_over=False),
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


LONGEST = "/" * 4096
DECLARED = tasks.Declared(bytes(DECLARATION_BYTES_MAX), {bytes([n]) * 32: LONGEST for n in range(DECLARATION_BYTES_MAX // 32)})
FILES = {bytes([n]) * 32: LONGEST for n in range(tasks.FILES_MAX)}
LARGEST = [
    tasks.OpenJob(
        bytes(32), bytes(TRANSACTION_BYTES_MAX), LONGEST, LONGEST, True, bytes(32), LONGEST, LONGEST, LONGEST, bytes(32), FILES
    ),
    tasks.Propose(bytes(32), 1, bytes(32), *[LONGEST] * 7, declared=DECLARED),
    tasks.Audit(bytes(32), 1, bytes(32), *[LONGEST] * 7, declared=DECLARED),
    tasks.Generate(bytes(32), LONGEST, "x" * tasks.TEXT_BYTES_MAX, 10, 0.5, 7),
    tasks.Proposed(bytes(32), 0, bytes(32), 1.5, 0.1, declaration=bytes(DECLARATION_BYTES_MAX), last_loss=LOSS_MAX),
]


@pytest.mark.parametrize("message", LARGEST, ids=lambda message: message.TAG)
def test_the_longest_messages_fit_a_frame_however_large_the_model_is(message: object) -> None:
    assert tasks.parse_header(tasks.frame(0, message)[: tasks.FRAME_HEADER_BYTES])[0] <= tasks.FRAME_BYTES_MAX


def test_what_the_round_waits_for_is_most_urgent_then_audits_then_what_can_be_done_any_time() -> None:
    assert tasks.OpenJob.PRIORITY < tasks.Propose.PRIORITY < tasks.Audit.PRIORITY
    assert tasks.Audit.PRIORITY < tasks.Evaluate.PRIORITY == tasks.Generate.PRIORITY
