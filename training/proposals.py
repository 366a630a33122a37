"""From an update to a proposal, and from a proposal to a verdict: numpy only.

The worker computes updates with torch; for scratch jobs the daemon does it all itself, with `scratch_update`.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ledger import durable
from protocol.errors import LocalProtocolError
from protocol.reasons import Verdict
from training.replicated import codec, feedback
from training.replicated.layout import Float32Array, layout_of
from training.replicated.model import ReplicatedModel
from training.replicated.scratch import known_update
from training.spec import JobSpec
from training.tasks import Audit, Audited, Propose, Proposed

RELATIVE_ERROR_MAX = 1e9  # what is reported for anything larger, and for values that are not numbers

Update = Callable[[Float32Array, bytes, int, bytes], tuple[Float32Array, float]]
"""(parameters, job, round, trainer) → (Δ, mean training loss)"""


def propose(request: Propose, update: Update) -> Proposed:
    """Computes the update, adds what earlier payloads left unsaid, writes m, and encodes it."""
    started = time.perf_counter()
    model = _open(request)
    e = _feedback(request, model)
    delta, loss = update(np.array(model.parameters), request.job, request.round, request.trainer)
    m = feedback.accumulate(e, delta, model.spec.feedback_decay)
    payload = codec.encode(model.header(request.trainer), m, model.layout)
    with durable.writing(Path(request.buffer_out)) as stream:
        stream.write(np.ascontiguousarray(m, dtype="<f4").tobytes())
    digest = hashlib.sha256(payload).digest()
    return Proposed(payload, digest, feedback.buffer_digest(m), loss, time.perf_counter() - started)


def audit(request: Audit, update: Update) -> Audited:
    """Re-executes the update and judges the proposal's payload and buffer by it."""
    started = time.perf_counter()
    model = _open(request)
    committed, payload = Path(request.buffer).read_bytes(), Path(request.payload).read_bytes()
    if len(committed) != 4 * model.layout.size:
        return Audited(Verdict.REPLAY, RELATIVE_ERROR_MAX, time.perf_counter() - started)
    m, e = _float32(committed), _feedback(request, model)
    delta, _ = update(np.array(model.parameters), request.job, request.round, request.trainer)
    decay = model.spec.feedback_decay
    verdict = feedback.judge_replay(m, e, delta, payload, model.header(request.trainer), model.layout, decay)
    error = relative_error(m, feedback.accumulate(e, delta, decay), delta)
    return Audited(verdict, error, time.perf_counter() - started)


def scratch_update(spec: JobSpec) -> Update:
    layout = layout_of(spec)
    return lambda parameters, job, round, trainer: (known_update(job, round, trainer, layout), 0.0)


def relative_error(m: Float32Array, expected: Float32Array, delta: Float32Array) -> float:
    """‖m − expected‖ / ‖Δ‖ in float64, kept finite so that it can be reported."""
    with np.errstate(all="ignore"):
        error = float(np.linalg.norm(m.astype(np.float64) - expected))
        norm = float(np.linalg.norm(delta.astype(np.float64)))
    ratio = error / norm if norm else math.inf
    return min(ratio, RELATIVE_ERROR_MAX) if ratio == ratio else RELATIVE_ERROR_MAX


def _open(request: Propose | Audit) -> ReplicatedModel:
    model = ReplicatedModel.open(Path(request.model_directory))
    if (model.job, model.round) != (request.job, request.round):
        raise LocalProtocolError(f"{request.model_directory} holds round {model.round}, round {request.round} was asked for")
    return model


def _feedback(request: Propose | Audit, model: ReplicatedModel) -> Float32Array:
    """The e that the trainer continues from; zero where the request names no previous buffer."""
    if request.previous_buffer is None or request.previous_payload is None:
        return feedback.feedback_after(None, None, None, model.layout)
    record = model.records.get(request.trainer)
    if record is None:
        raise LocalProtocolError("a previous buffer was named for a trainer that has had nothing accepted")
    previous = _float32(Path(request.previous_buffer).read_bytes())
    return feedback.feedback_after(record, previous, Path(request.previous_payload).read_bytes(), model.layout)


def _float32(data: bytes) -> Float32Array:
    return np.frombuffer(data, dtype="<f4").astype(np.float32, copy=False)
