"""What the model root is over: the blocks of all vectors, and the state that judging the next proposals needs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final

from protocol import codec, merkle
from protocol.codec import Count, Digest, Key, Length
from protocol.limits import MEMBERS_MAX
from training.replicated.feedback import Record
from training.replicated.layout import Block, Float32Array, Layout, float32_bytes
from training.spec import JobSpec

PARAMETERS: Final = "parameters"  # the first vector; those after it are the outer optimizer's slots
NORM_ROUNDS: Final = 16  # rounds that the median is taken over; liars would have to be the majority of more than half of them


@dataclass(frozen=True, slots=True)
class State:
    """Everything of the model but its vectors: the last leaf under the root."""

    job: Digest
    spec: JobSpec
    round: Count
    records: Annotated[dict[Key, Record], Length(0, MEMBERS_MAX)]
    norms: Annotated[tuple[float, ...], Length(0, NORM_ROUNDS)]  # median accepted norm² of the last rounds that accepted any
    powers: Annotated[tuple[float, ...], Length(0, 2)] = ()  # outer AdamW: beta1^t and beta2^t after t steps


def vector_leaves(layout: Layout, vectors: Mapping[str, Float32Array]) -> Iterator[tuple[str, bytes]]:
    """The name and leaf hash of every block, vector by vector in layout order."""
    for name, vector in vectors.items():
        for block in layout.blocks:
            yield leaf_name(name, block), leaf_of(vector[block.elements])


def leaf_name(vector: str, block: Block) -> str:
    """For people."""
    return f"parameter {block.tensor}" if vector == PARAMETERS else f"{vector} of {block.tensor}"


def leaf_of(data: Float32Array | bytes) -> bytes:
    """The Merkle leaf hash of little-endian float32 elements, without a copy of them."""
    leaf = hashlib.sha256(merkle.LEAF_PREFIX)
    leaf.update(data if isinstance(data, bytes) else float32_bytes(data))
    return leaf.digest()


def root_of(leaves: Sequence[bytes], state: State) -> bytes:
    return merkle.root([*leaves, merkle.leaf_hash(codec.encode(state))])
