"""Handlers of the requests of `training.worker_protocol`.

Handlers run in the worker process and compute with the engines of open jobs.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from weakref import WeakValueDictionary

from features.lazy_import import import_object
from protocol.errors import FolkmootError, UserError
from training import parameter_blob, worker_protocol
from training.data.token_sequences import TokenizedText
from training.data.tokenizer import load_tokenizer
from training.engine_implementations import objective_functions
from training.engines.engine import CompilingEngine, DeclaringEngine, Engine, EngineBackend, RequiredModel
from training.job_spec import JobSpec
from training.objectives.objective import Declaration
from training.replay import proposal_replay
from training.replay.inner_state import InnerState, OnState
from training.replicated.replicated_model import ReplicatedModel
from training.replicated.tensor_layout import Float32Array, layout_of
from training.text_generation import StopSequenceDecoder, TextGeneration, TextGenerations
from training.token_generation import LOGPROB_TYPE, TokenGeneration, TokenGenerations, parse_tokens, stop_condition

JOBS_MAX = 8  # most open jobs: beyond, the least recently used job is closed


class WorkerContext:
    """State that handlers share: the backend, the engines of open jobs, and unfinished texts and samples."""

    def __init__(self, backend: EngineBackend, heartbeat: Callable[[], None], micro_batch_max: int) -> None:
        """`heartbeat` is called after every piece of work. It raises an exception if nobody waits for the request any more."""
        self.backend, self.heartbeat = backend, heartbeat
        self.texts, self.samples = TextGenerations(), TokenGenerations()
        self._micro_batch_max = micro_batch_max
        self._engines: OrderedDict[bytes, Engine] = OrderedDict()
        self._mapped = WeakValueDictionary[bytes, Float32Array]()  # parameters by model root, as long as an engine uses them

    def add_engine(self, job: bytes, engine: Engine) -> None:
        engine.micro_batch = min(engine.micro_batch, self._micro_batch_max)
        self._engines[job] = engine
        while len(self._engines) > JOBS_MAX:
            self._engines.popitem(last=False)

    def find_engine(self, job: bytes) -> Engine:
        """Return the engine of an open job. Raises `FolkmootError` if the job is not open."""
        if job not in self._engines:
            raise FolkmootError(f"job {job.hex()[:8]} is not open")
        self._engines.move_to_end(job)
        return self._engines[job]

    def update_function(self, job: bytes) -> proposal_replay.ComputeUpdate:
        engine = self.find_engine(job)

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
            return engine.local_steps(parameters, job, round, trainer, self.heartbeat, inner, on_state, declaration, taken)

        return update

    def shared_parameters(self, model_directory: str) -> Float32Array:
        """Return a model's parameters, as the same array in every call: an engine copies parameters if it gets another array."""
        model = ReplicatedModel.open(Path(model_directory))
        return self._mapped.setdefault(model.root, model.parameters)


def open_job(context: WorkerContext, request: worker_protocol.OpenJobRequest) -> worker_protocol.OpenJobReply:
    spec, backend = JobSpec.decode(request.spec), context.backend
    objective_functions(backend.name, spec.objective)  # The call raises an error that names engine and objective.
    tokenizer = load_tokenizer(Path(request.tokenizer).read_bytes() if request.tokenizer else None, spec.model.vocabulary)
    if request.text is None:
        tokens: TokenizedText = TokenizedText.without_text(tokenizer.token_bytes)
    else:
        read = import_object(spec.resolved_objective.data_reader)
        tokens = read(spec, Path(request.text), tokenizer, context.heartbeat, request.tokenized, request.tokens)
    engine = backend.open_engine(spec, tokens, tokenizer, _first_parameters(request, spec))
    if spec.resolved_objective.declaration_type is not None and not isinstance(engine, DeclaringEngine):
        raise UserError(f"the engine {backend.name!r} cannot make the declarations that objective {spec.objective!r} requires")
    read_job = spec.resolved_objective.required_model(spec)
    if request.required_model is not None:  # The required model's job has the same tokenizer.
        assert read_job is not None, f"job {spec.name!r} reads no other job"
        model = ReplicatedModel.open_decided(Path(request.required_model), read_job.root)
        data = TokenizedText.without_text(tokenizer.token_bytes)
        if spec.resolved_objective.reads_required_data:
            read = import_object(model.spec.resolved_objective.data_reader)
            data = read(model.spec, Path(request.other_text or ""), tokenizer, context.heartbeat, named=request.other_tokens)
        engine.required_model = RequiredModel(model.spec, model.parameters, data)
    engine.required_files = {digest: Path(path) for digest, path in request.files.items()}
    context.add_engine(request.job, engine)
    if isinstance(engine, CompilingEngine):
        engine.compile_programs(context.heartbeat)
    return worker_protocol.OpenJobReply(layout_of(spec).size, len(tokens.train), len(tokens.held_out))


def _first_parameters(request: worker_protocol.OpenJobRequest, spec: JobSpec) -> Float32Array | None:
    """Return the parameters of the job's first round, if its objective refers to them."""
    if not spec.resolved_objective.refers_to_first:
        return None
    if spec.initial_model is not None:
        return parameter_blob.read_all_values(spec, Path(request.files[spec.initial_model]))
    if spec.base is None:
        return ReplicatedModel.initial(request.job, spec).parameters
    if request.base is None:  # Without the base, the engine would reject updates of honest trainers.
        raise FolkmootError(f"the request for job {request.job.hex()[:8]} names no base")
    base = ReplicatedModel.open_decided(Path(request.base), spec.base.root)
    return ReplicatedModel.initial(request.job, spec, base).parameters


def propose(context: WorkerContext, request: worker_protocol.ProposeRequest) -> worker_protocol.ProposeReply:
    engine, update = context.find_engine(request.job), context.update_function(request.job)
    declarer = engine if isinstance(engine, DeclaringEngine) else None
    return proposal_replay.make_proposal(request, update, declarer, context.heartbeat)


def audit(context: WorkerContext, request: worker_protocol.AuditRequest) -> worker_protocol.AuditReply:
    engine, update = context.find_engine(request.job), context.update_function(request.job)
    declarer = engine if isinstance(engine, DeclaringEngine) else None
    return proposal_replay.audit_proposal(request, update, declarer, context.heartbeat)


def evaluate(context: WorkerContext, request: worker_protocol.EvaluateRequest) -> worker_protocol.EvaluateReply:
    started = time.perf_counter()
    parameters = ReplicatedModel.open(Path(request.model_directory)).parameters
    figures = context.find_engine(request.job).compute_metrics(parameters, context.heartbeat)
    return worker_protocol.EvaluateReply(dict(figures), time.perf_counter() - started)


def generate(context: WorkerContext, request: worker_protocol.GenerateRequest) -> worker_protocol.GenerateReply:
    return context.texts.next_slice(request, partial(_begin_text, context, request))


def _begin_text(context: WorkerContext, request: worker_protocol.GenerateRequest) -> TextGeneration:
    engine, prompt = context.find_engine(request.job), request.prompt.encode()
    parameters = (
        engine.first_parameters if request.model_directory is None else context.shared_parameters(request.model_directory)
    )
    if parameters is None:
        raise FolkmootError(f"job {request.job.hex()[:8]} has no initial model in its engine")
    objective, spec, files = engine.spec.resolved_objective, engine.spec, engine.required_files
    whole = _prompt_with_turns(engine, request)
    pieces = engine.generate_text(parameters, whole, request.sampling, context.heartbeat, request.stop)
    stops, withholds = StopSequenceDecoder(request.sampling.stop), None
    if objective.moderates_output(spec):
        withholds = partial(objective.withholds_output, spec, files, prompt)
    return TextGeneration(pieces, stops, request.told_characters, withholds)


def _prompt_with_turns(engine: Engine, request: worker_protocol.GenerateRequest) -> bytes:
    """Return the prompt after the last whole turns that fit into the context.

    The generated text gets at most half of the context. A turn ends with the bytes of the job's stop token, or with a line break,
    as in `rlhf.data.dataset_files`.
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


def generate_tokens(
    context: WorkerContext, request: worker_protocol.GenerateTokensRequest
) -> worker_protocol.GenerateTokensReply:
    return context.samples.next_slice(request, partial(_begin_samples, context, request))


def _begin_samples(context: WorkerContext, request: worker_protocol.GenerateTokensRequest) -> TokenGeneration:
    engine, how = context.find_engine(request.job), request.sampling.validated()
    spec = engine.spec
    if spec.resolved_objective.moderates_output(spec):
        raise UserError(f"the model of {spec.name!r} gives no samples by token ids: its job withholds some texts from people")
    if how.beams:
        raise UserError(f"beams {how.beams}: samples are drawn, so leave beams out")
    prompt = parse_tokens(request.prompt, spec, "the prompt", spec.model.context).tolist()
    sequences = [parse_tokens(data, spec, "a stop sequence", spec.model.context).tolist() for data in request.stop_sequences]
    ends = stop_condition(spec, engine.tokenizer, how.stop, sequences)
    parameters = context.shared_parameters(request.model_directory)
    drawn = engine.generate_tokens(parameters, prompt, request.samples, how, ends, context.heartbeat)
    return TokenGeneration(drawn, request.samples, request.told_tokens)


def score_tokens(context: WorkerContext, request: worker_protocol.ScoreTokensRequest) -> worker_protocol.ScoreTokensReply:
    engine = context.find_engine(request.job)
    tokens = parse_tokens(request.tokens, engine.spec, "the sequence", engine.spec.model.context + 1).tolist()
    found = engine.score_tokens(context.shared_parameters(request.model_directory), tokens, context.heartbeat)
    return worker_protocol.ScoreTokensReply(found.astype(LOGPROB_TYPE).tobytes())


def ping(context: WorkerContext, request: worker_protocol.PingRequest) -> worker_protocol.PongReply:
    """Drop unfinished texts and samples. The daemon pings only after a while without requests, so nobody waits for them."""
    context.texts, context.samples = TextGenerations(), TokenGenerations()
    return worker_protocol.PongReply()


def describe(context: WorkerContext, request: worker_protocol.DescribeRequest) -> worker_protocol.WorkerInfo:
    return context.backend.describe_worker()
