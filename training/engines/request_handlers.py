"""Handlers of the requests of `training.worker_protocol`, in the worker process."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

from features.lazy_import import import_object
from protocol.errors import FolkmootError, UserError
from training import parameter_blob, worker_protocol
from training.data.token_sequences import TokenizedText
from training.data.tokenizer import Tokenizer, load_tokenizer
from training.engine_implementations import objective_functions
from training.engines.engine import DeclaringEngine, Engine, RequiredModel
from training.engines.worker_context import WorkerContext
from training.job_spec import JobSpec
from training.replay import proposal_replay
from training.replicated.replicated_model import ReplicatedModel
from training.replicated.tensor_layout import Float32Array
from training.text_generation import StopSequenceDecoder, TextGeneration


def open_job(context: WorkerContext, request: worker_protocol.OpenJobRequest) -> worker_protocol.OpenJobReply:
    spec, backend = JobSpec.decode(request.spec), context.backend
    objective_functions(backend.name, spec.objective)  # or the error names both
    tokenizer = load_tokenizer(Path(request.tokenizer).read_bytes() if request.tokenizer else None, spec.model.vocabulary)
    if request.text is None:
        tokens: TokenizedText = TokenizedText.without_text(tokenizer.token_bytes)
    else:
        read = import_object(spec.resolved_objective.data_reader)
        tokens = read(spec, Path(request.text), tokenizer, context.heartbeat, request.tokenized, request.tokens)
    engine = backend.open_engine(spec, tokens, tokenizer, _first_parameters(request, spec))
    if spec.resolved_objective.declaration_type is not None and not isinstance(engine, DeclaringEngine):
        raise UserError(f"the engine {backend.name!r} makes no declarations, which the objective {spec.objective!r} asks for")
    if request.required_model is not None:
        engine.required_model = _required_model(context, request, spec, tokenizer)
    engine.required_files = {digest: Path(path) for digest, path in request.files.items()}
    context.add_engine(request.job, engine)
    return worker_protocol.OpenJobReply(engine.parameters, len(tokens.train), len(tokens.held_out))


def _first_parameters(request: worker_protocol.OpenJobRequest, spec: JobSpec) -> Float32Array | None:
    """The parameters of the job's first round, if its objective refers to them."""
    if not spec.resolved_objective.refers_to_first:
        return None
    if spec.initial_model is not None:
        return parameter_blob.read_all_values(spec, Path(request.files[spec.initial_model]))
    return ReplicatedModel.initial(request.job, spec, _base_model(request, spec)).parameters


def _base_model(request: worker_protocol.OpenJobRequest, spec: JobSpec) -> ReplicatedModel | None:
    """Whoever measured by another model would take every honest trainer for a liar."""
    if spec.base is None:
        return None
    if request.base is None:
        raise FolkmootError(f"the base of job {request.job.hex()[:8]} was not named")
    return ReplicatedModel.open_decided(Path(request.base), spec.base.root)


def _required_model(
    context: WorkerContext, request: worker_protocol.OpenJobRequest, spec: JobSpec, tokenizer: Tokenizer
) -> RequiredModel:
    """The job that another one reads, whose tokenizer is the same."""
    read = spec.resolved_objective.required_model(spec)
    if read is None:
        raise FolkmootError(f"job {spec.name!r} reads no other job")
    model = ReplicatedModel.open_decided(Path(request.required_model or ""), read.root)
    data = import_object(model.spec.resolved_objective.data_reader)(
        model.spec, Path(request.other_text or ""), tokenizer, context.heartbeat, named=request.other_tokens
    )
    return RequiredModel(model.spec, model.parameters, data)


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
        raise FolkmootError(f"job {request.job.hex()[:8]} does not refer to its first model")
    pieces = engine.generate_text(
        parameters, _prompt_with_turns(engine, request), request.sampling, context.heartbeat, request.stop
    )
    objective, spec, files = engine.spec.resolved_objective, engine.spec, engine.required_files

    def withholds(text: str) -> bool:
        return objective.withholds_output(spec, files, prompt, text.encode())

    return TextGeneration(
        pieces,
        StopSequenceDecoder(request.sampling.stop),
        request.told_characters,
        withholds if objective.moderates_output(spec) else None,
    )


def _prompt_with_turns(engine: Engine, request: worker_protocol.GenerateRequest) -> bytes:
    """The prompt behind as many whole turns as the context can hold beside the text, which has at most half of it.

    A turn ends with the bytes of the job's stop token, or with a line break, as in `rlhf.data.dataset_files`.
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


def ping(context: WorkerContext, request: worker_protocol.PingRequest) -> worker_protocol.PongReply:
    """A ping comes when the daemon has had nothing else to ask for a while: nobody waits for a text any more."""
    context.texts.drop_all()
    return worker_protocol.PongReply()


def describe(context: WorkerContext, request: worker_protocol.DescribeRequest) -> worker_protocol.WorkerInfo:
    return context.backend.describe_worker()
