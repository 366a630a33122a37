"""Computation of a trainer's proposal from its update, and of a verdict by a replay: numpy only.

The worker computes updates with torch. For scratch jobs the daemon itself computes updates, with `known_update`.
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
from training.objectives.objective import Brief, Declaration, RejectionReason
from training.replay.inner_state import RELATIVE_ERROR_MAX, InnerState, OnState, inner_error, relative_error
from training.replicated import codec, error_feedback
from training.replicated.replicated_model import ReplicatedModel
from training.replicated.tensor_layout import Float32Array, layout_of
from training.worker_protocol import AuditReply, AuditRequest, BriefFiles, DeclarationFiles, ProposeReply, ProposeRequest

log = logging.getLogger("peer")
OnProgress = Callable[[], None]  # a function that is called after every piece of work; it raises an exception to stop the work


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
        """Return Δ and the loss of each inner step. `inner` is the first inner state; None: a fresh one.

        `on_state`, if any, receives the state after each step.
        """


class Declarer(Protocol):
    """An object, usually an engine, that makes and checks declarations of an objective."""

    def make_declaration(
        self,
        parameters: Float32Array,
        job: bytes,
        round: int,
        trainer: bytes,
        folder: Path,
        on_step: OnProgress = ...,
        brief: Brief | None = None,
    ) -> Declaration:
        """Return the trainer's declaration of the round. Each of its blobs is a file in `folder`, named by its digest in hex.

        `brief` is that of the round, in a job on request.
        """

    def why_declaration_refused(
        self,
        parameters: Float32Array,
        job: bytes,
        round: int,
        trainer: bytes,
        declaration: Declaration,
        on_step: OnProgress = ...,
    ) -> RejectionReason | None:
        """Return the objective's own reason to reject the declaration; None if it is valid.

        Raises `RemoteProtocolError` for malformed blobs, so that an audit ends with a verdict.
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
        """Return a valid declaration with the data for the steps.

        They follow from the declaration and the round's model, `parameters`.
        """


def make_proposal(
    request: ProposeRequest, update: ComputeUpdate, declarer: Declarer | None = None, on_step: OnProgress = lambda: None
) -> ProposeReply:
    """Compute an update and add the error feedback or the momentum. Write the payload, and the data that the proposal commits to.

    If the trainer's buffer or inner state is damaged, the trainer starts from a fresh one, which is always allowed.
    """
    started = time.perf_counter()
    model = _open(request)
    (e, feedback_from), (inner, inner_from) = _own_feedback(request, model), _own_inner(request, model)
    # `last` gets the inner state after the last step.
    last, place = deque[InnerState](maxlen=1), (request.job, request.round, request.trainer)
    take = (lambda parameters, inner: last.append(inner)) if request.inner_out else None
    declaration = _own_declaration(request, model, declarer, on_step)
    delta, losses = update(model.parameters, *place, inner, take, taken=model.rounds_in_model, declaration=declaration)
    m = error_feedback.accumulate_feedback(e, delta, model.spec.feedback_decay, model.spec.update_weight)
    try:
        buffer, payload = _encoded(m, request.trainer, model)
    # The model diverged. A proposal is made nevertheless, since the round would never close without proposals.
    except LocalProtocolError:
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
    """Return the buffer of `m` (None in a job without buffers) and the payload of `m`.

    Raises `LocalProtocolError` if m has no encoding.
    """
    buffer = error_feedback.make_buffer(m, model.header(trainer), model.spec)
    return buffer, model.encode_payload(trainer, m if buffer is None else buffer.dequantize())


def audit_proposal(
    request: AuditRequest, update: ComputeUpdate, declarer: Declarer | None = None, on_step: OnProgress = lambda: None
) -> AuditReply:
    """Check a proposal's declaration, re-execute its update, and return the verdict on payload, buffer and inner state."""
    started = time.perf_counter()
    verdict, error, loss = _judge(request, _open(request), update, declarer, on_step)
    return AuditReply(verdict, error, time.perf_counter() - started, loss)


def _judge(
    request: AuditRequest, model: ReplicatedModel, update: ComputeUpdate, declarer: Declarer | None, on_step: OnProgress
) -> tuple[Verdict, float, int | None]:
    """Return the verdict, the relative error, and the last inner step's loss in millionths (None: no replay)."""
    spec, last, place = model.spec, deque[InnerState](maxlen=1), (request.job, request.round, request.trainer)
    try:
        buffer, e = error_feedback.read_buffer(Path(request.buffer), spec) if request.buffer else None, _feedback(request, model)
        inner = InnerState.load(Path(request.inner), spec) if request.inner else None
        previous = InnerState.load(Path(request.previous_inner), spec) if request.previous_inner else None
        declaration = _read_declaration(request.declared, spec, request.brief)
        refutation = None
        if declaration is not None:
            if declarer is None:
                raise LocalProtocolError("the objective has declarations, but the engine does not check them")
            refutation = declarer.why_declaration_refused(model.parameters, *place, declaration, on_step)
    except RemoteProtocolError:  # The trainer's buffer, its previous inner state or its declaration is malformed.
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
    """Return the verdict on a proposal, given the re-executed Δ, and the relative error of the proposal."""
    spec, header, held = model.spec, model.header(trainer), model.estimate_vector(trainer)
    of_update = spec.feedback_decay, spec.update_weight
    distance, norm = error_feedback.replay_deviation(payload, buffer, e, delta, header, model.layout, *of_update, held)
    return error_feedback.judge_deviation(distance, norm, spec.replay_tolerance), relative_error(distance, norm)


def known_update(spec: JobSpec) -> ComputeUpdate:
    """Return a function that computes the update of an objective without training, with a loss of 0."""
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
        raise LocalProtocolError(
            "the objective has declarations, but the engine does not make them, or the request names no folder"
        )
    if request.declared is not None:
        declaration = _read_declaration(request.declared, model.spec, request.brief)
        return _derived(request, model, declaration, declarer, on_step)
    folder = Path(request.declared_out)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    place, brief = (request.job, request.round, request.trainer), _brief(request.brief)
    made = declarer.make_declaration(model.parameters, *place, folder, on_step, brief)
    return _derived(request, model, replace(made, brief=brief), declarer, on_step)


def _derived(
    request: ProposeRequest | AuditRequest,
    model: ReplicatedModel,
    declaration: Declaration | None,
    declarer: Declarer | None,
    on_step: OnProgress,
) -> Declaration | None:
    """Return the declaration with the data for the steps, if the objective has declarations."""
    if declaration is None or declarer is None:
        return declaration
    steered = replace(declaration, steering=model.state.steering)
    return declarer.derive_step_data(model.parameters, request.job, request.round, request.trainer, steered, on_step)


def _brief(brief: BriefFiles) -> Brief | None:
    return Brief(brief.encoded, {digest: Path(file) for digest, file in brief.files.items()}) if brief.encoded else None


def _read_declaration(declared: DeclarationFiles, spec: JobSpec, brief: BriefFiles) -> Declaration | None:
    """Return the declaration in these files; None if the objective has no declarations.

    Raises `RemoteProtocolError` if it is invalid.
    """
    record = spec.decode_declaration(declared.encoded)
    files = {digest: Path(file) for digest, file in declared.files.items()}
    return None if record is None else Declaration(record, files, brief=_brief(brief))


# Files that requests name --------------------------------------------------------------------------------------------


def _own_feedback(request: ProposeRequest, model: ReplicatedModel) -> tuple[Float32Array, bytes | None]:
    """Return the trainer's error feedback e, and the digest of the buffer that e is derived from (None: e is zero)."""
    try:
        e = _feedback(request, model)
    except (LocalProtocolError, RemoteProtocolError, OSError) as error:
        log.warning("cannot read the error feedback %s (%s): it restarts at zero", request.previous_buffer, error)
        return error_feedback.next_feedback(None, None, None, model.layout), None
    return e, model.records[request.trainer].buffer if request.previous_buffer else None


def _own_inner(request: ProposeRequest, model: ReplicatedModel) -> tuple[InnerState | None, bytes | None]:
    """Return the inner state from which the trainer's steps start, and its digest. Both results are None for a fresh state."""
    if request.previous_inner is None:
        return None, None
    digest = model.records[request.trainer].inner
    try:
        inner = InnerState.load(Path(request.previous_inner), model.spec)
        if inner.digest() == digest:
            return inner, digest
        problem = "its digest differs from the record"
    except (RemoteProtocolError, OSError) as error:
        problem = str(error)
    log.warning("cannot read the inner state %s (%s): the inner optimizer restarts", request.previous_inner, problem)
    return None, None


def _open(request: ProposeRequest | AuditRequest) -> ReplicatedModel:
    model = ReplicatedModel.open(Path(request.model_directory))
    if (model.job, model.round) != (request.job, request.round):
        raise LocalProtocolError(f"{request.model_directory} holds round {model.round}, but round {request.round} was requested")
    return model


def _feedback(request: ProposeRequest | AuditRequest, model: ReplicatedModel) -> Float32Array:
    """Return the error feedback e that the trainer continues from; zero if the request names no previous buffer.

    Raises `RemoteProtocolError` for a malformed buffer: a proposal may be accepted before anybody reads its buffer.
    """
    if request.previous_buffer is None:
        return error_feedback.next_feedback(None, None, None, model.layout)
    record = model.records.get(request.trainer)
    if record is None:
        raise LocalProtocolError("a previous buffer was given for a trainer without an accepted proposal")
    previous = error_feedback.read_buffer(Path(request.previous_buffer), model.spec)
    payload = None if request.previous_payload is None else Path(request.previous_payload).read_bytes()
    return model.feedback_of(request.trainer, previous, payload)
