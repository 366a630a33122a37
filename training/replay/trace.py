"""The committed states of a round's inner steps: what the replay of a single step starts from, and is compared with. numpy only.

    state 0 --replay 0--> state 1 --replay 1--> … --replay R-1--> state R

A replay is one inner step, or `replayed_steps` of them: then the states between these are neither listed nor kept (decision 72).
State 0 is the round's model with fresh inner state, or with the one that the trainer's last accepted proposal committed to. A
state is two files named by digest: the parameters as little-endian float32, and the inner state. The trace lists the digests of
all of them; its own digest stands in the proposal (decision 31).
"""

from __future__ import annotations

import functools
import math
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np

from protocol import codec
from protocol.codec import Digest, Length
from protocol.digests import Hasher, digest_of, hashed
from protocol.errors import RemoteProtocolError
from storage.parts import write_list
from training.replay.inner_state import InnerState, directions, inner_bytes, slots
from training.replicated import buffers
from training.replicated.layout import BLOCK, Float32Array, float32_bytes, layout_of
from training.spec import LOCAL_STEPS_MAX, JobSpec

RELATIVE_ERROR_MAX = 1e9  # what is reported for anything larger, and for values that are not numbers
STATE_DIGESTS_BYTES_MAX = 69  # of one state in an encoded trace
NOTHING = np.float32(0)
FileOf = Callable[[bytes], Path]  # where the file of a digest is
TrainingState = tuple[Float32Array, InnerState]  # parameters, and the inner optimizer's state beside them


@dataclass(frozen=True, slots=True)
class StateDigests:
    parameters: Digest
    inner: Digest


@dataclass(frozen=True, slots=True)
class Trace:
    states: Annotated[tuple[StateDigests, ...], Length(2, LOCAL_STEPS_MAX + 1)]  # 0 to R

    def encode(self) -> bytes:
        return codec.encode(self)

    @classmethod
    def decode(cls, data: bytes, spec: JobSpec) -> Trace:
        """`RemoteProtocolError` unless it is the canonical trace of as many replays as the job has."""
        trace = codec.decode(cls, data)
        if len(trace.states) != spec.replays + 1:
            raise RemoteProtocolError("bad-trace", f"{len(trace.states)} states around {spec.replays} replays")
        return trace


def trace_bytes_max(spec: JobSpec) -> int:
    return 16 + STATE_DIGESTS_BYTES_MAX * (spec.replays + 1)


def needed(trace: Trace, step: int, spec: JobSpec) -> dict[bytes, int]:
    """The blobs, and their bytes, that whoever replays `step` must have beside the model, the payload and the buffers.

    State 0's parameters are the model's, and a fresh inner state is known; a kept one is the proposal's `inner_from`. The last
    parameters tie the trace to the buffer.
    """
    parameters = {state.parameters: 4 * layout_of(spec).size for state in _read_parameters(trace, step)}
    inner = {state.inner: inner_bytes(spec) for state in trace.states[step : step + 2]}
    inner.pop(fresh_digest(spec), None)
    return {**parameters, **inner}


def reveal_bytes_max(spec: JobSpec) -> int:
    """What one auditor fetches of a proposal: `needed`, the trace, the buffer before, and what its declaration names; where
    the whole round is replayed from the model, both buffers. A job that carries nothing from round to round has no buffers.
    """
    vector = 4 * layout_of(spec).size
    buffer = buffers.size(spec)
    previous = buffer + spec.kind.blob_bytes_max(spec)
    if spec.traces_states:
        return previous + trace_bytes_max(spec) + 3 * vector + 2 * inner_bytes(spec)
    return previous + buffer + 2 * inner_bytes(spec) * spec.keeps_inner_state


def _read_parameters(trace: Trace, step: int) -> Iterable[StateDigests]:
    return (*trace.states[max(1, step) : step + 2], trace.states[-1])


@functools.lru_cache(maxsize=8)
def fresh_digest(spec: JobSpec) -> bytes:
    return inner_digest(InnerState.fresh(spec), spec)


def parameters_digest(parameters: Float32Array, spec: JobSpec) -> bytes:
    return digest_of(float32_bytes(parameters), spec.parts)


def inner_digest(inner: InnerState, spec: JobSpec) -> bytes:
    return hashed(inner.pieces(), spec.parts).digest()


# Writing -------------------------------------------------------------------------------------------------------------


class StateWriter:
    """Takes the states of a round as they come; what the job commits to stands in `folder`, in files named by their digests.

    Who takes the folder over makes it durable, with all else that is sent (decision 35).
    """

    def __init__(self, folder: Path, spec: JobSpec, parameters: Float32Array, inner: bytes | None) -> None:
        """`parameters` are those of the model; `inner` is the digest of the inner state that the round begins with, if kept."""
        self._folder, self._spec = folder, spec
        self._taken = 0
        self._inner: bytes | None = None
        self._states: list[StateDigests] = []
        shutil.rmtree(folder, ignore_errors=True)  # of an attempt that did not end
        folder.mkdir()
        if spec.traces_states:
            self._states.append(StateDigests(parameters_digest(parameters, spec), inner or fresh_digest(spec)))

    def take(self, parameters: Float32Array, inner: InnerState) -> None:
        """The state after one more inner step."""
        self._taken += 1
        if self._taken % self._spec.replayed_steps:
            return
        if self._spec.traces_states:
            self._inner = self._write(inner.pieces())
            self._states.append(StateDigests(self._write([float32_bytes(parameters)]), self._inner))
        elif self._taken == self._spec.local_steps:
            self._inner = self._write(inner.pieces())

    def finish(self) -> tuple[bytes | None, bytes | None]:
        """(digest of the trace, digest of the inner state that is kept), each None if the job has no such thing."""
        trace = self._write([Trace(tuple(self._states)).encode()]) if self._spec.traces_states else None
        return trace, self._inner if self._spec.keeps_inner_state else None

    def _write(self, pieces: Iterable[bytes | memoryview]) -> bytes:
        """Hashed on the way to the file: the pieces are read once while they are in the cache."""
        hasher, part = Hasher(self._spec.parts), self._folder / "part"
        with part.open("wb", buffering=0) as stream:
            for piece in pieces:
                for start in range(0, len(piece), 4 * BLOCK):
                    stretch = piece[start : start + 4 * BLOCK]
                    hasher.update(stretch)
                    stream.write(stretch)
        digest = hasher.digest()
        write_list(part.rename(self._folder / digest.hex()), hasher.parts)
        return digest


# Reading and comparing -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class States:
    """The states of a trace as far as their files are here. Reading one raises `RemoteProtocolError` if its size is wrong."""

    trace: Trace
    spec: JobSpec
    path: FileOf
    start: Float32Array  # the model's parameters, which are state 0's

    def __getitem__(self, number: int) -> TrainingState:
        return self.parameters(number), self.inner(number)

    def parameters(self, number: int) -> Float32Array:
        """Memory-mapped."""
        if number == 0:
            return self.start
        path, size = self.path(self.trace.states[number].parameters), layout_of(self.spec).size
        if path.stat().st_size != 4 * size:
            raise RemoteProtocolError("bad-trace", f"parameters of {path.stat().st_size} bytes, this job's have {4 * size}")
        return np.asarray(np.memmap(path, dtype="<f4", mode="r", shape=(size,)))

    def inner(self, number: int) -> InnerState:
        digest = self.trace.states[number].inner
        return InnerState.fresh(self.spec) if digest == fresh_digest(self.spec) else InnerState.load(self.path(digest), self.spec)


def step_error(before: TrainingState, committed: TrainingState, replayed: TrainingState, spec: JobSpec) -> float:
    """By how much a committed state differs from the replayed one, relative to what the step changed.

    The largest ‖committed − replayed‖ / ‖replayed − before‖ of the parameters, the first moments and the roots of the second
    ones, and ‖committed − replayed‖ / ‖replayed‖ of the directions that the moments give; `RELATIVE_ERROR_MAX` for another count
    of steps and values that are not numbers.
    """
    if committed[1].steps != replayed[1].steps:
        return RELATIVE_ERROR_MAX
    start, theirs, own = (_moments(state[1], spec) for state in (before, committed, replayed))
    parts = [(before[0], committed[0], replayed[0]), *zip(start, theirs, own, strict=True)]
    moved = max(ratio(distance(theirs, own), distance(own, start)) for start, theirs, own in parts)
    return max(moved, _turned(committed[1], replayed[1], spec))


def inner_error(committed: InnerState, replayed: InnerState, spec: JobSpec) -> float:
    """The largest ‖committed − replayed‖ / ‖replayed‖ of the first moments, the roots of the second ones, and the directions."""
    if committed.steps != replayed.steps:
        return RELATIVE_ERROR_MAX
    moments = zip(_moments(committed, spec), _moments(replayed, spec), strict=True)
    apart = max(ratio(distance(theirs, own), distance(own, NOTHING)) for theirs, own in moments)
    return max(apart, _turned(committed, replayed, spec))


def _moments(inner: InnerState, spec: JobSpec) -> list[Float32Array]:
    """Second ones by their roots: they are squares, of which a norm sees only the largest."""
    with np.errstate(all="ignore"):  # a liar's may be negative: their roots are no numbers, and those are far away
        return [np.sqrt(inner.moments[part]) if name == "second" else inner.moments[part] for name, part in slots(spec).items()]


def _turned(committed: InnerState, replayed: InnerState, spec: JobSpec) -> float:
    with np.errstate(all="ignore"):
        theirs, own = directions(committed, spec), directions(replayed, spec)
    return ratio(distance(theirs, own), distance(own, NOTHING))


def bisect(own: States, theirs: States, tolerance: float, until: int) -> tuple[int | None, float]:
    """The first replay of `theirs`, of those to state `until`, that leads away from `own`, found by looking at log2 of their
    states, and the largest deviation among those that were looked at. No step if the states `until` agree.

    `own` is a re-execution from the same state 0. Two states agree while their distance is at most `tolerance` of the way gone
    since state 0 (for a moment: of its norm), so rounding that adds up over all H steps must stay below that: with float32 it is
    about 1e-5, and `replay_tolerance` leaves a hundred times as much. What the found step leads to disagrees, and what it started
    from agrees; only its replay from `theirs` proves a lie.
    """
    largest = 0.0

    def agrees(number: int) -> bool:
        nonlocal largest
        deviation = _deviation(own, theirs, number)
        largest = max(largest, deviation)
        return deviation <= tolerance

    low, high = 0, until
    if agrees(high):
        return None, largest
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if agrees(middle) else (low, middle)
    return low, largest


def _deviation(own: States, theirs: States, number: int) -> float:
    """Of a state of `theirs`, relative; what is no state is far away."""
    try:
        start, mine, other, inner = own.start, own.parameters(number), theirs.parameters(number), theirs.inner(number)
    except RemoteProtocolError:
        return RELATIVE_ERROR_MAX
    return max(ratio(distance(other, mine), distance(mine, start)), inner_error(inner, own.inner(number), own.spec))


def distance(a: Float32Array, b: Float32Array | np.float32) -> float:
    """‖a − b‖ in float64, a block at a time."""
    total = 0.0
    with np.errstate(all="ignore"):  # a liar's values overflow: that is far away
        for start in range(0, len(a), BLOCK):
            part = slice(start, start + BLOCK)
            difference = a[part].astype(np.float64) - (b[part] if isinstance(b, np.ndarray) else b)
            total += float(np.einsum("i,i", difference, difference))  # not `dot`: OpenBLAS would wake threads for it
    return math.sqrt(total) if total >= 0 else math.inf


def ratio(error: float, norm: float) -> float:
    """error / norm, kept finite so that it can be reported; nothing is not far from nothing."""
    if error == 0:
        return 0.0
    relative = error / norm if norm else math.inf
    return min(relative, RELATIVE_ERROR_MAX) if relative == relative else RELATIVE_ERROR_MAX
