"""Messages of the daemon and its worker process, and their framing on the pipes.

The daemon sends requests, one at a time, and gets one reply each: the one that the request's declaration names, or
`RequestFailed`. Meanwhile the worker beats while it makes progress, and a `CancelRequest` asks it to drop the request of that
number. Paths are absolute; files named as outputs are nobody's before the reply: a worker that ends before it may leave a part
of one. Features declare further requests (`features.feature.Feature.worker_requests`).
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Final, Generic, TypeVar

from ledger.audits.loss_commitments import LossMillionths
from protocol import codec
from protocol.codec import Count, Digest, Key, Length
from protocol.errors import FolkmootError, RemoteProtocolError
from protocol.limits import DECLARATION_BYTES_MAX, TRANSACTION_BYTES_MAX
from protocol.messages import Name
from protocol.sampling import TURNS_MAX, SamplingOptions
from protocol.verdicts import Verdict

# Whatever grows with the model is a file. The largest that is left is an OpenJob: a specification, some paths and digests.
FRAME_BYTES_MAX = 1 << 20
FILES_MAX = 9  # beside text and tokenizer: eight that an objective reads, and the parameters that a job starts from
DEVICES_MAX = 64  # of one machine; as many libraries are told of
TEXT_BYTES_MAX = 64 << 10  # prompts and generated text
ERROR_CHARACTERS_MAX = 500  # one line for a person

Path = Annotated[str, Length(1, 4096)]
Text = Annotated[str, Length(0, TEXT_BYTES_MAX)]
R = TypeVar("R")
_FRAME = struct.Struct(">II")  # bytes of the message, number of the request it belongs to
FRAME_HEADER_BYTES = _FRAME.size


class WorkerDied(FolkmootError):
    """The worker process ended, or was ended, while it had this request. Asking again is safe."""


class WorkerFailed(FolkmootError):
    """The worker is well but could not do what was asked; the text says why."""


# Replies -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenJobReply:
    TAG: ClassVar[str] = "open-job-reply"
    parameters: Count
    train_tokens: Count
    held_out_tokens: Count


@dataclass(frozen=True, slots=True)
class ProposeReply:
    TAG: ClassVar[str] = "propose-reply"
    payload_digest: Digest  # of the file `ProposeRequest.payload_out`
    payload_bytes: Count
    buffer_digest: Digest | None  # None: the job's proposals commit to none
    loss: float | None  # mean training loss over the local steps, in the unit of the objective; None: it is no number
    seconds: float
    inner: Digest | None = None  # of the file `ProposeRequest.inner_out`
    # Of what it goes on from: the buffer and the inner state of the trainer's last accepted proposal. None: it began anew.
    feedback: Digest | None = None
    inner_from: Digest | None = None
    declaration: Annotated[bytes, Length(0, DECLARATION_BYTES_MAX)] = b""  # of the proposal; its blobs are in `declared_out`
    last_loss: LossMillionths | None = None  # of the last inner step, in millionths


@dataclass(frozen=True, slots=True)
class AuditReply:
    TAG: ClassVar[str] = "audit-reply"
    verdict: Verdict
    relative_error: float  # ‖m − (decay·e + Δ_replay)‖ / ‖Δ_replay‖
    seconds: float
    last_loss: LossMillionths | None = None  # of the last inner step, in millionths; None: nothing was replayed


@dataclass(frozen=True, slots=True)
class EvaluateReply:
    TAG: ClassVar[str] = "evaluate-reply"
    figures: dict[Name, float]  # of the objective
    seconds: float


@dataclass(frozen=True, slots=True)
class GenerateReply:
    TAG: ClassVar[str] = "generate-reply"
    text: Text  # what goes on from `GenerateRequest.told_characters`; nothing where the job's objective withholds it
    is_over: bool  # else the next request goes on
    is_withheld: bool = False


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What an engine can compute on, in MB of 10^6 bytes."""

    name: Name  # as the setting `device` says it
    about: Text  # as its maker calls it
    memory_mb: Count
    free_mb: Count | None  # None: of a GPU that is not used, where asking would take some of it
    held_mb: Count  # by the worker
    is_used: bool


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What the worker says of itself: unasked when everything slow is imported, and when it is asked."""

    TAG: ClassVar[str] = "worker-info"
    engine: Text
    threads: Count
    devices: Annotated[tuple[DeviceInfo, ...], Length(0, DEVICES_MAX)] = ()
    versions: Annotated[dict[Name, Text], Length(0, DEVICES_MAX)] = field(default_factory=dict)  # of libraries


@dataclass(frozen=True, slots=True)
class PongReply:
    TAG: ClassVar[str] = "pong-reply"


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The request could not be done; `text` is one line for a person."""

    TAG: ClassVar[str] = "request-failed"
    text: Annotated[str, Length(0, ERROR_CHARACTERS_MAX)]


@dataclass(frozen=True, slots=True)
class DeclarationFiles:
    """The declaration of a proposal that is re-executed, and the files with the blobs that it names."""

    encoded: Annotated[bytes, Length(0, DECLARATION_BYTES_MAX)] = b""
    files: Annotated[dict[Digest, Path], Length(0, DECLARATION_BYTES_MAX // 32)] = field(default_factory=dict)


# Requests ------------------------------------------------------------------------------------------------------------


class WorkerRequest(Generic[R]):
    """A request whose reply is an R, or `RequestFailed`."""

    __slots__ = ()
    TAG: ClassVar[str]


@dataclass(frozen=True, slots=True)
class WorkerRequestKind(Generic[R]):
    """The declaration of a request. Its name, and that of its reply, is the tag of the message."""

    request: type[WorkerRequest[R]]
    reply: type[R]
    priority: int  # smaller ones are answered first
    # `module:function`, imported by the worker alone: takes a `training.engines.request_handlers.WorkerContext` and the request,
    # returns the reply.
    handler: str


@dataclass(frozen=True, slots=True)
class OpenJobRequest(WorkerRequest[OpenJobReply]):
    """Get ready to compute for a job. Must come before the others that name it; again after the worker restarted."""

    TAG: ClassVar[str] = "open-job"
    job: Digest
    spec: Annotated[bytes, Length(1, TRANSACTION_BYTES_MAX)]  # encoded JobSpec
    text: Path | None  # the training text as one file; a BPE's token files are made beside it. None: the objective reads no text
    tokenizer: Path | None  # JSON of a byte-level BPE; None: bytes
    tokenized: bool = False  # `text` holds 16-bit token ids
    tokens: Digest | None = None  # of a BPE's, as the job's manifest names them
    base: Path | None = None  # model directory of the job's base, if it has one
    required_model: Path | None = None  # the same of the job that it reads, if there is one
    other_text: Path | None = None  # of that job, as `text`
    other_tokens: Digest | None = None  # of that job, as `tokens`
    # Those of `Objective.files`, and the job's `initial_model` where its objective refers to the first model.
    files: Annotated[dict[Digest, Path], Length(0, FILES_MAX)] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProposeRequest(WorkerRequest[ProposeReply]):
    """Do `trainer`'s local steps of `round` and make the payload. Without a whole previous buffer e is zero."""

    TAG: ClassVar[str] = "propose"
    job: Digest
    round: Count
    trainer: Key
    model_directory: Path  # as `ReplicatedModel.save` wrote it, after the round before
    previous_buffer: Path | None  # m of the trainer's last accepted proposal
    previous_payload: Path | None  # of the same proposal, unless the job has estimates
    buffer_out: Path  # where the new m goes; who takes it over, and the payload, makes them durable, with all else that is sent
    previous_inner: Path | None = None  # inner state of the trainer's last accepted proposal; None: fresh
    inner_out: Path | None = None  # where the new inner state goes, where the job keeps it
    declared_out: Path | None = None  # folder that is made anew for the blobs of the declaration, where the objective has one
    declared: DeclarationFiles | None = None  # goes by this declaration, whose files lie in that folder, and makes none

    @property
    def payload_out(self) -> str:
        return f"{self.buffer_out}.payload"


@dataclass(frozen=True, slots=True)
class AuditRequest(WorkerRequest[AuditReply]):
    """Re-execute `trainer`'s proposal. Previous buffer and payload as the proposal's `feedback` says."""

    TAG: ClassVar[str] = "audit"
    job: Digest
    round: Count
    trainer: Key
    model_directory: Path
    payload: Path
    buffer: Path | None
    previous_buffer: Path | None
    previous_payload: Path | None
    inner: Path | None = None  # where the job keeps it: the inner state that the proposal commits to
    previous_inner: Path | None = None  # as the proposal's `inner_from` says
    declared: DeclarationFiles = DeclarationFiles()


@dataclass(frozen=True, slots=True)
class EvaluateRequest(WorkerRequest[EvaluateReply]):
    """The objective's figures of a model."""

    TAG: ClassVar[str] = "evaluate"
    job: Digest
    model_directory: Path


@dataclass(frozen=True, slots=True)
class GenerateRequest(WorkerRequest[GenerateReply]):
    """Continue a prompt for a while. The same request, with what was told since, goes on
    (`training.text_generation`).
    """

    TAG: ClassVar[str] = "generate"
    job: Digest
    model_directory: Path | None  # None: the model of the first round, where the job's objective refers to it
    prompt: Text
    sampling: SamplingOptions
    stop: Count | None = None  # the token that ends the text and is no part of it
    turns: Annotated[
        tuple[Text, ...], Length(0, TURNS_MAX)
    ] = ()  # before the prompt, as many of the last as the context can hold
    text_number: Count = 0  # a number that no other text has
    told_characters: Count = 0  # characters of it


@dataclass(frozen=True, slots=True)
class PingRequest(WorkerRequest[PongReply]):
    """Says that the worker is alive."""

    TAG: ClassVar[str] = "ping"


@dataclass(frozen=True, slots=True)
class DescribeRequest(WorkerRequest[WorkerInfo]):
    """What the worker computes with, as it is now."""

    TAG: ClassVar[str] = "describe"


# Beside requests and replies -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerHeartbeat:
    """The request is progressing."""

    TAG: ClassVar[str] = "worker-heartbeat"


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """Nobody waits for this request any more: drop it at the next step."""

    TAG: ClassVar[str] = "cancel"


# Declarations --------------------------------------------------------------------------------------------------------

_HANDLERS: Final = "training.engines.request_handlers"
REQUESTS: Final[tuple[WorkerRequestKind[Any], ...]] = (
    WorkerRequestKind(OpenJobRequest, OpenJobReply, 0, f"{_HANDLERS}:open_job"),
    WorkerRequestKind(ProposeRequest, ProposeReply, 1, f"{_HANDLERS}:propose"),
    WorkerRequestKind(AuditRequest, AuditReply, 2, f"{_HANDLERS}:audit"),
    WorkerRequestKind(EvaluateRequest, EvaluateReply, 4, f"{_HANDLERS}:evaluate"),
    WorkerRequestKind(GenerateRequest, GenerateReply, 4, f"{_HANDLERS}:generate"),
    WorkerRequestKind(PingRequest, PongReply, 0, f"{_HANDLERS}:ping"),
    WorkerRequestKind(DescribeRequest, WorkerInfo, 0, f"{_HANDLERS}:describe"),
)


def messages_to_worker(kinds: Iterable[WorkerRequestKind[Any]]) -> tuple[type[Any], ...]:
    return (CancelRequest, *(kind.request for kind in kinds))


def messages_from_worker(kinds: Iterable[WorkerRequestKind[Any]]) -> tuple[type[Any], ...]:
    return tuple(dict.fromkeys((WorkerInfo, WorkerHeartbeat, RequestFailed, *(kind.reply for kind in kinds))))


# Framing -------------------------------------------------------------------------------------------------------------


def encode_frame(number: int, message: Any) -> bytes:
    body = codec.encode(message)
    return _FRAME.pack(len(body), number) + body


def parse_header(header: bytes) -> tuple[int, int]:
    """(bytes that follow, number of the request). `RemoteProtocolError` if it is longer than any message."""
    length, number = _FRAME.unpack(header)
    if length > FRAME_BYTES_MAX:
        raise RemoteProtocolError("oversized", f"a frame of {length} bytes on the worker's pipe")
    return length, number


def parse_body(body: bytes, kinds: tuple[type[Any], ...]) -> Any:
    return codec.decode_message(body, kinds, FRAME_BYTES_MAX)


# Texts, asked for a slice at a time: what rounds need of the worker goes in between ---------------------------------

Ask = Callable[[GenerateRequest], Awaitable[GenerateReply]]

_numbers = itertools.count(1)


async def stream_text(ask: Ask, request: GenerateRequest) -> AsyncGenerator[GenerateReply, None]:
    """Whoever reads slowly keeps nobody waiting, and whoever stops reading ends the text. To be closed (`aclosing`)."""
    request = replace(request, text_number=next(_numbers))
    while True:
        done = await ask(request)
        yield done
        if done.is_over:
            return
        request = replace(request, told_characters=request.told_characters + len(done.text))


async def generate_text(ask: Ask, request: GenerateRequest) -> GenerateReply:
    """The last slice, with the text of all of them."""
    parts = []
    async with aclosing(stream_text(ask, request)) as made:
        async for done in made:
            parts.append(done.text)
    return replace(done, text="".join(parts))
