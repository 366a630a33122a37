"""From an update to a proposal, and from a proposal to a verdict: numpy only.

The worker computes updates with torch; for scratch jobs the daemon does it all itself, with `known_update`.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from ledger.audits.losses import in_millionths
from protocol import codec as wire
from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.reasons import OWN_FIRST, Finding, Verdict
from storage.parts import write_object
from training.objectives.objective import Declaration, Reason
from training.replay import trace
from training.replay.inner_state import InnerState, OnState
from training.replay.trace import RELATIVE_ERROR_MAX, StateDigests, States, StateWriter, Trace
from training.replicated import buffers, codec, feedback
from training.replicated.layout import Float32Array, layout_of
from training.replicated.model import ReplicatedModel
from training.spec import JobSpec
from training.tasks import Audit, Audited, Propose, Proposed, Reexecute, Reexecuted, Replay, Replayed

log = logging.getLogger("peer")


class Update(Protocol):
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
        declaration: Declaration | None = None,
    ) -> tuple[Float32Array, Sequence[float]]:
        """Δ and the loss of each inner step. `inner` is None for a fresh inner state; `on_state`, if any, is told each state."""


class InnerStep(Protocol):
    def __call__(
        self,
        parameters: Float32Array,
        inner: InnerState,
        job: bytes,
        round: int,
        trainer: bytes,
        step: int,
        /,
        *,
        declaration: Declaration | None = None,
    ) -> tuple[Float32Array, InnerState, float]:
        """The state after the step, and its loss."""


class Declarer(Protocol):
    """What an engine does for objectives that have declarations."""

    def make(self, parameters: Float32Array, job: bytes, round: int, trainer: bytes, folder: Path) -> Declaration: ...

    def refutation(
        self, parameters: Float32Array, job: bytes, round: int, trainer: bytes, declaration: Declaration, step: int | None
    ) -> Reason | None: ...

    def derived(
        self, parameters: Float32Array, job: bytes, round: int, trainer: bytes, declaration: Declaration
    ) -> Declaration: ...


def propose(request: Propose, update: Update, declarer: Declarer | None = None) -> Proposed:
    """Computes the update, adds what earlier payloads left unsaid or its momentum, writes m and the states of the job, and
    encodes it.

    What of the trainer's own is not whole any more is not gone on from: beginning anew is always allowed.
    """
    started = time.perf_counter()
    model = _open(request)
    (e, feedback_from), (inner, inner_from) = _own_feedback(request, model), _own_inner(request, model)
    states = _states_out(request, model, inner_from)
    take = states.take if states else None
    place = request.job, request.round, request.trainer
    declaration = _own_declaration(request, model, declarer)
    delta, losses = update(model.parameters, *place, inner, take, declaration=declaration)
    m = feedback.accumulate(e, delta, model.spec.feedback_decay, model.spec.update_weight)
    buffer = buffers.of(m, model.header(request.trainer), model.spec)
    payload = model.payload(request.trainer, m if buffer is None else buffer.dense())
    payload_digest = write_object(Path(request.payload_out), payload, model.spec.parts)
    committed_to = None if buffer is None else write_object(Path(request.buffer_out), buffer.encode(), model.spec.parts)
    digests = payload_digest, len(payload), committed_to
    committed = states.finish() if states else (None, None)
    seconds, encoded = time.perf_counter() - started, wire.encode(declaration.record) if declaration else b""
    of_replays = tuple(map(in_millionths, losses[model.spec.sealed_step :: model.spec.replayed_steps]))
    return Proposed(*digests, sum(losses) / len(losses), seconds, *committed, feedback_from, inner_from, encoded, of_replays)


def reexecute(request: Reexecute, update: Update, declarer: Declarer | None = None) -> Reexecuted:
    """Somebody else's update, of which only the states are kept; or the first part whose declaration is refuted."""
    model = _open(request)
    try:
        inner, declaration = _previous_inner(request, model.spec), _declaration(request, model.spec)
        number = _refutation(request, model, declaration, declarer, None)
    except RemoteProtocolError:
        return Reexecuted(None)
    if number is not None:
        steps = range(model.spec.local_steps)
        refuted = (step for step in steps if _refutation(request, model, declaration, declarer, step) is not None)
        return Reexecuted(None, next(refuted, 0) // model.spec.replayed_steps)
    record = model.records.get(request.trainer)
    begun = record.inner if record and request.previous_inner else None
    states = StateWriter(Path(request.states_out), model.spec, model.parameters, begun)
    declaration = _derived(request, model, declaration, declarer)
    update(model.parameters, request.job, request.round, request.trainer, inner, states.take, declaration=declaration)
    return Reexecuted(states.finish()[0])


def audit(request: Audit, update: Update, declarer: Declarer | None = None) -> Audited:
    """Checks the declaration, re-executes the update by it, and judges payload, buffer and inner state by the result."""
    started = time.perf_counter()
    verdict, error, loss = _judge(request, _open(request), update, declarer)
    return Audited(verdict, error, time.perf_counter() - started, loss)


def _judge(
    request: Audit, model: ReplicatedModel, update: Update, declarer: Declarer | None
) -> tuple[Verdict, float, int | None]:
    """And the loss that a report on the round seals."""
    spec, trainer, last = model.spec, request.trainer, _Last()
    try:
        buffer, e = buffers.read(Path(request.buffer), spec) if request.buffer else None, _feedback(request, model)
        inner = InnerState.load(Path(request.inner), spec) if request.inner else None
        previous, declaration = _previous_inner(request, spec), _declaration(request, spec)
        number = _refutation(request, model, declaration, declarer, None)
    except RemoteProtocolError:  # what it commits to, goes on from or declares, is none
        return Verdict.REPLAY, RELATIVE_ERROR_MAX, None
    if number is not None:
        return Verdict(OWN_FIRST + number), RELATIVE_ERROR_MAX, None
    payload, declaration = Path(request.payload).read_bytes(), _derived(request, model, declaration, declarer)
    take = last.take if inner else None
    delta, losses = update(model.parameters, request.job, request.round, trainer, previous, take, declaration=declaration)
    verdict, error = compared(model, trainer, delta, payload, e, buffer)
    if inner and last.inner and verdict is Verdict.ACCEPT:
        error = max(error, trace.inner_error(inner, last.inner, spec))
        verdict = Verdict.ACCEPT if error <= spec.replay_tolerance else Verdict.REPLAY
    return verdict, error, in_millionths(losses[spec.sealed_step])


def compared(
    model: ReplicatedModel, trainer: bytes, delta: Float32Array, payload: bytes, e: Float32Array, buffer: codec.Update | None
) -> tuple[Verdict, float]:
    """The verdict on a proposal by the re-executed Δ, and its relative error."""
    spec, header, held = model.spec, model.header(trainer), model.held(trainer)
    of_update = spec.feedback_decay, spec.update_weight
    distance, norm = feedback.deviation(payload, buffer, e, delta, header, model.layout, *of_update, held)
    return feedback.judge(distance, norm, spec.replay_tolerance), trace.ratio(distance, norm)


def known_update(spec: JobSpec) -> Update:
    """Of an objective whose updates take no training."""
    size, kind = layout_of(spec).size, spec.kind
    return lambda parameters, job, round, trainer, inner, on_state, declaration=None: (
        kind.known_update(job, round, trainer, size),
        (0.0,),
    )


# One part of a trace -------------------------------------------------------------------------------------------------


def replay(request: Replay, inner_step: InnerStep, declarer: Declarer | None = None) -> Replayed:
    """Replays inner steps, after the cheap checks that tie the trace to model, buffer and payload.

    All of that together costs these steps and a few passes over the vectors, wherever in the round they are, and whatever
    numbers the states are of: see `training.engines.pytorch.engine.no_subnormal_numbers`.
    """
    started = time.perf_counter()
    model = _open(request)
    try:
        finding, error, loss = _find(request, model, inner_step, declarer)
    except RemoteProtocolError:
        finding, error, loss = Finding.MALFORMED, 0.0, None
    return Replayed(finding, error, time.perf_counter() - started, loss)


def _find(
    request: Replay, model: ReplicatedModel, inner_step: InnerStep, declarer: Declarer | None
) -> tuple[Finding, float, int | None]:
    """And the loss before the first step, where it was replayed."""
    spec, part = model.spec, request.step
    steps = range(part * spec.replayed_steps, (part + 1) * spec.replayed_steps)
    declaration = _declaration(request, spec)
    listed = Trace.decode(Path(request.trace).read_bytes(), spec)
    states = States(listed, spec, lambda digest: Path(request.states[digest]), model.parameters)
    if not _starts(request, model, listed.states[0]):
        return Finding.START, 0.0, None
    if request.inner is not None and listed.states[-1].inner != request.inner:
        return Finding.MALFORMED, 0.0, None
    if not _ends(request, model, states):
        return Finding.PAYLOAD, 0.0, None
    for step in steps:
        number = _refutation(request, model, declaration, declarer, step)
        if number is not None:
            return Finding(OWN_FIRST + number), 0.0, None
    declaration = _derived(request, model, declaration, declarer)
    before, committed = states[part], states[part + 1]
    (parameters, inner), losses = before, list[float]()
    for step in steps:
        place = request.job, request.round, request.trainer, step
        parameters, inner, loss = inner_step(parameters, inner, *place, declaration=declaration)
        losses.append(loss)
    error = trace.step_error(before, committed, (parameters, inner), spec)
    return Finding.MATCH if error <= spec.replay_tolerance else Finding.MISMATCH, error, in_millionths(losses[0])


def _starts(request: Replay, model: ReplicatedModel, first: StateDigests) -> bool:
    """Whether state 0 is the model, with fresh inner state or the one that was committed to before."""
    inner = request.inner_from or trace.fresh_digest(model.spec)
    return first.inner == inner and first.parameters == trace.parameters_digest(model.parameters, model.spec)


def _ends(request: Replay, model: ReplicatedModel, states: States) -> bool:
    """Whether the buffer has the levels of m = decay·e + (θ_0 − θ_H), and the payload says these. The buffer is not fetched."""
    delta, spec, header = model.parameters - states.parameters(model.spec.replays), model.spec, model.header(request.trainer)
    m = feedback.accumulate(_feedback(request, model), delta, spec.feedback_decay, spec.update_weight)
    try:
        buffer = buffers.of(m, header, spec)
    except LocalProtocolError:  # a liar's states may be too far apart for any levels
        return False
    if buffer is not None and feedback.buffer_digest(buffer, spec.parts) != request.buffer:
        return False
    said = feedback.unsaid(m if buffer is None else buffer.dense(), model.held(request.trainer))
    return feedback.encodes(said, Path(request.payload).read_bytes(), header, model.layout)


# Declarations ----------------------------------------------------------------------------------------------------------


def _own_declaration(request: Propose, model: ReplicatedModel, declarer: Declarer | None) -> Declaration | None:
    if model.spec.kind.declaration is None:
        return None
    if declarer is None or request.declared_out is None:
        raise LocalProtocolError("the objective has declarations, but nobody makes them, or no folder was named for them")
    folder = Path(request.declared_out)
    if request.declared is None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        made = declarer.make(model.parameters, request.job, request.round, request.trainer, folder)
    else:
        record = model.spec.declaration(request.declared.encoded)
        made = Declaration(record, {digest: Path(file) for digest, file in request.declared.files.items()})
    return _derived(request, model, made, declarer)


def _derived(
    request: Propose | Reexecute | Audit | Replay,
    model: ReplicatedModel,
    declaration: Declaration | None,
    declarer: Declarer | None,
) -> Declaration | None:
    """What the steps go by."""
    if declaration is None or declarer is None:
        return declaration
    steered = replace(declaration, steering=model.state.steering)
    return declarer.derived(model.parameters, request.job, request.round, request.trainer, steered)


def _declaration(request: Reexecute | Audit | Replay, spec: JobSpec) -> Declaration | None:
    """The trainer's. Raises `RemoteProtocolError` if it is unsound."""
    record, files = spec.declaration(request.declared.encoded), request.declared.files
    return None if record is None else Declaration(record, {digest: Path(file) for digest, file in files.items()})


def _refutation(
    request: Reexecute | Audit | Replay,
    model: ReplicatedModel,
    declaration: Declaration | None,
    declarer: Declarer | None,
    step: int | None,
) -> int | None:
    """The number of the objective's own reason by which the declaration is refused."""
    if declaration is None:
        return None
    if declarer is None:
        raise LocalProtocolError("the objective has declarations, but nobody checks them")
    reason = declarer.refutation(model.parameters, request.job, request.round, request.trainer, declaration, step)
    return None if reason is None else model.spec.kind.reasons.index(reason)


# What requests name --------------------------------------------------------------------------------------------------


class _Last:
    """The inner state after the last step."""

    inner: InnerState | None = None

    def take(self, parameters: Float32Array, inner: InnerState) -> None:
        self.inner = inner


def _own_feedback(request: Propose, model: ReplicatedModel) -> tuple[Float32Array, bytes | None]:
    """e, and the digest of the buffer that it is of."""
    try:
        e = _feedback(request, model)
    except (LocalProtocolError, RemoteProtocolError, OSError) as error:
        log.warning("%s is not whole (%s): what it left unsaid is lost", request.previous_buffer, error)
        return feedback.feedback_after(None, None, None, model.layout), None
    return e, model.records[request.trainer].buffer if request.previous_buffer else None


def _own_inner(request: Propose, model: ReplicatedModel) -> tuple[InnerState | None, bytes | None]:
    """What the steps begin with, and its digest; None where that is a fresh state."""
    if request.previous_inner is None:
        return None, None
    digest = model.records[request.trainer].inner
    try:
        inner = _previous_inner(request, model.spec)
        if inner is not None and trace.inner_digest(inner, model.spec) == digest:
            return inner, digest
        problem = "other bytes than the record says"
    except (RemoteProtocolError, OSError) as error:
        problem = str(error)
    log.warning("%s is not whole (%s): the inner optimizer begins anew", request.previous_inner, problem)
    return None, None


def _open(request: Propose | Reexecute | Audit | Replay) -> ReplicatedModel:
    model = ReplicatedModel.open(Path(request.model_directory))
    if (model.job, model.round) != (request.job, request.round):
        raise LocalProtocolError(f"{request.model_directory} holds round {model.round}, round {request.round} was asked for")
    return model


def _states_out(request: Propose, model: ReplicatedModel, inner_from: bytes | None) -> StateWriter | None:
    spec = model.spec
    if not (spec.traces_states or spec.keeps_inner_state):
        return None
    if request.states_out is None:
        raise LocalProtocolError("the job commits to states, but no folder was named for them")
    return StateWriter(Path(request.states_out), spec, model.parameters, inner_from)


def _previous_inner(request: Propose | Reexecute | Audit, spec: JobSpec) -> InnerState | None:
    return InnerState.load(Path(request.previous_inner), spec) if request.previous_inner else None


def _feedback(request: Propose | Audit | Replay, model: ReplicatedModel) -> Float32Array:
    """The e that the trainer continues from; zero where the request names no previous buffer. `RemoteProtocolError` as `read`:
    a proposal may be accepted before anybody looks at what it commits to.
    """
    if request.previous_buffer is None:
        return feedback.feedback_after(None, None, None, model.layout)
    record = model.records.get(request.trainer)
    if record is None:
        raise LocalProtocolError("a previous buffer was named for a trainer that has had nothing accepted")
    previous = buffers.read(Path(request.previous_buffer), model.spec)
    payload = None if request.previous_payload is None else Path(request.previous_payload).read_bytes()
    return model.carried(request.trainer, previous, payload)
