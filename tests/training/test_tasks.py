from __future__ import annotations

import pytest

from ledger.audits.loss_commitments import LOSS_MAX
from protocol.errors import RemoteProtocolError
from protocol.limits import DECLARATION_BYTES_MAX, TRANSACTION_BYTES_MAX
from protocol.sampling import (
    SAMPLES_MAX,
    STOP_CHARACTERS_MAX,
    STOP_SEQUENCES_MAX,
    STOPS_MAX,
    EndReason,
    SamplingOptions,
)
from protocol.verdicts import Verdict
from training import worker_protocol

MESSAGES = [
    worker_protocol.OpenJobRequest(bytes(32), b"spec", "/text", None),
    worker_protocol.ProposeRequest(bytes(32), 1, bytes(32), "/model", "/buffer", "/payload", "/out"),
    worker_protocol.AuditRequest(bytes(32), 1, bytes(32), "/model", "/payload", "/buffer", None, None),
    worker_protocol.EvaluateRequest(bytes(32), "/model"),
    worker_protocol.GenerateRequest(bytes(32), "/model", "Grüße", SamplingOptions(10, 0.5, stop=("\n",)), 7, ("Hallo",), 3, 9),
    worker_protocol.GenerateTokensRequest(
        bytes(32), "/model", b"\1\0", SamplingOptions(10, 0.5), 3, (b"\2\0", b"\3\0\4\0"), 7, 9
    ),
    worker_protocol.ScoreTokensRequest(bytes(32), "/model", b"\1\0\2\0"),
    worker_protocol.PingRequest(),
    worker_protocol.DescribeRequest(),
    worker_protocol.CancelRequest(),
]
ANSWERS = [
    worker_protocol.WorkerInfo(
        "torch", 1, (worker_protocol.DeviceInfo("cuda:0", "a GPU", 80_000, 70_000, 3_000, True),), {"numpy": "2"}
    ),
    worker_protocol.WorkerHeartbeat(),
    worker_protocol.OpenJobReply(1, 2, 3),
    worker_protocol.ProposeReply(bytes(32), 2 << 40, bytes(32), 1.5, 0.1),
    worker_protocol.AuditReply(Verdict.REPLAY, 0.5, 0.1),
    worker_protocol.EvaluateReply({"bits": 2.5}, 0.1),
    worker_protocol.GenerateReply("ß", is_over=False),
    worker_protocol.GenerateTokensReply(
        (worker_protocol.TokenSample(b"\1\0", bytes(4), EndReason.LENGTH), worker_protocol.TokenSample())
    ),
    worker_protocol.ScoreTokensReply(bytes(4)),
    worker_protocol.PongReply(),
    worker_protocol.RequestFailed("why"),
]
TO_WORKER = worker_protocol.messages_to_worker(worker_protocol.REQUESTS)
FROM_WORKER = worker_protocol.messages_from_worker(worker_protocol.REQUESTS)


@pytest.mark.parametrize("kinds, messages", [(TO_WORKER, MESSAGES), (FROM_WORKER, ANSWERS)])
def test_every_message_survives_its_frame(kinds: tuple[type, ...], messages: list[object]) -> None:
    assert {type(message) for message in messages} == set(kinds)
    for message in messages:
        frame = worker_protocol.encode_frame(7, message)
        length, number = worker_protocol.parse_header(frame[: worker_protocol.FRAME_HEADER_BYTES])
        assert number == 7 and length == len(frame) - worker_protocol.FRAME_HEADER_BYTES
        assert worker_protocol.parse_body(frame[worker_protocol.FRAME_HEADER_BYTES :], kinds) == message


def test_a_message_of_the_other_direction_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="unknown-message"):
        worker_protocol.parse_body(
            worker_protocol.encode_frame(0, worker_protocol.PingRequest())[worker_protocol.FRAME_HEADER_BYTES :],
            FROM_WORKER,
        )


def test_a_frame_longer_than_any_message_is_refused_before_it_is_read() -> None:
    with pytest.raises(RemoteProtocolError, match="oversized"):
        worker_protocol.parse_header(b"\xff" * worker_protocol.FRAME_HEADER_BYTES)


LONGEST = "/" * 4096
DECLARED = worker_protocol.DeclarationFiles(
    bytes(DECLARATION_BYTES_MAX), {bytes([n]) * 32: LONGEST for n in range(DECLARATION_BYTES_MAX // 32)}
)
FILES = {bytes([n]) * 32: LONGEST for n in range(worker_protocol.FILES_MAX)}
SEQUENCE = bytes(worker_protocol.TOKEN_BYTES * worker_protocol.SEQUENCE_TOKENS_MAX)
STOPS = (bytes(worker_protocol.TOKEN_BYTES * worker_protocol.STOP_SEQUENCE_TOKENS_MAX),) * STOP_SEQUENCES_MAX
SLICE = [worker_protocol.SLICE_TOKENS_MAX + 1, *[1] * (SAMPLES_MAX - 1)]  # tokens of each sample in a slice with all samples
LARGEST = [
    worker_protocol.OpenJobRequest(
        bytes(32), bytes(TRANSACTION_BYTES_MAX), LONGEST, LONGEST, True, bytes(32), LONGEST, LONGEST, LONGEST, bytes(32), FILES
    ),
    worker_protocol.ProposeRequest(bytes(32), 1, bytes(32), *[LONGEST] * 7, declared=DECLARED),
    worker_protocol.AuditRequest(bytes(32), 1, bytes(32), *[LONGEST] * 7, declared=DECLARED),
    worker_protocol.GenerateRequest(bytes(32), LONGEST, "x" * worker_protocol.TEXT_BYTES_MAX, 10, 0.5, 7),
    worker_protocol.GenerateTokensRequest(
        bytes(32), LONGEST, SEQUENCE, SamplingOptions(stop=("🙂" * STOP_CHARACTERS_MAX,) * STOPS_MAX), SAMPLES_MAX, STOPS
    ),
    worker_protocol.ScoreTokensRequest(bytes(32), LONGEST, SEQUENCE),
    worker_protocol.GenerateTokensReply(
        tuple(worker_protocol.TokenSample(bytes(2 * tokens), bytes(4 * tokens), EndReason.LENGTH) for tokens in SLICE)
    ),
    worker_protocol.ScoreTokensReply(bytes(worker_protocol.LOGPROB_BYTES * worker_protocol.SEQUENCE_TOKENS_MAX)),
    worker_protocol.ProposeReply(bytes(32), 0, bytes(32), 1.5, 0.1, declaration=bytes(DECLARATION_BYTES_MAX), last_loss=LOSS_MAX),
]


@pytest.mark.parametrize("message", LARGEST, ids=lambda message: message.TAG)
def test_the_longest_messages_fit_a_frame_however_large_the_model_is(message: object) -> None:
    assert (
        worker_protocol.parse_header(worker_protocol.encode_frame(0, message)[: worker_protocol.FRAME_HEADER_BYTES])[0]
        <= worker_protocol.FRAME_BYTES_MAX
    )


def test_what_the_round_waits_for_is_most_urgent_then_audits_then_what_can_be_done_any_time() -> None:
    priority = {kind.request: kind.priority for kind in worker_protocol.REQUESTS}
    opening, proposing = priority[worker_protocol.OpenJobRequest], priority[worker_protocol.ProposeRequest]
    auditing, evaluating = priority[worker_protocol.AuditRequest], priority[worker_protocol.EvaluateRequest]
    assert opening < proposing < auditing < evaluating
    for request in (
        worker_protocol.GenerateRequest,
        worker_protocol.GenerateTokensRequest,
        worker_protocol.ScoreTokensRequest,
    ):
        assert priority[request] == evaluating
