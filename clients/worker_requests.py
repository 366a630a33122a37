"""The request of a gateway to its worker: a pass over one request body, for the client's losses."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, ClassVar, Protocol

from clients.records import BODY_BYTES_MAX, RequestBody
from protocol import codec
from protocol.codec import Count, Digest
from protocol.errors import FolkmootError
from training.worker_protocol import Path, WorkerRequest, WorkerRequestKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from training.engines.request_handlers import WorkerContext
    from training.replicated.tensor_layout import Float32Array


@dataclass(frozen=True, slots=True)
class PassReply:
    TAG: ClassVar[str] = "pass-reply"
    loss: float  # sum of the losses of all tokens
    seconds: float


@dataclass(frozen=True, slots=True)
class PassRequest(WorkerRequest[PassReply]):
    """The request to compute the losses of a request body on the model of a round, and its gradient if `backward`."""

    TAG: ClassVar[str] = "pass"
    job: Digest
    round: Count
    model_directory: Path
    body: Path
    logprobs_out: Path  # file for the log-probabilities of the targets of all examples in order, float32, little-endian
    backward: bool


class LossPass(Protocol):
    """The result of a pass: see `clients.pytorch.adapted_model.PassResult`."""

    @property
    def loss(self) -> float: ...

    @property
    def logprobs(self) -> Sequence[Float32Array]: ...


class PassEngine(Protocol):
    """An engine of client jobs."""

    def run_pass(
        self, parameters: Float32Array, round: int, body: RequestBody, *, backward: bool, on_step: Callable[[], None]
    ) -> LossPass: ...


def run_pass(context: WorkerContext, request: PassRequest) -> PassReply:
    from training.replicated.replicated_model import ReplicatedModel

    started = time.perf_counter()
    engine, model = context.find_engine(request.job), ReplicatedModel.open(FilePath(request.model_directory))
    body = codec.decode(RequestBody, FilePath(request.body).read_bytes(), BODY_BYTES_MAX)
    if problem := body.problem(engine.spec.model.context, engine.spec.model.vocabulary):
        raise FolkmootError(problem)
    computes: PassEngine = engine  # type: ignore[assignment]  # the engine of the objective `client`
    found = computes.run_pass(model.parameters, request.round, body, backward=request.backward, on_step=context.heartbeat)
    with FilePath(request.logprobs_out).open("wb") as file:
        for logprobs in found.logprobs:
            file.write(logprobs.astype("<f4").tobytes())
    return PassReply(found.loss, time.perf_counter() - started)


REQUESTS = (WorkerRequestKind(PassRequest, PassReply, 1, "clients.worker_requests:run_pass"),)
