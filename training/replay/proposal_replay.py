"""From an update to a proposal, and from a proposal to a verdict: numpy only.

The worker computes updates with torch; for scratch jobs the daemon does it all itself, with `known_update`.
"""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from ledger.audits.loss_commitments import nats_to_millionths
from protocol import codec as wire
from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.verdicts import OBJECTIVE_CODES_FIRST, Verdict
from storage.multipart_objects import write_object
from training.job_spec import JobSpec
from training.objectives.objective import Declaration, RejectionReason
from training.replay.inner_state import RELATIVE_ERROR_MAX, InnerState, OnState, inner_error, relative_error
from training.replicated import codec, error_feedback
from training.replicated.replicated_model import ReplicatedModel
from training.replicated.tensor_layout import Float32Array, layout_of
from training.worker_protocol import AuditReply, AuditRequest, DeclarationFiles, ProposeReply, ProposeRequest

log = logging.getLogger("peer")
OnProgress = Callable[[], None]  # called after every piece of work; raises to stop it


class ComputeUpdate(Protocol):
    def __call__(
        self,
        parameters: Float32Array,
        job: bytes,
        round: int,
        trainer: bytes,
        inner: InnerState | None,
        on_state: OnState | None,
        /,
        *,
        taken: int,
        declaration: Declaration | None = None,
    ) -> tuple[Float32Array, Sequence[float]]:
        """Δ and the loss of each inner step. `inner` is None for a fresh inner state; `on_state`, if any, is told each state."""


class Declarer(Protocol):
    """What an engine does for objectives that have declarations."""

    def make_declaration(
        self, parameters: Float32Array, job: bytes, round: int, trainer: bytes, folder: Path, on_step: OnProgress = ...
    ) -> Declaration:
        """The trainer's declaration in the round. Each blob that it names is a file in `folder`, called by its digest in hex."""

    def why_declaration_refused(
        self,
        parameters: Float32Array,
        job: bytes,
        round: int,
        trainer: bytes,
        declaration: Declaration,
        on_step: OnProgress = ...,
    ) -> RejectionReason | None:
        """The objective's own reason that refutes the declaration.

        Whatever the bytes of a blob cause is a `RemoteProtocolError`: an auditor must end with a verdict.
        """

    def derive_step_data(
        self,
        parameters: Float32Array,
        job: bytes,
        round: int,
        trainer: bytes,
        declaration: Declaration,
        on_step: OnProgress = ...,
    ) -> Declaration:
        """The same declaration, which nothing refutes, with what the steps need of it and of the round's model: `parameters`."""


def make_proposal(
    request: ProposeRequest, update: ComputeUpdate, declarer: Declarer | None = None, on_step: OnProgress = lambda: None
) -> ProposeReply:
    """Computes the update, adds what earlier payloads left unsaid or its momentum, and writes the payload and what it commits to.

    What of the trainer's own is not whole any more is not gone on from: beginning anew is always allowed.
    """
    started = time.perf_counter()
    model = _open(request)
    (e, feedback_from), (inner, inner_from) = _own_feedback(request, model), _own_inner(request, model)
    last, place = deque[InnerState](maxlen=1), (request.job, request.round, request.trainer)  # inner state after the last step
    take = (lambda parameters, inner: last.append(inner)) if request.inner_out else None
    declaration = _own_declaration(request, model, declarer, on_step)
    delta, losses = update(model.parameters, *place, inner, take, taken=model.rounds_in_model, declaration=declaration)
    m = error_feedback.accumulate_feedback(e, delta, model.spec.feedback_decay, model.spec.update_weight)
    try:
        buffer, payload = _encoded(m, request.trainer, model)
    except LocalProtocolError:  # the model diverged; without proposals the round would never be closed
        buffer, payload = _encoded(error_feedback.clip_to_encodable(m), request.trainer, model)
        if not model.is_too_large(request.trainer, payload):
            raise
    payload_digest = write_object(Path(request.payload_out), payload)
    committed_to = None if buffer is None else write_object(Path(request.buffer_out), buffer.encode())
    kept = last[0].write(Path(request.inner_out)) if request.inner_out and last else None
    mean = sum(losses) / len(losses)
    return ProposeReply(
        payload_digest=payload_digest,
        payload_bytes=len(payload),
        buffer_digest=committed_to,
        loss=mean if math.isfinite(mean) else None,
        seconds=time.perf_counter() - started,
        inner=kept,
        feedback=feedback_from,
        inner_from=inner_from,
        declaration=wire.encode(declaration.record) if declaration else b"",
        last_loss=nats_to_millionths(losses[-1]),
    )


def _encoded(m: Float32Array, trainer: bytes, model: ReplicatedModel) -> tuple[codec.QuantizedUpdate | None, bytes]:
    """The buffer of `m`, if the job has buffers, and the payload. `LocalProtocolError` if m has no encoding."""
    buffer = error_feedback.make_buffer(m, model.header(trainer), model.spec)
    return buffer, model.encode_payload(trainer, m if buffer is None else buffer.dequantize())


def audit_proposal(
    request: AuditRequest, update: ComputeUpdate, declarer: Declarer | None = None, on_step: OnProgress = lambda: None
) -> AuditReply:
    """Checks the declaration, re-executes the update by it, and judges payload, buffer and inner state by the result."""
    started = time.perf_counter()
    verdict, error, loss = _judge(request, _open(request), update, declarer, on_step)
    return AuditReply(verdict, error, time.perf_counter() - started, loss)


def _judge(
    request: AuditRequest, model: ReplicatedModel, update: ComputeUpdate, declarer: Declarer | None, on_step: OnProgress
) -> tuple[Verdict, float, int | None]:
    """And the loss that a report on the round seals."""
    spec, last, place = model.spec, deque[InnerState](maxlen=1), (request.job, request.round, request.trainer)
    try:
        buffer, e = error_feedback.read_buffer(Path(request.buffer), spec) if request.buffer else None, _feedback(request, model)
        inner = InnerState.load(Path(request.inner), spec) if request.inner else None
        previous = InnerState.load(Path(request.previous_inner), spec) if request.previous_inner else None
        declaration = _read_declaration(request.declared, spec)
        refutation = None
        if declaration is not None:
            if declarer is None:
                raise LocalProtocolError("the objective has declarations, but nobody checks them")
            refutation = declarer.why_declaration_refused(model.parameters, *place, declaration, on_step)
    except RemoteProtocolError:  # what it commits to, goes on from or declares, is none
        return Verdict.REPLAY, RELATIVE_ERROR_MAX, None
    if refutation is not None:
        number = spec.resolved_objective.rejection_reasons.index(refutation)
        return Verdict(OBJECTIVE_CODES_FIRST + number), RELATIVE_ERROR_MAX, None
    payload, declaration = Path(request.payload).read_bytes(), _derived(request, model, declaration, declarer, on_step)
    take = (lambda parameters, state: last.append(state)) if inner else None
    delta, losses = update(model.parameters, *place, previous, take, taken=model.rounds_in_model, declaration=declaration)
    verdict, error = compare_update(model, request.trainer, delta, payload, e, buffer)
    if inner and last and verdict is Verdict.ACCEPT:
        error = max(error, inner_error(inner, last[0], spec))
        verdict = Verdict.ACCEPT if error <= spec.replay_tolerance else Verdict.REPLAY
    return verdict, error, nats_to_millionths(losses[-1])


def compare_update(
    model: ReplicatedModel,
    trainer: bytes,
    delta: Float32Array,
    payload: bytes,
    e: Float32Array,
    buffer: codec.QuantizedUpdate | None,
) -> tuple[Verdict, float]:
    """The verdict on a proposal by the re-executed Δ, and its relative error."""
    spec, header, held = model.spec, model.header(trainer), model.estimate_vector(trainer)
    of_update = spec.feedback_decay, spec.update_weight
    distance, norm = error_feedback.replay_deviation(payload, buffer, e, delta, header, model.layout, *of_update, held)
    return error_feedback.judge_deviation(distance, norm, spec.replay_tolerance), relative_error(distance, norm)


def known_update(spec: JobSpec) -> ComputeUpdate:
    """Of an objective whose updates take no training."""
    size, kind = layout_of(spec).size, spec.resolved_objective
    return lambda parameters, job, round, trainer, inner, on_state, *, taken, declaration=None: (
        kind.deterministic_update(job, round, trainer, size),
        (0.0,),
    )


# Declarations ----------------------------------------------------------------------------------------------------------


def _own_declaration(
    request: ProposeRequest, model: ReplicatedModel, declarer: Declarer | None, on_step: OnProgress
) -> Declaration | None:
    if model.spec.resolved_objective.declaration_type is None:
        return None
    if declarer is None or request.declared_out is None:
        raise LocalProtocolError("the objective has declarations, but nobody makes them, or no folder was named for them")
    if request.declared is not None:
        return _derived(request, model, _read_declaration(request.declared, model.spec), declarer, on_step)
    folder = Path(request.declared_out)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    made = declarer.make_declaration(model.parameters, request.job, request.round, request.trainer, folder, on_step)
    return _derived(request, model, made, declarer, on_step)


def _derived(
    request: ProposeRequest | AuditRequest,
    model: ReplicatedModel,
    declaration: Declaration | None,
    declarer: Declarer | None,
    on_step: OnProgress,
) -> Declaration | None:
    """What the steps go by."""
    if declaration is None or declarer is None:
        return declaration
    steered = replace(declaration, steering=model.state.steering)
    return declarer.derive_step_data(model.parameters, request.job, request.round, request.trainer, steered, on_step)


def _read_declaration(declared: DeclarationFiles, spec: JobSpec) -> Declaration | None:
    """Raises `RemoteProtocolError` if it is unsound."""
    record = spec.decode_declaration(declared.encoded)
    return None if record is None else Declaration(record, {digest: Path(file) for digest, file in declared.files.items()})


# What requests name --------------------------------------------------------------------------------------------------


def _own_feedback(request: ProposeRequest, model: ReplicatedModel) -> tuple[Float32Array, bytes | None]:
    """e, and the digest of the buffer that it is of."""
    try:
        e = _feedback(request, model)
    except (LocalProtocolError, RemoteProtocolError, OSError) as error:
        log.warning("%s is not whole (%s): what it left unsaid is lost", request.previous_buffer, error)
        return error_feedback.next_feedback(None, None, None, model.layout), None
    return e, model.records[request.trainer].buffer if request.previous_buffer else None


def _own_inner(request: ProposeRequest, model: ReplicatedModel) -> tuple[InnerState | None, bytes | None]:
    """What the steps begin with, and its digest; None where that is a fresh state."""
    if request.previous_inner is None:
        return None, None
    digest = model.records[request.trainer].inner
    try:
        inner = InnerState.load(Path(request.previous_inner), model.spec)
        if inner.digest() == digest:
            return inner, digest
        problem = "other bytes than the record says"
    except (RemoteProtocolError, OSError) as error:
        problem = str(error)
    log.warning("%s is not whole (%s): the inner optimizer begins anew", request.previous_inner, problem)
    return None, None


def _open(request: ProposeRequest | AuditRequest) -> ReplicatedModel:
    model = ReplicatedModel.open(Path(request.model_directory))
    if (model.job, model.round) != (request.job, request.round):
        raise LocalProtocolError(f"{request.model_directory} holds round {model.round}, round {request.round} was asked for")
    return model


def _feedback(request: ProposeRequest | AuditRequest, model: ReplicatedModel) -> Float32Array:
    """The e that the trainer continues from; zero where the request names no previous buffer. `RemoteProtocolError` as `read`:
    a proposal may be accepted before anybody looks at what it commits to.
    """
    if request.previous_buffer is None:
        return error_feedback.next_feedback(None, None, None, model.layout)
    record = model.records.get(request.trainer)
    if record is None:
        raise LocalProtocolError("a previous buffer was named for a trainer that has had nothing accepted")
    previous = error_feedback.read_buffer(Path(request.previous_buffer), model.spec)
    payload = None if request.previous_payload is None else Path(request.previous_payload).read_bytes()
    return model.feedback_of(request.trainer, previous, payload)
