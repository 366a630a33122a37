"""The results that clients read as protobuf: those of requests for gradients, and samples.

The messages are those of the SDK `tinker` 0.38.0. The SDK 0.25.0 knows each of the fields that are written here.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from clients.wire.tensors import encode_batch
from clients.wire.wire_format import EntryField, encode_bytes, encode_double, encode_entry, encode_varint

OUTPUT_TYPE: Final = "ArrayRecord"  # The SDK's name of a result whose outputs are arrays.


class GradientResultField(enum.IntEnum):
    LOSS_FN_OUTPUT_TYPE = 1
    LOSS_FN_OUTPUTS = 2  # records
    METRICS = 3  # map from names to doubles


class RecordField(enum.IntEnum):
    FIELDS = 2  # map from names to batched tensors
    NUM_DATUMS = 3


class SamplesField(enum.IntEnum):
    SEQUENCES = 1
    PROMPT_LOGPROBS = 2


class SequenceField(enum.IntEnum):
    STOP_REASON = 1
    TOKENS = 2
    LOGPROBS = 3


class StopReason(enum.IntEnum):
    """The event that ended a sample."""

    STOP = 0  # a stop token or a stop text
    LENGTH = 1  # the largest number of tokens


@dataclass(frozen=True, slots=True)
class SampledSequence:
    tokens: Sequence[int]
    logprobs: Sequence[float]  # log-probability of each token
    stop_reason: StopReason


def encode_gradient_result(outputs: Mapping[str, Sequence[npt.NDArray[np.float32]]], metrics: Mapping[str, float]) -> bytes:
    """Encode the result of a request for a gradient.

    Each output, such as `logprobs`, has a vector for each example. The name of a metric ends with the operation by which clients
    combine the results of several requests, as in `loss:sum`.
    """
    (examples,) = {len(vectors) for vectors in outputs.values()}
    assert all(name.count(":") == 1 for name in metrics), "the SDK divides the name of a metric at its colon"
    record = [
        encode_entry(RecordField.FIELDS, name, encode_bytes(EntryField.VALUE, encode_batch(outputs[name])))
        for name in sorted(outputs)
    ]
    record.append(encode_varint(RecordField.NUM_DATUMS, examples))
    message = [
        encode_bytes(GradientResultField.LOSS_FN_OUTPUT_TYPE, OUTPUT_TYPE.encode()),
        encode_bytes(GradientResultField.LOSS_FN_OUTPUTS, b"".join(record)),
    ]
    for name in sorted(metrics):
        message.append(encode_entry(GradientResultField.METRICS, name, encode_double(EntryField.VALUE, metrics[name])))
    return b"".join(message)


def encode_samples(sequences: Sequence[SampledSequence], prompt_logprobs: Sequence[float | None] | None) -> bytes:
    """Encode the samples of a prompt, and the log-probabilities of its tokens if the client asked for them.

    A log-probability of the prompt is None if it has none, as that of the first token.
    """
    message = [encode_bytes(SamplesField.SEQUENCES, _encode_sequence(sequence)) for sequence in sequences]
    if prompt_logprobs is not None:
        numbers = [math.nan if value is None else value for value in prompt_logprobs]
        message.append(encode_bytes(SamplesField.PROMPT_LOGPROBS, np.asarray(numbers, dtype="<f4").tobytes()))
    return b"".join(message)


def _encode_sequence(sequence: SampledSequence) -> bytes:
    assert len(sequence.tokens) == len(sequence.logprobs)
    return (
        encode_varint(SequenceField.STOP_REASON, sequence.stop_reason)
        + encode_bytes(SequenceField.TOKENS, np.asarray(sequence.tokens, dtype="<i4").tobytes())
        + encode_bytes(SequenceField.LOGPROBS, np.asarray(sequence.logprobs, dtype="<f4").tobytes())
    )
