"""What the model root is over: the blocks of all vectors, and the state that judging the next proposals needs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import numpy as np

from protocol import codec, merkle
from protocol.codec import Count, Digest, Key, Length
from protocol.identity import short_id
from protocol.limits import MEMBERS_MAX
from training.job_spec import JobSpec
from training.objectives.objective import STEERING_BYTES_MAX
from training.replicated import momentum_estimates
from training.replicated.error_feedback import FeedbackRecord
from training.replicated.tensor_layout import BLOCK, Float32Array, TensorLayout, float32_bytes

PARAMETERS: Final = "parameters"  # the first vector; those after it are the outer optimizer's slots
ESTIMATES: Final = "estimates"  # of all trainers that have a record, one after another in ascending order of their keys
PIECE_BYTES: Final = 4 * BLOCK  # of an estimate, and at most of a vector
NORM_ROUNDS: Final = 16  # rounds that the median is taken over; liars would have to be the majority of more than half of them


EncodedEstimate = bytes | memoryview  # an estimate, in memory or mapped


@dataclass(frozen=True, slots=True)
class ModelState:
    """Everything of the model but its vectors: the last leaf under the root."""

    job: Digest
    spec: JobSpec
    round: Count
    rounds_in_model: Count  # rounds of the model's own line: without those that a rollback undid
    records: Annotated[dict[Key, FeedbackRecord], Length(0, MEMBERS_MAX)]
    # median accepted norm² of the last rounds that accepted any
    median_norms_squared: Annotated[tuple[float, ...], Length(0, NORM_ROUNDS)]
    beta_powers: Annotated[tuple[float, ...], Length(0, 2)] = ()  # outer AdamW: beta1^t and beta2^t after t steps
    steering: Annotated[bytes, Length(0, STEERING_BYTES_MAX)] = b""  # `Objective.steering`


@dataclass(frozen=True, slots=True)
class LeafRange:
    """Bytes of one of a model's files that are one leaf: a block of a vector, or a part of a trainer's estimate."""

    file: str
    bytes: slice
    name: str  # for people


def iter_leaf_ranges(layout: TensorLayout, vectors: Iterable[str], trainers: Iterable[bytes]) -> Iterator[LeafRange]:
    """All of a model, in the order of its leaves; `trainers` are those that have estimates, in ascending order."""
    for vector in vectors:
        for block in layout.blocks:
            name = f"parameter {block.tensor}" if vector == PARAMETERS else f"{vector} of {block.tensor}"
            yield LeafRange(vector, slice(4 * block.elements.start, 4 * block.elements.stop), name)
    for number, trainer in enumerate(trainers):
        start, end = (at * momentum_estimates.estimate_bytes(layout) for at in (number, number + 1))
        for at in range(start, end, PIECE_BYTES):
            yield LeafRange(ESTIMATES, slice(at, min(at + PIECE_BYTES, end)), f"the estimate of {short_id(trainer)}")


def model_leaf_hash(data: Float32Array | EncodedEstimate) -> bytes:
    """The Merkle leaf hash of bytes, or of little-endian float32 elements, without a copy of them."""
    leaf = hashlib.sha256(merkle.LEAF_PREFIX)
    leaf.update(float32_bytes(data) if isinstance(data, np.ndarray) else data)
    return leaf.digest()


def model_root(leaves: Sequence[bytes], state: ModelState) -> bytes:
    return merkle.merkle_root([*leaves, merkle.leaf_hash(codec.encode(state))])
