"""The request for a gradient: the body of `POST forward_backward`, in protobuf.

The messages are those of the SDK `tinker` 0.38.0. The SDK 0.25.0 sends the same ones without `LOSS_FN_CONFIG_V2`. A fault in a
body is the failure of the request's future, as all faults of clients are. So the decoder returns the model and the number of a
request with an invalid body, and the reason.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from clients.records import (
    CONFIG_MAX,
    EXAMPLE_TOKENS_MAX,
    EXAMPLES_MAX,
    LOSS_DEFAULTS,
    RATIO_MASK,
    TOKEN_BYTES,
    ClientLoss,
    Example,
    RequestBody,
)
from clients.wire.tensors import read_vector
from clients.wire.wire_format import (
    BYTES_FIELD,
    FIXED64_FIELD,
    VARINT_FIELD,
    FieldReader,
    FieldTypes,
    read_double,
    read_text,
)
from protocol.errors import RemoteProtocolError
from protocol.limits import NAME_CHARACTERS_MAX

SEQ_ID_MAX: Final = (1 << 31) - 1  # The field is an int32.
TOKEN_MAX: Final = (1 << 8 * TOKEN_BYTES) - 1
TARGETS: Final = "target_tokens"  # input with the tokens that the model has to predict
ADVANTAGES: Final = "advantages"
WEIGHTS: Final = "weights"  # optional input of `cross_entropy`


class GradientField(enum.IntEnum):
    MODEL_ID = 1
    SEQ_ID = 2
    DATA = 3  # examples
    LOSS_FN = 4
    LOSS_FN_CONFIG = 5  # map from names to doubles
    FORWARD_ONLY = 6
    LOSS_FN_CONFIG_V2 = 7  # map from names to settings


class SettingField(enum.IntEnum):
    NUMBER = 1
    TEXT = 2


class ExampleField(enum.IntEnum):
    MODEL_INPUT = 1  # chunks
    LOSS_FN_INPUTS = 2  # map from names to tensors


class ChunkField(enum.IntEnum):
    ENCODED_TEXT = 1
    IMAGE = 2
    DMEL = 3  # audio


class EncodedTextField(enum.IntEnum):
    TOKENS = 1


HEAD_TYPES: Final[FieldTypes] = {
    GradientField.MODEL_ID: BYTES_FIELD,
    GradientField.SEQ_ID: VARINT_FIELD,
    GradientField.FORWARD_ONLY: VARINT_FIELD,
}
CONTENT_TYPES: Final[FieldTypes] = dict.fromkeys(
    (GradientField.DATA, GradientField.LOSS_FN, GradientField.LOSS_FN_CONFIG, GradientField.LOSS_FN_CONFIG_V2), BYTES_FIELD
)
SETTING_TYPES: Final[FieldTypes] = {SettingField.NUMBER: FIXED64_FIELD, SettingField.TEXT: BYTES_FIELD}
EXAMPLE_TYPES: Final[FieldTypes] = dict.fromkeys(ExampleField, BYTES_FIELD)
CHUNK_TYPES: Final[FieldTypes] = dict.fromkeys(ChunkField, BYTES_FIELD)
ENCODED_TEXT_TYPES: Final[FieldTypes] = {EncodedTextField.TOKENS: BYTES_FIELD}


@dataclass(frozen=True, slots=True)
class GradientRequest:
    """A request for a gradient, or for the losses alone. It has either a body or a problem."""

    model_id: str
    seq_id: int  # number of the request among those of its model, from 1
    forward_only: bool  # True if the request adds nothing to the gradient of the next step
    body: RequestBody | None
    problem: str | None  # reason for which the request fails


def decode_gradient_request(data: bytes) -> GradientRequest:
    """Decode the body of a request. The caller checks a valid body with `RequestBody.problem` against its model.

    Raises `RemoteProtocolError` if the request does not name its model and its number.
    """
    message = memoryview(data)
    request = _read_head(message)
    if request.problem:
        return request
    try:
        return replace(request, body=_read_content(FieldReader(), message))
    except RemoteProtocolError as error:
        return replace(request, problem=error.detail)


def _read_head(message: memoryview) -> GradientRequest:
    """Return the request without its body. It has a problem if a field of the outermost message is malformed."""
    model_id, seq_id, forward_only, problem = "", 0, False, None
    try:
        for field in FieldReader().read_fields(message, HEAD_TYPES):
            match field.number:
                case GradientField.MODEL_ID:
                    model_id = read_text(field.data)
                case GradientField.SEQ_ID:
                    seq_id = field.integer
                case GradientField.FORWARD_ONLY:
                    forward_only = bool(field.integer)
    except RemoteProtocolError as error:
        problem = error.detail
    if not model_id or not 1 <= seq_id <= SEQ_ID_MAX:
        needed = f"model_id is {model_id!r} and seq_id is {seq_id}: a model and a number in 1..{SEQ_ID_MAX} are needed"
        raise RemoteProtocolError("malformed", problem or needed)
    return GradientRequest(model_id, seq_id, forward_only, None, problem)


def _read_content(reader: FieldReader, message: memoryview) -> RequestBody:
    loss, examples = "", list[Example]()
    config, config_v2 = dict[str, float](), dict[str, float]()
    for field in reader.read_fields(message, CONTENT_TYPES):
        match field.number:
            case GradientField.DATA:
                if len(examples) == EXAMPLES_MAX:
                    raise RemoteProtocolError("oversized", f"the request has more than {EXAMPLES_MAX} examples")
                try:
                    examples.append(_read_example(reader, field.data))
                except RemoteProtocolError as error:
                    raise RemoteProtocolError(error.reason, f"example {len(examples)}: {error.detail}") from None
            case GradientField.LOSS_FN:
                loss = read_text(field.data)
            case GradientField.LOSS_FN_CONFIG:
                name, number = reader.read_number_entry(field.data)
                config[_require_name(name)] = number
            case GradientField.LOSS_FN_CONFIG_V2:
                name, setting = reader.read_message_entry(field.data)
                config_v2[_require_name(name)] = _read_setting(reader, name, setting)
        if max(len(config), len(config_v2)) > CONFIG_MAX:
            raise RemoteProtocolError("oversized", f"the loss has more than {CONFIG_MAX} settings")
    if loss not in list(ClientLoss):
        raise RemoteProtocolError("unsupported", f"unknown loss {loss!r}: the losses are {', '.join(ClientLoss)}")
    if not examples:
        raise RemoteProtocolError("malformed", "the request has no examples")
    if loss == ClientLoss.CROSS_ENTROPY:
        examples = [_with_weights(example) for example in examples]
    elif loss == ClientLoss.GSPO:
        examples = [_with_ratio_mask(example) for example in examples]
    # Clients send numbers in both maps, for the sake of older servers.
    return RequestBody(ClientLoss(loss), _changed_settings(ClientLoss(loss), config | config_v2), tuple(examples))


def _with_weights(example: Example) -> Example:
    """Return the example with the weight 1 for each target, if it has no weights: the SDK documents them as optional."""
    ones = np.ones(example.length, dtype="<f4").tobytes()
    return replace(example, inputs={WEIGHTS: ones} | example.inputs)


def _with_ratio_mask(example: Example) -> Example:
    """Return the example with a mask of the tokens that have an advantage, if it has no mask."""
    if ADVANTAGES not in example.inputs:
        return example
    advantages = np.frombuffer(example.inputs[ADVANTAGES], dtype="<f4")
    mask = (advantages != 0).astype("<f4").tobytes()
    return replace(example, inputs={RATIO_MASK: mask} | example.inputs)


def _changed_settings(loss: ClientLoss, config: dict[str, float]) -> dict[str, float]:
    """Return the settings that differ from the loss's default values."""
    for name, value in config.items():
        if not math.isfinite(value):
            raise RemoteProtocolError("malformed", f"setting {name!r} is {value}")
    return {name: value for name, value in config.items() if value != LOSS_DEFAULTS[loss].get(name)}


def _read_setting(reader: FieldReader, name: str, message: memoryview) -> float:
    value: float | str | None = None
    for field in reader.read_fields(message, SETTING_TYPES):  # The last of them counts.
        value = read_text(field.data) if field.number == SettingField.TEXT else read_double(field.data)
    if isinstance(value, str):
        raise RemoteProtocolError("unsupported", f"setting {name!r} is the text {value!r}: settings are numbers")
    if value is None:
        raise RemoteProtocolError("malformed", f"setting {name!r} has no value")
    return value


def _read_example(reader: FieldReader, message: memoryview) -> Example:
    tokens, chunks, inputs = bytearray(), 0, dict[str, bytes]()
    for field in reader.read_fields(message, EXAMPLE_TYPES):
        if field.number == ExampleField.MODEL_INPUT:
            tokens += _read_chunk(reader, chunks, field.data)
            chunks += 1
            continue
        name, tensor = reader.read_message_entry(field.data)
        _require_name(name)
        try:
            vector = read_vector(reader, tensor)
        except RemoteProtocolError as error:
            raise RemoteProtocolError(error.reason, f"input {name!r}: {error.detail}") from None
        if not (vector.size or name == TARGETS) or vector.size > EXAMPLE_TOKENS_MAX:
            raise RemoteProtocolError(
                "oversized", f"input {name!r} has {vector.size} numbers, expected 1 to {EXAMPLE_TOKENS_MAX}"
            )
        if name != TARGETS:
            inputs[name] = vector.astype("<f4").tobytes()
        elif vector.dtype.kind != "i":
            raise RemoteProtocolError("unsupported", f"input {TARGETS!r}: the tensor has the data type float32: tokens are int64")
        else:
            inputs[name] = _encode_tokens(f"input {TARGETS!r}", vector)
        if len(inputs) > CONFIG_MAX:
            raise RemoteProtocolError("oversized", f"the loss has more than {CONFIG_MAX} inputs")
    targets = inputs.pop(TARGETS, None)
    if targets is None:
        raise RemoteProtocolError("malformed", f"the input {TARGETS!r} is missing")
    count = len(tokens) // TOKEN_BYTES
    if not tokens or not targets or count > EXAMPLE_TOKENS_MAX:
        raise RemoteProtocolError("malformed", f"{count} tokens and {len(targets) // TOKEN_BYTES} targets")
    return Example(bytes(tokens), targets, inputs)


def _require_name(name: str) -> str:
    """Return the name of a setting or an input. Raises `RemoteProtocolError` if it is empty or too long."""
    if not 0 < len(name) <= NAME_CHARACTERS_MAX:
        raise RemoteProtocolError(
            "oversized", f"the name {name[:32]!r} has {len(name)} characters, not 1 to {NAME_CHARACTERS_MAX}"
        )
    return name


def _read_chunk(reader: FieldReader, place: int, message: memoryview) -> bytes:
    """Return the tokens of a chunk of encoded text."""
    tokens: memoryview | None = None
    for field in reader.read_fields(message, CHUNK_TYPES):
        if field.number != ChunkField.ENCODED_TEXT:
            kind = ChunkField(field.number).name.lower()
            raise RemoteProtocolError("unsupported", f"chunk {place} is of the kind {kind!r}: models read encoded text alone")
        tokens = memoryview(b"") if tokens is None else tokens
        for part in reader.read_fields(field.data, ENCODED_TEXT_TYPES):
            tokens = part.data
    if tokens is None:
        raise RemoteProtocolError("malformed", f"chunk {place} has no content")
    if len(tokens) % 4:
        raise RemoteProtocolError("malformed", f"chunk {place}: the tokens have {len(tokens)} bytes, not a multiple of 4")
    return _encode_tokens(f"chunk {place}", np.frombuffer(tokens, dtype="<i4"))


def _encode_tokens(name: str, tokens: npt.NDArray[Any]) -> bytes:
    """Return token ids as in an `Example`. Raises `RemoteProtocolError` for numbers that no vocabulary has."""
    if wrong := tokens[(tokens < 0) | (tokens > TOKEN_MAX)][:1].tolist():
        raise RemoteProtocolError("mistyped", f"{name} contains {wrong[0]}: a token id is in 0..{TOKEN_MAX}")
    return tokens.astype("<u2").tobytes()
