"""What the model root is over: the tensors' blocks, and the state that judging the next proposals needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Final

from protocol import codec, merkle
from protocol.codec import Count, Digest, Key, Length
from protocol.limits import MEMBERS_MAX
from training.replicated.feedback import Record
from training.replicated.layout import Block, Float32Array, Layout
from training.spec import JobSpec

NORM_ROUNDS: Final = 16  # rounds that the median is taken over; liars would have to be the majority in half of them


@dataclass(frozen=True, slots=True)
class State:
    """Everything of the model but its tensors: the last leaf under the root."""

    job: Digest
    spec: JobSpec
    round: Count
    records: Annotated[dict[Key, Record], Length(0, MEMBERS_MAX)]
    norms: Annotated[tuple[float, ...], Length(0, NORM_ROUNDS)]  # median accepted norm² of the last rounds that accepted any


def tensor_leaves(layout: Layout, parameters: Float32Array, momentum: Float32Array) -> Iterator[tuple[str, bytes]]:
    """The name and leaf hash of every block: of the parameters, then of the momentum, in layout order."""
    for kind, vector in (("parameter", parameters), ("momentum of", momentum)):
        for block in layout.blocks:
            yield f"{kind} {block.tensor}", block_leaf(vector, block)


def block_leaf(vector: Float32Array, block: Block) -> bytes:
    return leaf_of(vector[block.elements].astype("<f4", copy=False).tobytes())


def leaf_of(data: bytes) -> bytes:
    return merkle.leaf_hash(data)


def root_of(leaves: Sequence[bytes], state: State) -> bytes:
    return merkle.root([*leaves, merkle.leaf_hash(codec.encode(state))])
