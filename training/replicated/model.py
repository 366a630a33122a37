"""The replicated model of a job: parameters, outer momentum and what judging the next proposals needs.

A value: `apply` gives the next round's model and leaves this one as it is. Honest peers that apply the same accepted proposals
get the same root, bit for bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np

from protocol.errors import LocalProtocolError, RemoteProtocolError, StorageError
from protocol.messages import Proposal
from protocol.reasons import Verdict
from training.replicated import aggregate, codec, files, outer
from training.replicated.feedback import HALVINGS_MAX, Record
from training.replicated.init import initial_parameters
from training.replicated.layout import Float32Array, Layout, layout_of
from training.replicated.state import NORM_ROUNDS, State, root_of, tensor_leaves
from training.spec import JobSpec

NORM_RATIO: Final = 16  # of the median accepted norm: honest norms grow sixfold while feedback builds up, attacks use 10^6


@dataclass(frozen=True, slots=True)
class Accepted:
    """A proposal that the vote accepted, with its payload."""

    trainer: bytes
    proposal: Proposal
    payload: bytes


@dataclass(frozen=True, slots=True, eq=False)
class ReplicatedModel:
    state: State
    parameters: Float32Array  # (layout.size,), read-only, perhaps memory-mapped
    momentum: Float32Array  # the same
    leaves: tuple[bytes, ...] = field(repr=False)  # of the tensors, see `tensor_leaves`
    root: bytes

    @classmethod
    def initial(cls, job: bytes, spec: JobSpec) -> ReplicatedModel:
        parameters = initial_parameters(spec)
        return cls.of(State(job, spec, 0, {}, ()), parameters, np.zeros_like(parameters))

    @classmethod
    def of(cls, state: State, parameters: Float32Array, momentum: Float32Array) -> ReplicatedModel:
        """The model of these parts, hashed."""
        leaves = tuple(leaf for _, leaf in tensor_leaves(layout_of(state.spec), parameters, momentum))
        return cls._under_root(state, parameters, momentum, leaves)

    @classmethod
    def _under_root(
        cls, state: State, parameters: Float32Array, momentum: Float32Array, leaves: tuple[bytes, ...]
    ) -> ReplicatedModel:
        parameters.flags.writeable = momentum.flags.writeable = False
        return cls(state, parameters, momentum, leaves, root_of(leaves, state))

    @classmethod
    def open(cls, directory: Path) -> ReplicatedModel:
        """The model that `save` wrote, memory-mapped; `StorageError` if it is damaged. Tensors are hashed only by `verify`."""
        saved, parameters, momentum = files.read(directory)
        return cls(saved.state, parameters, momentum, saved.leaves, saved.root)

    def save(self, directory: Path) -> None:
        """Durable once this returns; at any moment before, `directory` opens as what it was or as this model."""
        files.write(directory, files.Saved(self.state, self.leaves, self.root), self.parameters, self.momentum)

    def verify(self) -> None:
        """Hashes every tensor again; `StorageError` names the first that is not what the root says."""
        expected = iter(self.leaves)
        for name, leaf in tensor_leaves(self.layout, self.parameters, self.momentum):
            if leaf != next(expected):
                raise StorageError(f"{name} of the model does not hash to its model root: restore a snapshot")
        if root_of(self.leaves, self.state) != self.root:
            raise StorageError("the state of the model does not hash to its model root: restore a snapshot")

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
    def records(self) -> Mapping[bytes, Record]:
        return self.state.records

    @property
    def layout(self) -> Layout:
        return layout_of(self.spec)

    def header(self, trainer: bytes) -> codec.Header:
        """What the payload of `trainer` in this round must begin with."""
        return codec.Header.of(self.spec, self.job, self.round, trainer, self.root)

    # Judging ---------------------------------------------------------------------------------------------------------

    def check(self, trainer: bytes, proposal: Proposal, payload: bytes) -> Verdict:
        """The cheap, exact checks, which every voter can make; re-execution comes after them."""
        if (proposal.job, proposal.round, proposal.model_root) != (self.job, self.round, self.root):
            return Verdict.STALE
        if (len(payload), hashlib.sha256(payload).digest()) != (proposal.payload_bytes, proposal.payload):
            return Verdict.MALFORMED
        try:
            update = codec.decode(payload, self.header(trainer), self.layout)
        except RemoteProtocolError:
            return Verdict.MALFORMED
        if update.norm_squared() > self.norm_squared_max:
            return Verdict.NORM
        return Verdict.ACCEPT if self._continues(trainer, proposal) else Verdict.COMMITMENT

    @property
    def norm_squared_max(self) -> float:
        typical = _median(self.state.norms) if self.state.norms else self.spec.norm_start**2
        return NORM_RATIO**2 * typical

    def _continues(self, trainer: bytes, proposal: Proposal) -> bool:
        if proposal.feedback is None:  # starting again from e = 0 is always allowed
            return True
        record = self.records.get(trainer)
        return record is not None and proposal.feedback == record.buffer

    # Applying --------------------------------------------------------------------------------------------------------

    def apply(self, accepted: Sequence[Accepted], rejected: Mapping[bytes, Verdict]) -> ReplicatedModel:
        """The model of the next round, after the vote has accepted these proposals and rejected those trainers'."""
        updates = [self._decode(item) for item in accepted]
        stepped = len(updates) >= self.spec.accepted_min
        state = self._next_state(accepted, rejected, stepped, [update.norm_squared() for update in updates])
        if not stepped:
            return self._under_root(state, self.parameters, self.momentum, self.leaves)
        return self.of(state, *self._step(aggregate.plan(updates, self.spec.liars)))

    def _decode(self, item: Accepted) -> codec.Update:
        if hashlib.sha256(item.payload).digest() != item.proposal.payload:
            raise LocalProtocolError("the payload is not the one that was accepted")
        return codec.decode(item.payload, self.header(item.trainer), self.layout)

    def _step(self, plan: aggregate.Plan) -> tuple[Float32Array, Float32Array]:
        parameters, momentum = np.empty_like(self.parameters), np.empty_like(self.momentum)
        for block in self.layout.blocks:
            part = block.elements
            before = self.parameters[part], self.momentum[part]
            rates = self.spec.outer_rate, self.spec.outer_momentum
            parameters[part], momentum[part] = outer.step(*before, plan.values(block), *rates)
        return parameters, momentum

    def _next_state(
        self, accepted: Sequence[Accepted], rejected: Mapping[bytes, Verdict], stepped: bool, norms: Sequence[float]
    ) -> State:
        records = dict(self.records)
        for trainer, verdict in rejected.items():
            if verdict is Verdict.NORM and trainer in records:
                records[trainer] = _halved(records[trainer])
        for item in accepted:
            if item.trainer in rejected:
                raise LocalProtocolError("a trainer is both accepted and rejected")
            records[item.trainer] = Record(item.proposal.buffer, item.proposal.payload, self.round, stepped, 0)
        return State(self.job, self.spec, self.round + 1, records, _remember(self.state.norms, norms))


def _halved(record: Record) -> Record:
    return replace(record, halvings=min(record.halvings + 1, HALVINGS_MAX))


def _remember(history: tuple[float, ...], norms: Sequence[float]) -> tuple[float, ...]:
    """A round of nothing but zeros says nothing of what is normal, and would make the limit zero for good."""
    typical = _median(norms) if norms else 0.0
    return (*history, typical)[-NORM_ROUNDS:] if typical else history


def _median(values: Sequence[float]) -> float:
    """The upper median: always one of the values, so nothing is rounded, and of two the one that shuts nobody out."""
    return sorted(values)[len(values) // 2]
