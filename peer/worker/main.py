"""The worker process: `python -m peer.worker.main`. Reads requests from stdin, computes, answers on stdout.

Only here an engine, and with it torch, is imported. The process holds nothing that matters: it may be killed at any instruction,
and it ends by itself as soon as the daemon that started it is gone.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import queue
import signal
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO
from weakref import WeakValueDictionary

from features.lazy_import import import_object
from peer import features
from protocol.errors import FolkmootError, UserError
from training import parameter_blob, worker_protocol
from training.data.token_sequences import TokenizedText
from training.data.tokenizer import Tokenizer, load_tokenizer
from training.engine_resources import EngineResources, add_arguments
from training.engines.engine import DeclaringEngine, Engine, EngineBackend, RequiredModel
from training.job_spec import JobSpec
from training.objectives.objective import Declaration, RejectionReason
from training.replay import proposal_replay
from training.replay.inner_state import InnerState, OnState
from training.replicated.replicated_model import ReplicatedModel
from training.replicated.tensor_layout import Float32Array
from training.stop_sequences import StopSequenceDecoder
from training.text_generation import TextGeneration, TextGenerations

NICENESS = 5
HEARTBEAT_SECONDS = 1.0  # between signs of progress
JOBS_MAX = 8  # open at a time; the least recently used is closed
OOM_SCORE = "500"  # of -1000..1000, see proc(5)


class RequestCancelled(Exception):
    """Nobody waits for the request any more."""


class MessagePipes:
    """Framed messages on two byte streams; a thread reads, so that a Cancel or the daemon's end is seen during work."""

    def __init__(self, incoming: BinaryIO, outgoing: BinaryIO, ended: Callable[[], None]) -> None:
        self._incoming, self._outgoing, self._ended = incoming, outgoing, ended
        self._requests: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()  # the daemon asks one thing at a time
        self._cancelled = -1  # requests up to this number are not waited for
        self._current = 0
        self._beaten = 0.0

    def start(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            while header := self._incoming.read(worker_protocol.FRAME_HEADER_BYTES):
                length, number = worker_protocol.parse_header(header)
                message = worker_protocol.parse_body(self._incoming.read(length), worker_protocol.TO_WORKER)
                if isinstance(message, worker_protocol.CancelRequest):
                    self._cancelled = number
                else:
                    self._requests.put((number, message))
        finally:
            self._ended()

    def next_request(self) -> Any:
        self._current, message = self._requests.get()
        self._beaten = time.monotonic()
        return message

    def send_message(self, message: Any) -> None:
        self._outgoing.write(worker_protocol.encode_frame(self._current, message))
        self._outgoing.flush()

    def heartbeat(self) -> None:
        """Called between steps: shows the daemon progress, and stops the work if nobody waits for it."""
        if self._current <= self._cancelled:
            raise RequestCancelled
        if time.monotonic() - self._beaten >= HEARTBEAT_SECONDS:
            self._beaten = time.monotonic()
            self.send_message(worker_protocol.WorkerHeartbeat())


class WorkerRequestHandler:
    """The open jobs, and what is done for each kind of request."""

    def __init__(self, kind: EngineBackend, beat: Callable[[], None], micro_batch_max: int) -> None:
        self.kind, self._beat = kind, beat
        self._micro_batch_max = micro_batch_max
        self._engines: OrderedDict[bytes, Engine] = OrderedDict()
        self._texts = TextGenerations()
        self._mapped = WeakValueDictionary[bytes, Float32Array]()  # parameters by model root, as long as somebody has them

    def handle_request(self, request: Any) -> worker_protocol.Reply:
        match request:
            case worker_protocol.OpenJobRequest():
                return self._open(request)
            case worker_protocol.ProposeRequest():
                return proposal_replay.make_proposal(request, self._update(request.job), self._declarer(request.job))
            case worker_protocol.AuditRequest():
                return proposal_replay.audit_proposal(request, self._update(request.job), self._declarer(request.job))
            case worker_protocol.EvaluateRequest():
                return self._evaluate(request)
            case worker_protocol.GenerateRequest():
                return self._generate(request)
            case worker_protocol.DescribeRequest():
                return self.kind.describe_worker()
            case _:
                self._texts.drop_all()  # a ping comes when the daemon has had nothing else to ask for a while
                return worker_protocol.PongReply()

    def _open(self, request: worker_protocol.OpenJobRequest) -> worker_protocol.OpenJobReply:
        spec = JobSpec.decode(request.spec)
        if self.kind.name not in spec.resolved_objective.loss_functions:
            has = ", ".join(spec.resolved_objective.loss_functions) or "none"
            raise UserError(
                f"the engine {self.kind.name!r} cannot train the objective {spec.objective!r}: it has losses for {has}"
            )
        tokenizer = load_tokenizer(Path(request.tokenizer).read_bytes() if request.tokenizer else None, spec.model.vocabulary)
        if request.text is None:
            tokens: TokenizedText = TokenizedText.without_text(tokenizer.token_bytes)
        else:
            read = import_object(spec.resolved_objective.data_reader)
            tokens = read(spec, Path(request.text), tokenizer, self._beat, request.tokenized, request.tokens)
        engine = self.kind.open_engine(spec, tokens, tokenizer, _first(request, spec))
        if spec.resolved_objective.declaration_type is not None and not isinstance(engine, DeclaringEngine):
            raise UserError(
                f"the engine {self.kind.name!r} makes no declarations, which the objective {spec.objective!r} asks for"
            )
        if request.required_model is not None:
            engine.required_model = _other(spec, request, tokenizer, self._beat)
        engine.required_files = {digest: Path(path) for digest, path in request.files.items()}
        engine.micro_batch = min(engine.micro_batch, self._micro_batch_max)
        self._engines[request.job] = engine
        while len(self._engines) > JOBS_MAX:
            self._engines.popitem(last=False)
        return worker_protocol.OpenJobReply(engine.parameters, len(tokens.train), len(tokens.held_out))

    def _engine(self, job: bytes) -> Engine:
        if job not in self._engines:
            raise FolkmootError(f"job {job.hex()[:8]} is not open")
        self._engines.move_to_end(job)
        return self._engines[job]

    def _update(self, job: bytes) -> proposal_replay.ComputeUpdate:
        engine = self._engine(job)

        def update(
            parameters: Float32Array,
            job: bytes,
            round: int,
            trainer: bytes,
            inner: InnerState | None,
            on_state: OnState | None,
            *,
            taken: int,
            declaration: Declaration | None = None,
        ) -> tuple[Float32Array, Sequence[float]]:
            place = job, round, trainer
            delta, metrics = engine.local_steps(parameters, *place, self._beat, inner, on_state, declaration, taken)
            return delta, metrics.losses

        return update

    def _declarer(self, job: bytes) -> proposal_replay.EngineDeclarer | None:
        """None: the job's objective has none."""
        engine = self._engine(job)
        return _Declarer(engine, self._beat) if isinstance(engine, DeclaringEngine) else None

    def _evaluate(self, request: worker_protocol.EvaluateRequest) -> worker_protocol.EvaluateReply:
        started = time.perf_counter()
        figures = self._engine(request.job).compute_metrics(_parameters(request.model_directory), self._beat)
        return worker_protocol.EvaluateReply(dict(figures), time.perf_counter() - started)

    def _generate(self, request: worker_protocol.GenerateRequest) -> worker_protocol.GenerateReply:
        return self._texts.next_slice(request, partial(self._begun, request))

    def _shared(self, model_directory: str) -> Float32Array:
        """One array for all texts of a model: an engine copies parameters when it is given others than before."""
        model = ReplicatedModel.open(Path(model_directory))
        return self._mapped.setdefault(model.root, model.parameters)

    def _begun(self, request: worker_protocol.GenerateRequest) -> TextGeneration:
        engine, prompt = self._engine(request.job), request.prompt.encode()
        parameters = engine.first_parameters if request.model_directory is None else self._shared(request.model_directory)
        if parameters is None:
            raise FolkmootError(f"job {request.job.hex()[:8]} does not refer to its first model")
        pieces = engine.generate_text(parameters, _with_turns(engine, request), request.sampling, self._beat, request.stop)
        kind, spec, files = engine.spec.resolved_objective, engine.spec, engine.required_files

        def withholds(text: str) -> bool:
            return kind.withholds_output(spec, files, prompt, text.encode())

        return TextGeneration(
            pieces,
            StopSequenceDecoder(request.sampling.stop),
            request.told_characters,
            withholds if kind.moderates_output(spec) else None,
        )


@dataclass(frozen=True, slots=True)
class _Declarer:
    engine: DeclaringEngine
    beat: Callable[[], None]

    def make_declaration(self, parameters: Float32Array, job: bytes, round: int, trainer: bytes, folder: Path) -> Declaration:
        return self.engine.make_declaration(parameters, job, round, trainer, folder, self.beat)

    def why_declaration_refused(
        self, parameters: Float32Array, job: bytes, round: int, trainer: bytes, declaration: Declaration
    ) -> RejectionReason | None:
        return self.engine.why_declaration_refused(parameters, job, round, trainer, declaration, self.beat)

    def derive_step_data(
        self, parameters: Float32Array, job: bytes, round: int, trainer: bytes, declaration: Declaration
    ) -> Declaration:
        return self.engine.derive_step_data(parameters, job, round, trainer, declaration, self.beat)


def _first(request: worker_protocol.OpenJobRequest, spec: JobSpec) -> Float32Array | None:
    """The parameters of the job's first round, if its objective refers to them."""
    if not spec.resolved_objective.refers_to_first:
        return None
    if spec.initial_model is not None:
        return parameter_blob.read_all_values(spec, Path(request.files[spec.initial_model]))
    return ReplicatedModel.initial(request.job, spec, _base(request, spec)).parameters


def _base(request: worker_protocol.OpenJobRequest, spec: JobSpec) -> ReplicatedModel | None:
    """Whoever measured by another model would take every honest trainer for a liar."""
    if spec.base is None:
        return None
    if request.base is None:
        raise FolkmootError(f"the base of job {request.job.hex()[:8]} was not named")
    return ReplicatedModel.open_decided(Path(request.base), spec.base.root)


def _other(
    spec: JobSpec, request: worker_protocol.OpenJobRequest, tokenizer: Tokenizer, beat: Callable[[], None]
) -> RequiredModel:
    """The job that another one reads, whose tokenizer is the same."""
    read = spec.resolved_objective.required_model(spec)
    if read is None:
        raise FolkmootError(f"job {spec.name!r} reads no other job")
    model = ReplicatedModel.open_decided(Path(request.required_model or ""), read.root)
    data = import_object(model.spec.resolved_objective.data_reader)(
        model.spec, Path(request.other_text or ""), tokenizer, beat, named=request.other_tokens
    )
    return RequiredModel(model.spec, model.parameters, data)


def _with_turns(engine: Engine, request: worker_protocol.GenerateRequest) -> bytes:
    """The prompt behind as many whole turns as the context can hold beside the text, which has at most half of it.

    A turn ends with the bytes of the job's stop token, or with a line break, as in `rlhf.data.dataset_formats`.
    """
    text, context, tokenizer = request.prompt.encode(), engine.spec.model.context, engine.tokenizer
    end = b"" if request.stop is None else tokenizer.decode([request.stop])
    room = context - min(request.sampling.max_tokens, context // 2) - len(tokenizer.encode(text))
    for turn in reversed(request.turns):
        before = turn.encode() + (end or b"\n")
        room -= len(tokenizer.encode(before))
        if room < 0:
            break
        text = before + text
    return text


def _parameters(model_directory: str) -> Float32Array:
    return ReplicatedModel.open(Path(model_directory)).parameters


def serve_requests(pipes: MessagePipes, jobs: WorkerRequestHandler) -> None:
    """Answers requests for ever."""
    while True:
        request = pipes.next_request()
        try:
            pipes.send_message(jobs.handle_request(request))  # an answer that is no number has no encoding: that fails here too
        except RequestCancelled:
            pipes.send_message(worker_protocol.RequestFailed("cancelled"))
        except FolkmootError as error:
            pipes.send_message(worker_protocol.RequestFailed(str(error)[: worker_protocol.ERROR_CHARACTERS_MAX]))
        except Exception as error:  # the boundary of the process: the daemon is told, and the next request may well succeed
            what = "out of memory" if jobs.kind.is_out_of_memory(error) else f"{type(error).__name__}: {error}"
            pipes.send_message(worker_protocol.RequestFailed(what[: worker_protocol.ERROR_CHARACTERS_MAX]))


def _lower_priority() -> None:
    """The daemon's votes come first when cores are short, and it outlives us when memory is."""
    os.nice(NICENESS)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE)


def _own_pipes() -> MessagePipes:
    """Takes stdin and stdout for the conversation; whatever prints from now on lands on stderr and cannot break the framing."""
    incoming, outgoing = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    return MessagePipes(os.fdopen(incoming, "rb"), os.fdopen(outgoing, "wb"), ended=_end)


def _end() -> None:
    """The daemon closed the pipe or is gone. Every file is written whole or not at all, so nothing is lost by ending at once.

    (Linux's PR_SET_PDEATHSIG would not do: it follows the daemon's *thread* that started us, and Trio's threads come and go.)
    """
    os._exit(0)


def main(make_jobs: Callable[[EngineBackend, Callable[[], None], int], WorkerRequestHandler] = WorkerRequestHandler) -> None:
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
    ):  # they reach a whole group; the daemon stops us in its own order
        signal.signal(number, signal.SIG_IGN)
    features.install_objectives()
    parser = argparse.ArgumentParser(prog="peer.worker.main", description="computes for one peer; started by its daemon")
    parser.add_argument("--engine", choices=tuple(features.engines()), default="pytorch", help="what computes")
    add_arguments(parser)
    parser.add_argument("--micro-batch-max", type=int, default=1 << 30, help="sequences per forward pass, whatever the job says")
    parser.add_argument("--rank", type=int, default=0, help="of a process that assists a worker; its orders come on stdin")
    parser.add_argument("--store", type=Path, help="file where all processes of a worker meet")
    arguments = parser.parse_args()
    resources = EngineResources.from_options(arguments)
    if not arguments.rank:  # an assistant is as modest as who started it
        _lower_priority()
    kind: EngineBackend = import_object(features.engines()[arguments.engine])
    assert kind.name == arguments.engine, "a feature lists it under another name, by which no objective has a loss"
    if arguments.rank:
        kind.run_rank(resources, arguments.rank, arguments.store, sys.stdin.buffer)
    pipes = _own_pipes()
    try:
        kind.start_backend(resources, sys.orig_argv)
    except UserError as error:
        pipes.send_message(worker_protocol.RequestFailed(str(error)[: worker_protocol.ERROR_CHARACTERS_MAX]))
        return
    gc.freeze()  # what was imported is no garbage
    pipes.send_message(kind.describe_worker())
    pipes.start()
    serve_requests(pipes, make_jobs(kind, pipes.heartbeat, arguments.micro_batch_max))


if __name__ == "__main__":
    main()
