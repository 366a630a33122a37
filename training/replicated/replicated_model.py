"""The replicated model of a job: parameters, the outer optimizer's slots, and the state that judges the next proposals.

Models are values: `apply_round` returns the next round's model and leaves this one unchanged. Honest peers that apply the same
accepted proposals get the same root, bit for bit.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np

from protocol.blob_digest import blob_digest
from protocol.errors import LocalProtocolError, RemoteProtocolError, StorageError
from protocol.identity import short_id
from protocol.messages import Proposal
from protocol.verdicts import Verdict
from training.job_spec import JobSpec
from training.replicated import (
    aggregate,
    codec,
    error_feedback,
    model_directory,
    model_files,
    outer_optimizer,
)
from training.replicated.error_feedback import HALVINGS_MAX, Allocate, FeedbackRecord, allocate_in_memory, residual_of
from training.replicated.model_directory import (
    ESTIMATES,
    LEAVES_PER_PART,
    NORM_ROUNDS,
    PARAMETERS,
    PIECE_BYTES,
    EncodedEstimate,
    LeafRange,
    ModelState,
    model_leaf_hash,
    model_root,
)
from training.replicated.parallel_map import ParallelMap, serial_map
from training.replicated.tensor_layout import (
    THREAD_BLOCKS,
    ElementRun,
    Float32Array,
    TensorBlock,
    TensorLayout,
    float32_bytes,
    initial_block,
    layout_of,
)

# Most bytes of payloads that stay decoded after their check: the step decodes other payloads again.
CHECKED_BYTES_MAX: Final = 8 << 20
# Most blocks of one outer step, in arrays of 1 MiB: with smaller arrays, threads wait longer for the interpreter.
BLOCKS_PER_STEP: Final = 4
TakeVectorBlock = Callable[[str, ElementRun, Float32Array], object]
# Largest accepted norm as a multiple of the median: honest norms grow sixfold by error feedback, attacks use 10^6.
NORM_RATIO: Final = 16


@dataclass(frozen=True, slots=True)
class AcceptedProposal:
    """A proposal that the vote accepted, with its payload."""

    trainer: bytes
    proposal: Proposal
    payload: bytes


@dataclass(frozen=True, slots=True, eq=False)
class _CheckedPayload:
    """A decoded payload that is canonical and has the header that its trainer must use."""

    digest: bytes
    payload: bytes
    update: codec.QuantizedUpdate  # the update for the aggregation: the payload's update, or the estimate after the payload
    norm_squared: float  # squared norm of the update

    @property
    def bytes(self) -> int:
        return len(self.payload) + (len(self.update.packed) if self.update.bits == error_feedback.ESTIMATE_BITS else 0)


@dataclass(frozen=True, slots=True, eq=False)
class ReplicatedModel:
    state: ModelState
    # Parameters and slots by name, each of shape (layout.size,), read-only, possibly memory-mapped.
    vectors: Mapping[str, Float32Array]
    estimates: Mapping[bytes, EncodedEstimate] = field(repr=False)  # encoded estimates by trainer, if the job has estimates
    leaves: tuple[bytes, ...] = field(repr=False)  # hashes of the leaves, in the order of `leaf_ranges`
    root: bytes
    # Allocator for the estimates that this round's payloads change.
    _room: Allocate = field(default=allocate_in_memory, repr=False)
    # Checked payloads by trainer, which the step uses again.
    _checked: dict[bytes, _CheckedPayload] = field(default_factory=dict, repr=False)

    @classmethod
    def initial(cls, job: bytes, spec: JobSpec, start: ReplicatedModel | None = None) -> ReplicatedModel:
        """Return the model of round 0.

        A tensor is copied from `start` if it has one of the same name and shape, else it follows from the seed.
        """
        layout = layout_of(spec)
        vectors = {name: np.zeros(layout.size, dtype=np.float32) for name in model_directory.vector_names(spec)}
        for block in layout.blocks:
            vectors[PARAMETERS][block.elements] = first_values(spec, start, block)
        return cls.from_vectors(_first_state(job, spec), vectors)

    @classmethod
    def create_from_values(
        cls,
        directory: Path,
        job: bytes,
        spec: JobSpec,
        values: Callable[[TensorBlock], Float32Array],
        each: ParallelMap = serial_map,
    ) -> ReplicatedModel:
        """Create the model of round 0 on disk, and open it. `values` returns the parameters of a block.

        Only one block for each thread is in memory.
        """
        state, layout = _first_state(job, spec), layout_of(spec)

        def write(stretch: Sequence[TensorBlock]) -> list[bytes]:
            leaves = []
            for block in stretch:
                parameters = values(block)
                fresh.write_bytes_at(PARAMETERS, 4 * block.elements.start, parameters)
                leaves.append(model_leaf_hash(parameters))
            return leaves

        with (
            model_files.model_write_errors(directory),
            model_directory.ModelDirectoryWriter(directory, model_directory.part_names(spec)) as fresh,
        ):
            leaves = list(itertools.chain.from_iterable(each(write, layout.stretches)))
            for slot, block in itertools.product(spec.outer_slots, layout.blocks):
                zeros = np.zeros(block.size, dtype=np.float32)
                fresh.write_bytes_at(slot, 4 * block.elements.start, zeros)
                leaves.append(model_leaf_hash(zeros))
            fresh.install_model(model_directory.ModelManifest(state, tuple(leaves), model_root(leaves, state)), durable=True)
        return cls.open(directory)

    @classmethod
    def from_vectors(
        cls, state: ModelState, vectors: Mapping[str, Float32Array], held: Mapping[bytes, EncodedEstimate] = MappingProxyType({})
    ) -> ReplicatedModel:
        """Return the model with this state, these vectors and these estimates, and compute its hashes."""
        assert tuple(vectors) == model_directory.vector_names(state.spec)
        leaves = [
            model_leaf_hash(vector[block.elements]) for vector in vectors.values() for block in layout_of(state.spec).blocks
        ]
        return cls._under_root(state, vectors, held, tuple(leaves))

    @classmethod
    def _under_root(
        cls,
        state: ModelState,
        vectors: Mapping[str, Float32Array],
        held: Mapping[bytes, EncodedEstimate],
        leaves: tuple[bytes, ...],
    ) -> ReplicatedModel:
        """Return the model with these parts, and compute its root. `leaves` are the hashes of the vectors' blocks."""
        assert set(held) == (set(state.records) if state.spec.has_estimates else set())
        for vector in vectors.values():
            vector.flags.writeable = False
        leaves = _with_estimates(leaves, held)
        return cls(state, vectors, held, leaves, model_root(leaves, state))

    @classmethod
    def open(cls, directory: Path) -> ReplicatedModel:
        """Open a model that `save` wrote, as a memory map. It is not hashed (see `verify`).

        Raises `StorageError` if it is damaged.
        """
        saved, vectors, held = model_directory.read_model(directory)
        return cls(
            saved.state,
            vectors,
            held,
            saved.leaves,
            saved.root,
            functools.partial(model_directory.scratch_array, directory.parent),
        )

    @classmethod
    def open_decided(cls, directory: Path, root: bytes, each: ParallelMap = serial_map) -> ReplicatedModel:
        """Open a model and hash all of it. Raises `StorageError` if the result differs from `root`."""
        model = cls.open(directory)
        model.verify(each)
        if model.root != root:
            raise StorageError(f"{directory} holds a model that differs from the decided one: restore a snapshot")
        return model

    def save(self, directory: Path, durable: bool = True) -> None:
        """Replace the model in `directory` by this model, atomically: after a crash, the directory has the old or this model.

        Without `durable`, this is guaranteed only while the machine runs. Raises `StorageError` if the disk is full or fails.
        """
        with (
            model_files.model_write_errors(directory),
            model_directory.ModelDirectoryWriter(directory, model_directory.part_names(self.spec)) as fresh,
        ):
            for name, vector in self.vectors.items():
                fresh.write_bytes_at(name, 0, vector)
            fresh.write_estimates(self.estimates)
            fresh.install_model(model_directory.ModelManifest(self.state, self.leaves, self.root), durable)

    def verify(self, each: ParallelMap = serial_map) -> None:
        """Hash all leaves again. Raises `StorageError`, which names the first tensor or estimate that differs from the root."""
        pieces = self.leaf_ranges

        def hash(part: slice) -> None:
            for piece, leaf in zip(pieces[part], self.leaves[part], strict=True):
                if model_leaf_hash(self.leaf_bytes(piece)) != leaf:
                    raise StorageError(f"{piece.name} of the model does not match the model root: restore a snapshot")

        for _ in each(hash, [slice(start, start + THREAD_BLOCKS) for start in range(0, len(pieces), THREAD_BLOCKS)]):
            pass
        if model_root(self.leaves, self.state) != self.root:
            raise StorageError("the state of the model does not match the model root: restore a snapshot")

    @property
    def leaf_ranges(self) -> tuple[LeafRange, ...]:
        return model_directory.leaf_ranges(self.state)

    def leaf_bytes(self, piece: LeafRange) -> EncodedEstimate:
        if piece.file != ESTIMATES:
            return float32_bytes(self.vectors[piece.file])[piece.bytes]
        number, start = divmod(piece.bytes.start, error_feedback.estimate_bytes(self.layout))
        trainer = sorted(self.estimates)[number]
        return self.estimates[trainer][start : start + piece.bytes.stop - piece.bytes.start]

    def read_part(self, index: int) -> bytes:
        """Return the part of the model with the number `index`. Raises `RemoteProtocolError` if there is no such part.

        Raises `StorageError` if the data on disk differ from the root.
        """
        part = slice(index * LEAVES_PER_PART, (index + 1) * LEAVES_PER_PART)
        chosen = self.leaf_ranges[part]
        if not chosen:
            raise RemoteProtocolError("bad-request", f"the model has no part {index}")
        data = [bytes(self.leaf_bytes(piece)) for piece in chosen]
        for piece, found, leaf in zip(chosen, data, self.leaves[part], strict=True):
            if model_leaf_hash(found) != leaf:
                raise StorageError(f"{piece.name} of the model does not match the model root: restore a snapshot")
        return b"".join(data)

    @property
    def parameters(self) -> Float32Array:
        return self.vectors[PARAMETERS]

    @property
    def job(self) -> bytes:
        return self.state.job

    @property
    def spec(self) -> JobSpec:
        return self.state.spec

    @property
    def round(self) -> int:
        return self.state.round

    @property
    def rounds_in_model(self) -> int:
        return self.state.rounds_in_model

    @property
    def records(self) -> Mapping[bytes, FeedbackRecord]:
        return self.state.records

    @property
    def layout(self) -> TensorLayout:
        return layout_of(self.spec)

    def header(self, trainer: bytes) -> codec.PayloadHeader:
        """Return the header that the payload of `trainer` in this round must have."""
        spec, bits = self.spec, self.spec.payload_bits(self.rounds_in_model)
        return codec.PayloadHeader(self.job, self.round, trainer, self.root, spec.local_steps, spec.batch, bits)

    # Estimates of trainers' momenta ----------------------------------------------------------------------------------

    def estimate(self, trainer: bytes) -> codec.QuantizedUpdate | None:
        """Return the estimate of a trainer's momentum; None for a new trainer. Raises `StorageError` if it is damaged on disk."""
        held = self.estimates.get(trainer)
        try:
            return None if held is None else codec.read_payload(held, self.layout)
        except RemoteProtocolError as error:
            raise StorageError(f"the estimate of {short_id(trainer)} is damaged ({error}): restore a snapshot") from None

    def feedback_of(self, trainer: bytes, buffer: codec.QuantizedUpdate | None, payload: bytes | None) -> Float32Array:
        """Return the error feedback e, or the momentum, that a trainer continues from; zero without a buffer.

        `buffer` and `payload` are those of its last accepted proposal.
        """
        record = None if buffer is None else self.records.get(trainer)
        if self.spec.has_estimates and record is not None and buffer is not None:
            if error_feedback.buffer_digest(buffer) != record.buffer:
                raise LocalProtocolError("the buffer does not match the record")
            return error_feedback.apply_halvings(buffer.dequantize(), record)
        return error_feedback.next_feedback(record, buffer, payload, self.layout)

    def estimate_vector(self, trainer: bytes) -> Float32Array | None:
        """Return a trainer's decoded estimate, to which its payload is relative. None means an estimate of zero."""
        estimate = self.estimate(trainer)
        return None if estimate is None else estimate.dequantize()

    def encode_payload(self, trainer: bytes, m: Float32Array) -> bytes:
        """Return the payload of the vector `m` for `trainer` in this round."""
        return codec.encode_payload(self.header(trainer), residual_of(m, self.estimate_vector(trainer)), self.layout)

    # Checks of proposals ---------------------------------------------------------------------------------------------

    def check_proposal(self, trainer: bytes, proposal: Proposal, payload: bytes) -> Verdict:
        """Return the verdict of the cheap, exact checks that every voter can make. Re-execution comes after these checks."""
        if (proposal.job, proposal.round, proposal.model_root) != (self.job, self.round, self.root):
            return Verdict.STALE
        if (len(payload), blob_digest(payload)) != (proposal.payload_bytes, proposal.payload):
            return Verdict.MALFORMED
        try:
            checked = self._decode(trainer, proposal.payload, payload)
            self.spec.decode_declaration(proposal.declaration)
        except RemoteProtocolError:
            return Verdict.MALFORMED
        except LocalProtocolError:  # The estimate would be too large to be encoded.
            return Verdict.NORM
        if checked.norm_squared > self.norm_squared_max:
            return Verdict.NORM
        if not self._continues(trainer, proposal):
            return Verdict.COMMITMENT
        if sum(other.bytes for other in list(self._checked.values())) + checked.bytes <= CHECKED_BYTES_MAX:
            self._checked[trainer] = checked
        return Verdict.ACCEPT

    def is_too_large(self, trainer: bytes, payload: bytes) -> bool:
        """Return true if `check_proposal` finds the norm of the trainer's own payload too large."""
        try:
            return self._decode(trainer, b"", payload).norm_squared > self.norm_squared_max
        except LocalProtocolError:
            return True

    def _decode(self, trainer: bytes, digest: bytes, payload: bytes) -> _CheckedPayload:
        """Decode a payload. Raises `RemoteProtocolError` if it is malformed.

        Raises `LocalProtocolError` if the estimate after the payload has no encoding.
        """
        update = codec.decode_payload(payload, self.header(trainer), self.layout)
        if self.spec.has_estimates:
            update = error_feedback.update_estimate(self.estimate(trainer), update, self._room)
        return _CheckedPayload(digest, payload, update, update.norm_squared())

    @property
    def norm_squared_max(self) -> float:
        if not self.spec.resolved_objective.limits_norm:
            return math.inf
        norms, start = self.state.median_norms_squared, self._norm_squared_start
        return NORM_RATIO**2 * (_median(norms, start) if norms else start)

    @property
    def _norm_squared_start(self) -> float:
        return self.spec.initial_norm * self.spec.initial_norm

    def _continues(self, trainer: bytes, proposal: Proposal) -> bool:
        """Return true if the proposal's commitments are those that its trainer's record and the job require.

        The proposal must continue from the record or from a fresh state, which is always allowed. It must commit to the data that
        later rounds of the job need. A new trainer is refused if its estimate would be one too many.
        """
        record = self.records.get(trainer)
        if record is None and self.spec.has_estimates and len(self.records) >= self.spec.estimates_max:
            return False
        buffer, inner = (record.buffer, record.inner) if record else (None, None)
        if proposal.feedback not in (None, buffer) or proposal.inner_from not in (None, inner):
            return False
        named = proposal.buffer is not None, proposal.inner is not None
        return named == (self.spec.commits_to_buffer, self.spec.keeps_inner_state)

    # Applying --------------------------------------------------------------------------------------------------------

    def apply_round(
        self,
        accepted: Sequence[AcceptedProposal],
        rejected: Mapping[bytes, Verdict],
        gone: Collection[bytes] = (),
        each: ParallelMap = serial_map,
        brief: bytes = b"",
    ) -> ReplicatedModel:
        """Return the model of the next round, after the vote accepted `accepted` and rejected the proposals of other trainers.

        `gone` are keys that are no longer trainers of the round: their estimates leave the aggregation. `brief` is that of the
        round, in a job on request.
        """
        state, plan, held = self._decide(accepted, rejected, gone, each, brief)
        if plan is None:
            return self._under_root(state, self.vectors, held, self._vector_leaves)
        following = {name: np.empty_like(vector) for name, vector in self.vectors.items()}
        leaves = self._step(
            state, plan, lambda name, block, moved: np.copyto(following[name][block.elements], moved), each, brief
        )
        return self._under_root(state, following, held, leaves)

    def apply_round_into(
        self,
        directory: Path,
        accepted: Sequence[AcceptedProposal],
        rejected: Mapping[bytes, Verdict],
        durable: bool = True,
        gone: Collection[bytes] = (),
        each: ParallelMap = serial_map,
        brief: bytes = b"",
    ) -> ReplicatedModel:
        """Compute the model as `apply_round`, and write it as `save`.

        Only a few blocks for each thread and the changed estimates are in memory.
        """
        state, plan, held = self._decide(accepted, rejected, gone, each, brief)
        if plan is None:
            self._under_root(state, self.vectors, held, self._vector_leaves).save(directory, durable)
            return self.open(directory)
        with (
            model_files.model_write_errors(directory),
            model_directory.ModelDirectoryWriter(directory, model_directory.part_names(self.spec)) as fresh,
        ):
            moved = self._step(
                state, plan, lambda name, block, moved: fresh.write_bytes_at(name, 4 * block.elements.start, moved), each, brief
            )
            fresh.write_estimates(held)
            leaves = _with_estimates(moved, held)
            fresh.install_model(model_directory.ModelManifest(state, leaves, model_root(leaves, state)), durable)
        return self.open(directory)

    def as_first_model(self, job: bytes, spec: JobSpec, *, with_moments: bool) -> ReplicatedModel:
        """Return this model as the first one of another job with the same tensors, with the optimizer's moments or with zeros."""
        state, vectors = _first_state(job, spec), dict(self.vectors)
        if with_moments:
            state = replace(state, beta_powers=self.state.beta_powers)
        else:
            vectors |= {slot: np.zeros_like(vectors[slot]) for slot in spec.outer_slots}
        return self.from_vectors(state, vectors)

    def rolled_back(self, number: int) -> ReplicatedModel:
        """Return this model as the model of the later round `number`.

        Trainers lose their error feedback, which belongs to undone updates. The estimates are those of this model.
        """
        assert number > self.round
        records = dict(self.records) if self.spec.has_estimates else {}
        state = replace(self.state, round=number, records=records)
        return self._under_root(state, self.vectors, self.estimates, self._vector_leaves)

    @property
    def _vector_leaves(self) -> tuple[bytes, ...]:
        return self.leaves[: len(self.vectors) * len(self.layout.blocks)]

    def _decide(
        self,
        accepted: Sequence[AcceptedProposal],
        rejected: Mapping[bytes, Verdict],
        gone: Collection[bytes],
        each: ParallelMap,
        brief: bytes,
    ) -> tuple[ModelState, aggregate.AggregationPlan | None, dict[bytes, EncodedEstimate]]:
        """Return the next model's state, the plan of the aggregation (None: the round takes no step), and the next estimates."""
        checked = dict(zip((item.trainer for item in accepted), each(self._checked_as_accepted, accepted), strict=True))
        if len(checked) < len(accepted):
            raise LocalProtocolError(f"{len(accepted)} accepted proposals, but a trainer has more than one")
        stepped = len(checked) >= self.spec.accepted_min
        norms = [item.norm_squared for item in checked.values()]
        state = self._next_state(accepted, rejected, gone, stepped, norms, brief)
        updates, held = {trainer: item.update for trainer, item in checked.items()}, dict[bytes, EncodedEstimate]()
        if self.spec.has_estimates:  # The rule also aggregates estimates of trainers without a new payload.
            updates = {trainer: updates.get(trainer) or self._stale(trainer) for trainer in state.records}
            held = {key: _encoded(update) if key in checked else self.estimates[key] for key, update in updates.items()}
        plan = (
            aggregate.plan_aggregation(list(updates.values()), self.spec.rule, self.spec.byzantine_max, each) if stepped else None
        )
        return state, plan, held

    def _stale(self, trainer: bytes) -> codec.QuantizedUpdate:
        estimate = self.estimate(trainer)
        assert estimate is not None
        return estimate

    def _checked_as_accepted(self, item: AcceptedProposal) -> _CheckedPayload:
        checked = self._checked.get(item.trainer)
        if checked is not None and (checked.digest, checked.payload) == (item.proposal.payload, item.payload):
            return checked
        digest = blob_digest(item.payload)
        if digest != item.proposal.payload:
            raise LocalProtocolError("the payload differs from the accepted one")
        return self._decode(item.trainer, digest, item.payload)

    def _step(
        self, state: ModelState, plan: aggregate.AggregationPlan, take: TakeVectorBlock, each: ParallelMap, brief: bytes
    ) -> tuple[bytes, ...]:
        """Compute the outer step. Pass each new block of each vector to `take`, which must not keep it.

        Return the hashes of all blocks.
        """
        named = self.spec.resolved_objective.outer_terms(self.spec, brief)
        optimizer = outer_optimizer.make_outer_optimizer(self.spec, self.rounds_in_model, state.beta_powers, named)

        def move(stretch: Sequence[TensorBlock]) -> list[list[bytes]]:
            """Compute the step of a stretch. Return, for each block, the hashes of the new vectors' blocks."""
            leaves, pieces = [], list(_pieces(stretch))
            for piece, gradient in zip(pieces, plan.iter_aggregate(list(map(ElementRun.of_blocks, pieces))), strict=True):
                run = ElementRun.of_blocks(piece)
                moved = {name: np.array(vector[run.elements]) for name, vector in self.vectors.items()}
                parameters, *slots = moved.values()
                optimizer.step(parameters, slots, gradient, piece[0].decayed)
                for name, vector in moved.items():
                    take(name, run, vector)
                for block in piece:
                    start = block.elements.start - run.elements.start
                    leaves.append([model_leaf_hash(vector[start : start + block.size]) for vector in moved.values()])
            return leaves

        by_block = itertools.chain.from_iterable(each(move, self.layout.stretches))
        return tuple(itertools.chain.from_iterable(zip(*by_block, strict=True)))

    def _next_state(
        self,
        accepted: Sequence[AcceptedProposal],
        rejected: Mapping[bytes, Verdict],
        gone: Collection[bytes],
        stepped: bool,
        norms: Sequence[float],
        brief: bytes,
    ) -> ModelState:
        records = dict(self.records)
        for trainer, verdict in rejected.items():
            if verdict is Verdict.NORM and trainer in records:
                records[trainer] = replace(records[trainer], halvings=min(records[trainer].halvings + 1, HALVINGS_MAX))
        for item in accepted:
            if item.trainer in rejected:
                raise LocalProtocolError("a trainer is both accepted and rejected")
            proposal = item.proposal
            records[item.trainer] = FeedbackRecord(proposal.buffer, proposal.payload, self.round, stepped, 0, proposal.inner)
        # Records expire, so that a trainer starts from a fresh state after a suspension: its record is then older than the
        # suspension.
        number = self.round + 1
        records = {key: record for key, record in records.items() if number - record.round <= self.spec.suspension_rounds}
        # Without this removal, a peer that takes a new key in each round would have an estimate in the aggregation for each key.
        if self.spec.has_estimates:
            records = {key: record for key, record in records.items() if key not in gone}
        if self.spec.has_estimates and len(records) > self.spec.estimates_max:
            known = [key for key in records if key in self.records]
            new = sorted(records.keys() - self.records.keys())
            records = {key: records[key] for key in (*known, *new[: self.spec.estimates_max - len(known)])}
        named = self.spec.resolved_objective.outer_terms(self.spec, brief)
        powers = outer_optimizer.next_beta_powers(self.spec, self.state.beta_powers, named) if stepped else self.state.beta_powers
        remembered = _remember(self.state.median_norms_squared, norms, self._norm_squared_start)
        declared = [self.spec.decode_declaration(item.proposal.declaration) for item in accepted]
        steering = self.spec.resolved_objective.next_controller_state(self.spec, self.state.steering, declared)
        return ModelState(self.job, self.spec, number, self.rounds_in_model + 1, records, remembered, powers, steering)


def _pieces(stretch: Sequence[TensorBlock]) -> Iterator[Sequence[TensorBlock]]:
    """Yield groups of at most `BLOCKS_PER_STEP` consecutive blocks. Weight decay applies to all blocks of a group, or to none."""
    for _, same in itertools.groupby(stretch, key=lambda block: block.decayed):
        blocks = list(same)
        yield from (blocks[start : start + BLOCKS_PER_STEP] for start in range(0, len(blocks), BLOCKS_PER_STEP))


def _first_state(job: bytes, spec: JobSpec) -> ModelState:
    return ModelState(job, spec, 0, 0, {}, (), outer_optimizer.initial_beta_powers(spec))


def first_values(spec: JobSpec, start: ReplicatedModel | None, block: TensorBlock) -> Float32Array:
    """Return the initial parameters of a block, as in `ReplicatedModel.initial`."""
    if start is not None:
        tensor, known = layout_of(spec).slots_by_name[block.tensor], start.layout.slots_by_name.get(block.tensor)
        if known is not None and known.shape == tensor.shape:
            first = known.offset + block.elements.start - tensor.offset
            return start.parameters[first : first + block.size]
    return initial_block(spec, block)


def _encoded(estimate: codec.QuantizedUpdate) -> EncodedEstimate:
    assert estimate.encoded is not None  # `error_feedback.update_estimate` has set it.
    return estimate.encoded.data


def _with_estimates(leaves: tuple[bytes, ...], held: Mapping[bytes, EncodedEstimate]) -> tuple[bytes, ...]:
    """Return the hashes of all leaves: first of the vectors, then of the estimates."""
    pieces = (
        held[trainer][at : at + PIECE_BYTES] for trainer in sorted(held) for at in range(0, len(held[trainer]), PIECE_BYTES)
    )
    return (*leaves, *map(model_leaf_hash, pieces))


def _remember(history: tuple[float, ...], norms: Sequence[float], start: float) -> tuple[float, ...]:
    """Return `history` with the median norm of one more round.

    A round of zeros is ignored, since it would make the limit zero forever.
    """
    typical = _median(norms, start) if norms else 0.0
    return (*history, typical)[-NORM_ROUNDS:] if typical else history


def _median(values: Sequence[float], start: float) -> float:
    """Return the median.

    For an even number of values it is the second of the three sorted numbers `start` and the two middle values. With the lower
    middle value, half of the values could exclude the other half. With the upper one, half of the values could raise the limit
    without end.
    """
    ordered = sorted(values)
    lower, upper = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    return max(lower, min(upper, start))
