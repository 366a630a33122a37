"""Messages between the daemon and its worker process, and their framing on the pipes.

The daemon sends one request at a time and gets one reply: the type that the request's declaration names, or `RequestFailed`. The
worker sends heartbeats while it makes progress. A `CancelRequest` asks the worker to drop the request with the same number. Paths
are absolute. Output files belong to the daemon after the reply; a worker that dies earlier may leave incomplete files. Features
declare further requests (`features.feature.Feature.worker_requests`).
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Final, Generic, TypeVar

from ledger.audits.loss_commitments import LossMillionths
from ledger.jobs import BRIEF_BYTES_MAX
from protocol import codec
from protocol.codec import Between, Count, Digest, Key, Length
from protocol.errors import FolkmootError, RemoteProtocolError
from protocol.limits import DECLARATION_BYTES_MAX, TRANSACTION_BYTES_MAX
from protocol.messages import Name
from protocol.sampling import SAMPLES_MAX, STOP_SEQUENCES_MAX, TURNS_MAX, EndReason, SamplingOptions
from protocol.verdicts import Verdict

# Most bytes of a frame. Data that grow with the model are sent as files. The largest frame is an OpenJobRequest: a specification,
# some paths and digests.
FRAME_BYTES_MAX = 1 << 20
FILES_MAX = 9  # most files of a job beside text and tokenizer: eight that its objective reads, and its first parameters
ROUND_FILES_MAX = 257  # most files of one round: a list of 256 blobs, and these blobs
DEVICES_MAX = 64  # most devices in a worker's description, and most versions of libraries
TEXT_BYTES_MAX = 64 << 10  # most bytes of a prompt, and of a generated text
SEQUENCE_TOKENS_MAX = 1 << 16  # most tokens of a prompt or of a scored sequence: the context of a model is the usual bound
STOP_SEQUENCE_TOKENS_MAX = 1_024  # most tokens of a stop sequence: a stop text has no more bytes
SLICE_TOKENS_MAX = 1 << 14  # a slice of samples ends after the pass that reaches this number of tokens, about 100 kB
ERROR_CHARACTERS_MAX = 500  # most characters of an error: one line for a person

Path = Annotated[str, Length(1, 4096)]
Text = Annotated[str, Length(0, TEXT_BYTES_MAX)]
TOKEN_BYTES = 2  # bytes of a token id, little-endian: a vocabulary has at most 65,536 tokens
LOGPROB_BYTES = 4  # bytes of a log-probability in nats, float32, little-endian
TokenIds = Annotated[bytes, Length(TOKEN_BYTES, TOKEN_BYTES * SEQUENCE_TOKENS_MAX)]
StopSequence = Annotated[bytes, Length(TOKEN_BYTES, TOKEN_BYTES * STOP_SEQUENCE_TOKENS_MAX)]
SliceTokens = Annotated[bytes, Length(0, TOKEN_BYTES * (SLICE_TOKENS_MAX + SAMPLES_MAX))]
SliceLogprobs = Annotated[bytes, Length(0, LOGPROB_BYTES * (SLICE_TOKENS_MAX + SAMPLES_MAX))]
R = TypeVar("R")
_FRAME = struct.Struct(">II")  # header of a frame: bytes of the message, and number of its request
FRAME_HEADER_BYTES = _FRAME.size


class WorkerDied(FolkmootError):
    """The worker process ended before its reply to a request. A retry is safe."""


class WorkerFailed(FolkmootError):
    """The worker is alive but could not serve a request. The text of this error gives the reason."""


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
    payload_digest: Digest  # digest of the payload in the file `ProposeRequest.payload_out`
    payload_bytes: Count
    buffer_digest: Digest | None  # digest of the buffer; None: the job has no buffers
    loss: float | None  # mean training loss over the local steps, in the unit of the objective; None: not finite
    seconds: float
    inner: Digest | None = None  # digest of the inner state in the file `ProposeRequest.inner_out`
    # Digests of the buffer and of the inner state from which this proposal continues, of the trainer's last accepted proposal.
    # None: the proposal starts from a fresh state.
    feedback: Digest | None = None
    inner_from: Digest | None = None
    # Encoded declaration of the proposal; its blobs are in `ProposeRequest.declared_out`.
    declaration: Annotated[bytes, Length(0, DECLARATION_BYTES_MAX)] = b""
    last_loss: LossMillionths | None = None  # loss of the last inner step, in millionths


@dataclass(frozen=True, slots=True)
class AuditReply:
    TAG: ClassVar[str] = "audit-reply"
    verdict: Verdict
    relative_error: float  # distance of the proposal from the re-executed update, divided by ‖Δ‖ of the re-execution
    seconds: float
    last_loss: LossMillionths | None = None  # loss of the last inner step, in millionths; None: no replay took place


@dataclass(frozen=True, slots=True)
class EvaluateReply:
    TAG: ClassVar[str] = "evaluate-reply"
    figures: dict[Name, float]  # metrics of the objective by name
    seconds: float


@dataclass(frozen=True, slots=True)
class GenerateReply:
    TAG: ClassVar[str] = "generate-reply"
    # Part of the text after the first `GenerateRequest.told_characters`; empty if the job's objective withholds the text.
    text: Text
    is_over: bool  # True if the text is complete. If not, the next request continues it.
    is_withheld: bool = False


@dataclass(frozen=True, slots=True)
class TokenSample:
    """A sample of a prompt's continuations, or its next tokens in a slice."""

    tokens: SliceTokens = b""
    # The log-probability of each token under the model, whatever temperature, top-k and top-p the draw had.
    logprobs: SliceLogprobs = b""
    end: EndReason | None = None  # None: the sample has further tokens


@dataclass(frozen=True, slots=True)
class GenerateTokensReply:
    """The tokens of all samples after the first `GenerateTokensRequest.told_tokens`."""

    TAG: ClassVar[str] = "generate-tokens-reply"
    samples: Annotated[tuple[TokenSample, ...], Length(1, SAMPLES_MAX)]  # for each sample, its tokens in this slice

    @property
    def is_over(self) -> bool:
        """True if all samples are complete. If not, the next request continues them."""
        return all(sample.end is not None for sample in self.samples)


@dataclass(frozen=True, slots=True)
class ScoreTokensReply:
    TAG: ClassVar[str] = "score-tokens-reply"
    # The log-probability of each token but the first, given those before it.
    logprobs: Annotated[bytes, Length(0, LOGPROB_BYTES * SEQUENCE_TOKENS_MAX)]


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A device that an engine can compute on. Sizes are in MB of 10^6 bytes."""

    name: Name  # name of the device, as in the setting `device`
    about: Text  # product name of the device
    memory_mb: Count
    free_mb: Count | None  # free memory of the device; None: unknown for an unused GPU, since the query would allocate memory
    held_mb: Count  # memory of the device that the worker occupies
    is_used: bool


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker's description of itself.

    The worker sends it at its start, after slow imports, and as reply to a `DescribeRequest`.
    """

    TAG: ClassVar[str] = "worker-info"
    engine: Text
    threads: Count
    devices: Annotated[tuple[DeviceInfo, ...], Length(0, DEVICES_MAX)] = ()
    versions: Annotated[dict[Name, Text], Length(0, DEVICES_MAX)] = field(default_factory=dict)  # versions by name of library


@dataclass(frozen=True, slots=True)
class PongReply:
    TAG: ClassVar[str] = "pong-reply"


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The reply to a request that failed. `text` is one line for a person."""

    TAG: ClassVar[str] = "request-failed"
    text: Annotated[str, Length(0, ERROR_CHARACTERS_MAX)]


@dataclass(frozen=True, slots=True)
class DeclarationFiles:
    """An encoded declaration, and the files with the blobs that it names, by digest."""

    encoded: Annotated[bytes, Length(0, DECLARATION_BYTES_MAX)] = b""
    files: Annotated[dict[Digest, Path], Length(0, DECLARATION_BYTES_MAX // 32)] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BriefFiles:
    """The brief of a round of a job on request, and the files of `Objective.round_files`, by digest."""

    encoded: Annotated[bytes, Length(0, BRIEF_BYTES_MAX)] = b""
    files: Annotated[dict[Digest, Path], Length(0, ROUND_FILES_MAX)] = field(default_factory=dict)


# Requests ------------------------------------------------------------------------------------------------------------


class WorkerRequest(Generic[R]):
    """A request to the worker. Its reply is of type R or a `RequestFailed`."""

    __slots__ = ()
    TAG: ClassVar[str]


@dataclass(frozen=True, slots=True)
class WorkerRequestKind(Generic[R]):
    """The declaration of a kind of request. The tags of the request and of its reply identify the two messages."""

    request: type[WorkerRequest[R]]
    reply: type[R]
    priority: int  # requests with smaller numbers are served first
    # `module:function` of the function that serves the request, which only the worker imports. It takes a
    # `training.engines.request_handlers.WorkerContext` and the request, and returns the reply.
    handler: str


@dataclass(frozen=True, slots=True)
class OpenJobRequest(WorkerRequest[OpenJobReply]):
    """The request to prepare for a job.

    The daemon sends it before other requests for the job, and again after a restart of the worker.
    """

    TAG: ClassVar[str] = "open-job"
    job: Digest
    spec: Annotated[bytes, Length(1, TRANSACTION_BYTES_MAX)]  # encoded JobSpec
    # File with the training text; the worker writes token files of a BPE beside it. None: the objective reads no text.
    text: Path | None
    tokenizer: Path | None  # JSON of a byte-level BPE; None: tokens are bytes
    tokenized: bool = False  # True if `text` contains 16-bit token ids.
    tokens: Digest | None = None  # digest of the BPE's tokens, as in the job's manifest
    base: Path | None = None  # model directory of the job's base, if any
    required_model: Path | None = None  # model directory of the finished job whose model the objective requires, if any
    other_text: Path | None = None  # text of the job of `required_model`
    other_tokens: Digest | None = None  # digest of the tokens of the job of `required_model`
    # Files of `Objective.required_files` by digest, and the job's `initial_model` if its objective refers to the first model.
    files: Annotated[dict[Digest, Path], Length(0, FILES_MAX)] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProposeRequest(WorkerRequest[ProposeReply]):
    """The request to compute `trainer`'s local steps of `round` and the payload."""

    TAG: ClassVar[str] = "propose"
    job: Digest
    round: Count
    trainer: Key
    model_directory: Path  # directory with the round's first model, which `ReplicatedModel.save` wrote
    previous_buffer: Path | None  # buffer of the trainer's last accepted proposal; None: error feedback starts from zero
    previous_payload: Path | None  # payload of the trainer's last accepted proposal, unless the job has estimates
    buffer_out: Path  # file for the new buffer, which the daemon makes durable together with the payload
    previous_inner: Path | None = None  # inner state of the trainer's last accepted proposal; None: a fresh state
    inner_out: Path | None = None  # file for the new inner state, if the job keeps inner states
    # Folder for the blobs of the declaration; None: the objective has no declarations. A declaration is the objective's own
    # record in a proposal, for example the responses of a PPO round. The worker empties the folder before it makes a new one.
    declared_out: Path | None = None
    # Declaration that the local steps use, with its files in `declared_out`; None: the engine makes a new declaration.
    declared: DeclarationFiles | None = None
    brief: BriefFiles = BriefFiles()

    @property
    def payload_out(self) -> str:
        return f"{self.buffer_out}.payload"


@dataclass(frozen=True, slots=True)
class AuditRequest(WorkerRequest[AuditReply]):
    """The request to re-execute `trainer`'s proposal. The proposal's `feedback` names the previous buffer and payload."""

    TAG: ClassVar[str] = "audit"
    job: Digest
    round: Count
    trainer: Key
    model_directory: Path
    payload: Path
    buffer: Path | None
    previous_buffer: Path | None
    previous_payload: Path | None
    inner: Path | None = None  # inner state that the proposal commits to, if the job keeps inner states
    previous_inner: Path | None = None  # inner state that the proposal's `inner_from` names
    declared: DeclarationFiles = DeclarationFiles()
    brief: BriefFiles = BriefFiles()


@dataclass(frozen=True, slots=True)
class EvaluateRequest(WorkerRequest[EvaluateReply]):
    """The request to compute the objective's metrics of a model."""

    TAG: ClassVar[str] = "evaluate"
    job: Digest
    model_directory: Path


@dataclass(frozen=True, slots=True)
class GenerateRequest(WorkerRequest[GenerateReply]):
    """The request to continue a prompt for one slice of time (`training.text_generation`).

    The same request with a larger `told_characters` returns the next slice.
    """

    TAG: ClassVar[str] = "generate"
    job: Digest
    # Directory of the model; None: the model of the first round, if the job's objective refers to it.
    model_directory: Path | None
    prompt: Text
    sampling: SamplingOptions
    stop: Count | None = None  # the token that ends the text and is not part of it
    turns: Annotated[
        tuple[Text, ...], Length(0, TURNS_MAX)
    ] = ()  # earlier turns of the conversation: the last ones that fit into the context precede the prompt
    text_number: Count = 0  # a number that is unique among all texts of this daemon
    told_characters: Count = 0  # characters of the text that were returned before


@dataclass(frozen=True, slots=True)
class GenerateTokensRequest(WorkerRequest[GenerateTokensReply]):
    """The request to sample continuations of a prompt for one slice of time (`training.token_generation`).

    The same request with a larger `told_tokens` returns the next slice. A sample contains the tokens that end it, and nothing
    ends it but its stops, `sampling.max_tokens` and the context: a caller who wants the end of a text names that token. The model
    reads at most as many tokens as the context has, and it predicts one more.
    """

    TAG: ClassVar[str] = "generate-tokens"
    job: Digest
    model_directory: Path
    prompt: TokenIds
    sampling: SamplingOptions  # A seed determines all samples of the request, which differ from each other.
    samples: Annotated[int, Between(1, SAMPLES_MAX)] = 1
    # Token sequences that end a sample. A stop token is a sequence of one.
    stop_sequences: Annotated[tuple[StopSequence, ...], Length(0, STOP_SEQUENCES_MAX)] = ()
    number: Count = 0  # a number that is unique among all requests for samples of this daemon
    told_tokens: Count = 0  # tokens of all samples together that were returned before


@dataclass(frozen=True, slots=True)
class ScoreTokensRequest(WorkerRequest[ScoreTokensReply]):
    """The request to compute the log-probabilities of a sequence, which has at most one token more than the context."""

    TAG: ClassVar[str] = "score-tokens"
    job: Digest
    model_directory: Path
    tokens: TokenIds


@dataclass(frozen=True, slots=True)
class PingRequest(WorkerRequest[PongReply]):
    """The request to reply at once, which checks that the worker is alive."""

    TAG: ClassVar[str] = "ping"


@dataclass(frozen=True, slots=True)
class DescribeRequest(WorkerRequest[WorkerInfo]):
    """The request to describe the engine, the devices and the libraries that the worker uses now."""

    TAG: ClassVar[str] = "describe"


# Messages besides requests and replies -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerHeartbeat:
    """A sign of the worker that it makes progress with the request."""

    TAG: ClassVar[str] = "worker-heartbeat"


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """A message to drop the request with this number at its next step, since nobody waits for it any more."""

    TAG: ClassVar[str] = "cancel"


# Declarations --------------------------------------------------------------------------------------------------------

_HANDLERS: Final = "training.engines.request_handlers"
REQUESTS: Final[tuple[WorkerRequestKind[Any], ...]] = (
    WorkerRequestKind(OpenJobRequest, OpenJobReply, 0, f"{_HANDLERS}:open_job"),
    WorkerRequestKind(ProposeRequest, ProposeReply, 1, f"{_HANDLERS}:propose"),
    WorkerRequestKind(AuditRequest, AuditReply, 2, f"{_HANDLERS}:audit"),
    WorkerRequestKind(EvaluateRequest, EvaluateReply, 4, f"{_HANDLERS}:evaluate"),
    WorkerRequestKind(GenerateRequest, GenerateReply, 4, f"{_HANDLERS}:generate"),
    WorkerRequestKind(GenerateTokensRequest, GenerateTokensReply, 4, f"{_HANDLERS}:generate_tokens"),
    WorkerRequestKind(ScoreTokensRequest, ScoreTokensReply, 4, f"{_HANDLERS}:score_tokens"),
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
    """Return the number of bytes after a frame's header, and the request's number.

    Raises `RemoteProtocolError` for too many bytes.
    """
    length, number = _FRAME.unpack(header)
    if length > FRAME_BYTES_MAX:
        raise RemoteProtocolError("oversized", f"a frame on the worker's pipe has {length} bytes, limit {FRAME_BYTES_MAX}")
    return length, number


def parse_body(body: bytes, kinds: tuple[type[Any], ...]) -> Any:
    return codec.decode_message(body, kinds, FRAME_BYTES_MAX)


# Texts and samples are requested in slices, so that requests of rounds can precede the next slice ---------------------

Ask = Callable[[GenerateRequest], Awaitable[GenerateReply]]

_numbers = itertools.count(1)


async def stream_text(ask: Ask, request: GenerateRequest) -> AsyncGenerator[GenerateReply, None]:
    """Yield a text in slices. A slow reader blocks nobody, and the text ends when its reader stops.

    Close the generator with `aclosing`.
    """
    request = replace(request, text_number=next(_numbers))
    while True:
        done = await ask(request)
        yield done
        if done.is_over:
            return
        request = replace(request, told_characters=request.told_characters + len(done.text))


async def generate_text(ask: Ask, request: GenerateRequest) -> GenerateReply:
    """Return the reply of the last slice, with the text of all slices."""
    parts = []
    async with aclosing(stream_text(ask, request)) as made:
        async for done in made:
            parts.append(done.text)
    return replace(done, text="".join(parts))


async def generate_tokens(
    ask: Callable[[GenerateTokensRequest], Awaitable[GenerateTokensReply]], request: GenerateTokensRequest
) -> tuple[TokenSample, ...]:
    """Return the complete samples of a request, which the worker makes in slices."""
    request = replace(request, number=next(_numbers))
    whole = [TokenSample()] * request.samples
    while True:
        reply = await ask(request)
        whole = [
            TokenSample(sample.tokens + part.tokens, sample.logprobs + part.logprobs, part.end)
            for sample, part in zip(whole, reply.samples, strict=True)
        ]
        if reply.is_over:
            return tuple(whole)
        request = replace(request, told_tokens=sum(len(sample.tokens) for sample in whole) // TOKEN_BYTES)
