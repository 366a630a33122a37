"""Small jobs, deterministic buffers and proposals for the tests of `training.replicated`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from protocol.messages import Proposal
from training import random_stream
from training.job_spec import AggregationRule, JobSpec
from training.replicated import aggregate, codec, error_feedback
from training.replicated.replicated_model import AcceptedProposal, ReplicatedModel
from training.replicated.tensor_layout import Float32Array, TensorLayout, layout_from_shapes
from training.transformer import ModelSpec

JOB = bytes(range(32))
RATE = 0.7  # of the outer step, independent of presets: golden hashes depend on it
SMALL = JobSpec(
    name="small", data=bytes(32), model=ModelSpec(vocabulary=70, width=64, layers=1, hidden=96), initial_norm=2.0, outer_rate=RATE
)
# Sizes that are no multiple of 8, so that every chunk has padding.
ODD = JobSpec(name="odd", data=bytes(32), model=ModelSpec(vocabulary=7, width=6, layers=1, heads=3, kv_heads=1, hidden=5))
# One tensor of several chunks with a ragged end, one below a byte, one exactly a chunk.
RAGGED: TensorLayout = layout_from_shapes([("long", (2, 4099)), ("tiny", (3,)), ("whole", (64, 64))])


def trainer(number: int) -> bytes:
    return hashlib.sha256(b"trainer %d" % number).digest()


def header(number: int = 0, bits: int = 1) -> codec.PayloadHeader:
    return codec.PayloadHeader(JOB, 3, trainer(number), b"b" * 32, 15, 8, bits)


def buffer(layout: TensorLayout, *seed: object, deviation: float = 0.01) -> Float32Array:
    """Return a nearly normal buffer made from integers, the same on every machine."""
    return random_stream.irwin_hall_integers(layout.size, *seed).astype(np.float32) * np.float32(
        deviation / random_stream.IRWIN_HALL_DEVIATION
    )


def update(m: Float32Array, layout: TensorLayout, number: int = 0, bits: int = 1) -> codec.QuantizedUpdate:
    expected = header(number, bits)
    return codec.decode_payload(codec.encode_payload(expected, m, layout), expected, layout)


def committed(m: Float32Array, layout: TensorLayout = RAGGED) -> codec.QuantizedUpdate:
    """Return the buffer of `m`."""
    return codec.quantize_vector(header(bits=error_feedback.ESTIMATE_BITS), m, layout)


def proposed(model: ReplicatedModel, key: bytes, m: Float32Array) -> AcceptedProposal:
    """Return an honest proposal that continues the trainer's record."""
    buffer = error_feedback.make_buffer(m, model.header(key), model.spec)
    payload = model.encode_payload(key, m if buffer is None else buffer.dequantize())
    record, committed = model.records.get(key), None if buffer is None else error_feedback.buffer_digest(buffer)
    digests = hashlib.sha256(payload).digest(), len(payload), committed, record.buffer if record else None
    return AcceptedProposal(key, Proposal(model.job, model.round, model.root, *digests), payload)


def round_of(model: ReplicatedModel, trainers: int) -> list[AcceptedProposal]:
    keys = [trainer(number) for number in range(trainers)]
    return [proposed(model, key, buffer(model.layout, model.round, key)) for key in keys]


def aggregate_updates(
    updates: Sequence[codec.QuantizedUpdate], layout: TensorLayout, rule: AggregationRule, liars: int
) -> Float32Array:
    """Return the whole aggregate as one vector."""
    return np.concatenate([*aggregate.plan_aggregation(updates, rule, liars).iter_aggregate(layout.blocks)])
