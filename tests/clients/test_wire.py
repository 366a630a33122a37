"""Messages of clients: equal to those that the library `protobuf` reads and writes, whatever the bytes."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given, settings
from hypothesis import strategies as st

from clients.records import EXAMPLE_TOKENS_MAX, EXAMPLES_MAX, LOSS_DEFAULTS, RATIO_MASK, ClientLoss, Example, RequestBody
from clients.wire.gradient_request import GradientRequest, decode_gradient_request
from clients.wire.results import SampledSequence, StopReason, encode_gradient_result, encode_samples
from clients.wire.wire_format import (
    FIELDS_MAX,
    TEXT_BYTES_MAX,
    VARINTS_FIELD,
    FieldReader,
    WireType,
    encode_bytes,
    encode_double,
    encode_varint,
    read_integers,
    read_varint,
)
from protocol import codec
from protocol.errors import RemoteProtocolError
from tests.clients.runs import MODEL, body, floats, tokens

# Messages of the SDK tinker 0.38.0. `*`: repeated; `?`: optional; `{}`: a map from texts; `|`: at most one of these is set.
# Fields without a meaning here are missing, so the library skips them, too: spans of examples, and likely tokens of samples.
SCHEMA = {
    "ForwardBackwardRequest": "1 string model_id, 2 int32 seq_id, 3 *Datum data, 4 string loss_fn, 5 {}double loss_fn_config,"
    " 6 bool forward_only, 7 {}LossConfigValue loss_fn_config_v2",
    "LossConfigValue": "1 |double number, 2 |string text",
    "Datum": "1 *Chunk model_input, 2 {}Tensor loss_fn_inputs",
    "Chunk": "1 |EncodedTextChunk encoded_text, 2 |ImageChunk image, 3 |DmelChunk dmel",
    "EncodedTextChunk": "1 bytes tokens",
    "ImageChunk": "1 bytes data, 2 string format, 3 ?int32 expected_tokens",
    "DmelChunk": "1 bytes dmel",
    "Tensor": "1 |bytes dense, 2 |SparseCsr sparse_csr, 3 int32 dtype, 4 *int64 shape",
    "SparseCsr": "1 bytes values, 2 bytes crow_indices, 3 bytes col_indices",
    "ForwardBackwardOutput": "1 string loss_fn_output_type, 2 *ArrayRecord loss_fn_outputs, 3 {}double metrics",
    "ArrayRecord": "1 string type_tag, 2 {}BatchedTensor fields, 3 int64 num_datums",
    "BatchedTensor": "1 bytes data, 2 bytes offsets, 3 int32 dtype, 4 *int64 trailing_shape",
    "SampleResponse": "1 *SampledSequence sequences, 2 ?bytes prompt_logprobs, 4 int32 prompt_cache_hit_tokens",
    "SampledSequence": "1 int32 stop_reason, 2 bytes tokens, 3 ?bytes logprobs",
}
FLOAT32, INT64 = 1, 2  # data types
FieldProto = descriptor_pb2.FieldDescriptorProto


def add_field(message: Any, text: str) -> None:
    number, kind, name = text.split()
    field = message.field.add(name=name, number=int(number), label=FieldProto.LABEL_OPTIONAL)
    if kind.startswith("{}"):
        entry = message.nested_type.add(name="".join(part.capitalize() for part in name.split("_")) + "Entry")
        entry.options.map_entry = True
        add_field(entry, "1 string key")
        add_field(entry, f"2 {kind[2:]} value")
        kind, field.label = f"*.client.{message.name}.{entry.name}", FieldProto.LABEL_REPEATED
    elif kind.startswith("*"):
        field.label = FieldProto.LABEL_REPEATED
    elif kind.startswith("|"):
        if not message.oneof_decl:
            message.oneof_decl.add(name="content")
        field.oneof_index = 0
    elif kind.startswith("?"):
        field.proto3_optional, field.oneof_index = True, len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{name}")
    kind = kind.lstrip("*|?")
    if hasattr(FieldProto, f"TYPE_{kind.upper()}"):
        field.type = getattr(FieldProto, f"TYPE_{kind.upper()}")
    else:
        field.type, field.type_name = FieldProto.TYPE_MESSAGE, kind if kind.startswith(".") else f".client.{kind}"


def message_classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="client.proto", package="client", syntax="proto3")
    for name, fields in SCHEMA.items():
        message = file.message_type.add(name=name)
        for field in fields.split(", "):
            add_field(message, field)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"client.{name}")) for name in SCHEMA}


CLASSES = message_classes()
MODEL_ID, SEQ_ID = "s-1:train:0", 7


def written(request: RequestBody, *, both_maps: bool = True, shapes: bool = True) -> Any:
    """Return the message of a request as a client makes it."""
    message = CLASSES["ForwardBackwardRequest"](model_id=MODEL_ID, seq_id=SEQ_ID, loss_fn=request.loss.value)
    for name, value in request.config.items():
        message.loss_fn_config[name] = value
        if both_maps:
            message.loss_fn_config_v2[name].number = value
    for example in request.examples:
        datum = message.data.add()
        ids = np.frombuffer(example.tokens, dtype="<u2").astype("<i4")
        for part in np.array_split(ids, min(3, ids.size)):
            datum.model_input.add().encoded_text.tokens = part.tobytes()
        vectors = {"target_tokens": np.frombuffer(example.targets, dtype="<u2").astype("<i8")}
        vectors |= {name: np.frombuffer(numbers, dtype="<f4") for name, numbers in example.inputs.items()}
        for name, vector in vectors.items():
            tensor = datum.loss_fn_inputs[name]
            tensor.dense, tensor.dtype = vector.tobytes(), INT64 if vector.dtype.kind == "i" else FLOAT32
            if shapes:
                tensor.shape.append(vector.size)
        datum.MergeFromString(encode_bytes(3, encode_bytes(2, b"\x0a\x04s-1a")))  # a span of sampled tokens
    return message


def read_by_protobuf(data: bytes) -> GradientRequest:
    """Return a valid request that the library reads."""
    message = CLASSES["ForwardBackwardRequest"].FromString(data)
    loss, examples = ClientLoss(message.loss_fn), []
    for datum in message.data:
        ids = np.concatenate([np.frombuffer(chunk.encoded_text.tokens, dtype="<i4") for chunk in datum.model_input])
        vectors = {
            name: np.frombuffer(tensor.dense, dtype={FLOAT32: "<f4", INT64: "<i8"}[tensor.dtype])
            for name, tensor in datum.loss_fn_inputs.items()
        }
        for name, tensor in datum.loss_fn_inputs.items():
            assert list(tensor.shape) in ([], [vectors[name].size])
        targets = vectors.pop("target_tokens")
        assert ids.size and targets.size and min(ids.min(), targets.min()) >= 0 and max(ids.max(), targets.max()) < 1 << 16
        inputs = {name: vectors[name].astype("<f4").tobytes() for name in vectors}
        examples.append(Example(ids.astype("<u2").tobytes(), targets.astype("<u2").tobytes(), inputs))
    config = dict(message.loss_fn_config) | {name: value.number for name, value in message.loss_fn_config_v2.items()}
    config = {name: value for name, value in config.items() if value != LOSS_DEFAULTS[loss].get(name)}
    request = RequestBody(loss, config, tuple(examples))
    return GradientRequest(message.model_id, message.seq_id, message.forward_only, request, None)


PPO = body(ClientLoss.PPO, clip_high_threshold=1.5)


@pytest.mark.parametrize("loss", ClientLoss)
@pytest.mark.parametrize("shapes", [True, False])
def test_a_request_is_read_as_protobuf_writes_it(loss: ClientLoss, shapes: bool) -> None:
    changed = {name: value + 0.25 for name, value in LOSS_DEFAULTS[loss].items()}
    request = body(loss, **changed)
    for both_maps in (True, False):
        data = written(request, both_maps=both_maps, shapes=shapes).SerializeToString()
        assert decode_gradient_request(data) == GradientRequest(MODEL_ID, SEQ_ID, False, request, None) == read_by_protobuf(data)
        assert request.problem(MODEL.context, MODEL.vocabulary) is None
        assert len(codec.encode(request)) < len(data)


def test_a_request_for_losses_alone_says_so() -> None:
    message = written(PPO)
    message.forward_only = True
    assert decode_gradient_request(message.SerializeToString()).forward_only


def test_settings_of_the_second_map_win_and_default_values_are_left_out() -> None:
    message = written(PPO)
    message.loss_fn_config["clip_high_threshold"] = 9.0
    message.loss_fn_config["clip_low_threshold"] = LOSS_DEFAULTS[ClientLoss.PPO]["clip_low_threshold"]
    assert decode_gradient_request(message.SerializeToString()).body == PPO


def test_integers_become_the_floats_of_an_input() -> None:
    message = written(body(examples=1))
    tensor = message.data[0].loss_fn_inputs["weights"]
    values = list(range(tensor.shape[0]))
    tensor.dtype, tensor.dense = INT64, np.array(values, dtype="<i8").tobytes()
    read = decode_gradient_request(message.SerializeToString()).body
    assert read is not None and read.examples[0].inputs["weights"] == floats(values)


def test_unknown_fields_are_skipped() -> None:
    unknown = b"".join(
        (b"\xa0\x06\x96\x01", b"\xa1\x06" + bytes(8), b"\xa2\x06\x03abc", b"\xa5\x06" + bytes(4), b"\xa2\x06\x02\x0b\x0b")
    )
    message = written(PPO)
    expected = decode_gradient_request(message.SerializeToString())
    assert expected.body == PPO
    for part in (message, message.data[0], message.data[0].model_input[0], message.data[0].loss_fn_inputs["logprobs"]):
        part.MergeFromString(unknown)
    data = message.SerializeToString()
    assert data.count(unknown) == 4
    assert decode_gradient_request(data) == expected


# Invalid requests -------------------------------------------------------------------------------------------------------------


def int32s(*values: int) -> bytes:
    return np.array(values, dtype="<i4").tobytes()


def int64s(*values: int) -> bytes:
    return np.array(values, dtype="<i8").tobytes()


TARGETS = {"dense": int64s(1, 2), "dtype": INT64}


def datum(
    *chunks: dict[str, Any],
    targets: dict[str, Any] | None = TARGETS,
    **inputs: dict[str, Any],
) -> dict[str, Any]:
    """Return an example. `targets` and `inputs` are tensors."""
    vectors = inputs if targets is None else {"target_tokens": targets} | inputs
    return {"model_input": [{"encoded_text": {"tokens": int32s(5, 6)}}, *chunks], "loss_fn_inputs": vectors}


def request_with(**fields: Any) -> bytes:
    """Return a valid request, with other values of these fields."""
    valid = {"model_id": MODEL_ID, "seq_id": SEQ_ID, "loss_fn": "dro", "data": [datum(), datum()]}
    data: bytes = CLASSES["ForwardBackwardRequest"](**valid | fields).SerializeToString()
    return data


def second(example: dict[str, Any]) -> dict[str, Any]:
    return {"data": [datum(), example]}


LONG = "x" * (TEXT_BYTES_MAX + 1)
NAMED = [  # fields of an invalid request, and its problem
    ({"loss_fn": "dimuon"}, "unknown loss 'dimuon': the losses are cross_entropy, importance_sampling, ppo, cispo, dro, gspo"),
    ({"loss_fn": LONG}, f"a text has 257 bytes, more than 256; it begins with {b'x' * 32!r}"),
    ({"loss_fn_config_v2": {"loss_id": {"text": "mine"}}}, "setting 'loss_id' is the text 'mine': settings are numbers"),
    ({"loss_fn_config_v2": {"beta": {}}}, "setting 'beta' has no value"),
    ({"loss_fn_config": {"beta": math.nan}}, "setting 'beta' is nan"),
    ({"loss_fn_config_v2": {"beta": {"number": -math.inf}}}, "setting 'beta' is -inf"),
    ({"loss_fn_config": dict.fromkeys("abcdefghi", 1.0)}, "the loss has more than 8 settings"),
    ({"data": []}, "the request has no examples"),
    ({"data": [datum()] * (EXAMPLES_MAX + 1)}, "the request has more than 1024 examples"),
    (second({"loss_fn_inputs": {}}), "example 1: the input 'target_tokens' is missing"),
    (second(datum(targets=None)), "example 1: the input 'target_tokens' is missing"),
    (second(datum(targets={"dtype": INT64})), "example 1: 2 tokens and 0 targets"),
    (second(datum() | {"model_input": []}), "example 1: 0 tokens and 2 targets"),
    (second(datum({"image": {"format": "png"}})), "example 1: chunk 1 is of the kind 'image': models read encoded text alone"),
    (second(datum({"dmel": {"dmel": b"a"}})), "example 1: chunk 1 is of the kind 'dmel': models read encoded text alone"),
    (second(datum({})), "example 1: chunk 1 has no content"),
    (second(datum({"encoded_text": {"tokens": b"12345"}})), "example 1: chunk 1: the tokens have 5 bytes, not a multiple of 4"),
    (
        second(datum({"encoded_text": {"tokens": int32s(7, 65_536)}})),
        "example 1: chunk 1 contains 65536: a token id is in 0..65535",
    ),
    (second(datum({"encoded_text": {"tokens": int32s(7, -3)}})), "example 1: chunk 1 contains -3: a token id is in 0..65535"),
    (
        second(datum(targets={"dense": int64s(1, 1 << 40), "dtype": INT64})),
        "example 1: input 'target_tokens' contains 1099511627776: a token id is in 0..65535",
    ),
    (
        second(datum(targets={"dense": floats([1.0, 2.0]), "dtype": FLOAT32})),
        "example 1: input 'target_tokens': the tensor has the data type float32: tokens are int64",
    ),
    (
        second(datum(weights={"sparse_csr": {"values": floats([1.0])}, "dtype": FLOAT32})),
        "example 1: input 'weights': the tensor is sparse: only dense tensors are supported",
    ),
    (
        second(datum(weights={"dense": floats([1.0]), "dtype": 4})),
        "example 1: input 'weights': the tensor has the data type 4: 1 (float32) and 2 (int64) are supported",
    ),
    (
        second(datum(weights={"dense": b"12345", "dtype": FLOAT32})),
        "example 1: input 'weights': the tensor has 5 bytes, not a multiple of 4",
    ),
    (
        second(datum(weights={"dense": floats([1.0] * 6), "dtype": FLOAT32, "shape": [-2, -3]})),
        "example 1: input 'weights': the tensor has the shape -2 × -3 and 6 numbers: its shape must be 6",
    ),
    (
        second(datum(weights={"dense": floats([1.0]), "dtype": FLOAT32, "shape": [1] * 9})),
        f"example 1: input 'weights': the tensor has the shape {'1 × ' * 8}… and 1 numbers: its shape must be 1",
    ),
    (
        second(datum(weights={"dense": floats([1.0, 2.0]), "dtype": FLOAT32, "shape": [3]})),
        "example 1: input 'weights': the tensor has the shape 3 and 2 numbers: its shape must be 2",
    ),
    (
        second(datum(**{name: {"dense": floats([1.0]), "dtype": FLOAT32} for name in "abcdefghi"})),
        "example 1: the loss has more than 8 inputs",
    ),
    (second(datum(weights={"dtype": FLOAT32})), f"example 1: input 'weights' has 0 numbers, expected 1 to {EXAMPLE_TOKENS_MAX}"),
    (
        second(datum(weights={"dense": bytes(4 * EXAMPLE_TOKENS_MAX + 4), "dtype": FLOAT32})),
        f"example 1: input 'weights' has {EXAMPLE_TOKENS_MAX + 1} numbers, expected 1 to {EXAMPLE_TOKENS_MAX}",
    ),
    (
        second(datum({"encoded_text": {"tokens": bytes(4 * EXAMPLE_TOKENS_MAX)}})),
        f"example 1: {EXAMPLE_TOKENS_MAX + 2} tokens and 2 targets",
    ),
    ({"loss_fn_config": {"y" * 65: 1.0}}, f"the name {'y' * 32!r} has 65 characters, not 1 to 64"),
    (
        second(datum(**{"y" * 65: {"dense": floats([1.0]), "dtype": FLOAT32}})),
        f"example 1: the name {'y' * 32!r} has 65 characters, not 1 to 64",
    ),
    (second(datum(**{"": {"dense": floats([1.0]), "dtype": FLOAT32}})), "example 1: the name '' has 0 characters, not 1 to 64"),
]


def test_the_valid_request_of_these_tests_is_valid() -> None:
    example = Example(tokens([5, 6]), tokens([1, 2]), {})
    assert decode_gradient_request(request_with()).body == RequestBody(ClientLoss.DRO, {}, (example, example))


@pytest.mark.parametrize(("fields", "problem"), NAMED)
def test_the_problem_of_a_request_names_the_value_and_keeps_the_request(fields: dict[str, Any], problem: str) -> None:
    assert decode_gradient_request(request_with(**fields)) == GradientRequest(MODEL_ID, SEQ_ID, False, None, problem)


def test_missing_weights_of_cross_entropy_are_ones_and_given_ones_stay() -> None:
    given = datum(weights={"dense": floats([0.0, -2.0]), "dtype": FLOAT32})
    read = decode_gradient_request(request_with(loss_fn="cross_entropy", data=[datum(), given])).body
    assert read is not None and [example.inputs["weights"] for example in read.examples] == [
        floats([1.0, 1.0]),
        floats([0.0, -2.0]),
    ]
    other = decode_gradient_request(request_with(loss_fn="ppo")).body
    assert other is not None and other.examples[0].inputs == {}


def test_a_missing_ratio_mask_of_gspo_has_the_tokens_with_an_advantage_and_a_given_one_stays() -> None:
    inputs = {"logprobs": [0.0, 0.0], "advantages": [0.0, -2.0]}
    plain = datum(**{name: {"dense": floats(values), "dtype": FLOAT32} for name, values in inputs.items()})
    given = plain | {"loss_fn_inputs": plain["loss_fn_inputs"] | {RATIO_MASK: {"dense": floats([1.0, 1.0]), "dtype": FLOAT32}}}
    read = decode_gradient_request(request_with(loss_fn="gspo", data=[plain, given])).body
    assert read is not None and [example.inputs[RATIO_MASK] for example in read.examples] == [
        floats([0.0, 1.0]),
        floats([1.0, 1.0]),
    ]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model_id": ""}, "model_id is '' and seq_id is 7: a model and a number in 1..2147483647 are needed"),
        ({"model_id": LONG}, "a text has 257 bytes, more than 256"),
        ({"seq_id": 0}, "model_id is 's-1:train:0' and seq_id is 0: a model"),
        ({"seq_id": -1}, "model_id is 's-1:train:0' and seq_id is 18446744073709551615: a model"),
    ],
)
def test_a_request_without_its_model_or_its_number_is_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(RemoteProtocolError, match=reason):
        decode_gradient_request(request_with(**fields))


DOUBLED_SHAPE = encode_bytes(1, bytes(4)) + encode_varint(3, FLOAT32) + encode_bytes(4, b"\x01") * 2
# Malformed bytes after the model and the number of a request, and the request's problem.
MALFORMED = [
    (b"\x1a", "the message ends within a number"),
    (b"\x1a\x05abc", "field 3 has 5 bytes, and its message ends after 3"),
    (b"\x1a" + b"\xff" * 8 + b"\x01", f"field 3 has {(1 << 63 - 6) - 1} bytes, and its message ends after 0"),
    (b"\xa1\x06abc", "field 100 has 8 bytes, and its message ends after 3"),
    (b"\xa5\x06abc", "field 100 has 4 bytes, and its message ends after 3"),
    (b"\xa0\x06" + b"\x80" * 10 + b"\x01", "a number has more than 10 bytes"),
    (b"\xa0\x06" + b"\xff" * 9 + b"\x02", "a number has more than 64 bits"),
    (b"\x02\x00", "field number 0 is not in 1..536870911"),
    (b"\x82\x80\x80\x80\x10\x00", "field number 536870912 is not in 1..536870911"),
    (b"\xa3\x06" * 10_000, "field 100 has the wire type 3, which is not supported"),
    (b"\x18\x00", "field 3 has the wire type 0, not 2"),
    (b"\x12\x00", "field 2 has the wire type 2, not 0"),
    (b"\x22\x01\xff", "a text is invalid UTF-8: b'\\xff'"),
    (b"\x0a\x01\xff", "a text is invalid UTF-8: b'\\xff'"),
    (b"\x9a\x80\x80\x80\x80\x00\x00", "a number has more than 5 bytes"),
    (encode_bytes(5, b""), "the name '' has 0 characters, not 1 to 64"),
    (
        encode_bytes(5, encode_bytes(1, b"a") + encode_bytes(3, b"")),
        "an entry of a map has field 3: it has a key",
    ),
    (encode_bytes(7, encode_bytes(1, b"a")), "setting 'a' has no value"),
    (encode_bytes(7, encode_bytes(1, b"a") + encode_bytes(2, b"a") * 2), "an entry of a map has two values"),
    (
        encode_bytes(3, encode_bytes(2, encode_bytes(1, b"a"))),
        "example 2: input 'a': the tensor has the data type 0: 1",
    ),
    (encode_bytes(3, encode_bytes(2, b"")), "example 2: the name '' has 0 characters, not 1 to 64"),
    (
        encode_bytes(3, encode_bytes(1, encode_bytes(1, b"") + encode_bytes(2, b""))),
        "example 2: chunk 0 is of the kind 'image': models read encoded text alone",
    ),
    (
        encode_bytes(3, encode_bytes(2, encode_bytes(1, b"weights") + encode_bytes(2, DOUBLED_SHAPE))),
        "example 2: input 'weights': the tensor has the shape 1 × 1 and 1 numbers: its shape must be 1",
    ),
    (b"\x30\x01" * (FIELDS_MAX + 1), f"the body has more than {FIELDS_MAX} fields"),
]


@pytest.mark.parametrize(("tail", "problem"), MALFORMED)
def test_malformed_bytes_after_its_number_are_the_problem_of_a_request(tail: bytes, problem: str) -> None:
    request = decode_gradient_request(request_with() + tail)
    assert (request.model_id, request.seq_id, request.body) == (MODEL_ID, SEQ_ID, None)
    assert request.problem is not None and request.problem.startswith(problem)


def test_a_truncated_request_has_a_problem_if_its_number_is_known() -> None:
    data = request_with()
    head = len(CLASSES["ForwardBackwardRequest"](model_id=MODEL_ID, seq_id=SEQ_ID).SerializeToString())
    for size in range(len(data)):
        if size < head:
            with pytest.raises(RemoteProtocolError):
                decode_gradient_request(data[:size])
        else:
            assert decode_gradient_request(data[:size]).problem


def test_the_largest_batch_has_fewer_fields_than_allowed() -> None:
    """A batch of the loss with the most inputs, with several chunks for each text, is decoded. 64 more fields each are not."""
    request = written(body(ClientLoss.GSPO, examples=EXAMPLES_MAX))
    assert decode_gradient_request(request.SerializeToString()).problem is None
    unknown = encode_varint(100, 1) * (64 * EXAMPLES_MAX)
    problem = decode_gradient_request(request_with() + unknown).problem
    assert problem is not None and "more than 65536 fields" in problem, "a decoder occupies a thread for 0.2 s at most"


SMALL = b"\x0a\x00" * (1 << 15)  # 32,768 empty fields
HOSTILE = {
    "examples": encode_bytes(3, b"") * (1 << 15),
    "settings": encode_bytes(5, b"") * (1 << 15),
    "chunks": encode_bytes(3, SMALL),
    "contents of a chunk": encode_bytes(3, encode_bytes(1, SMALL)),
    "keys of an entry": encode_bytes(3, encode_bytes(2, SMALL)),
    "dimensions": encode_bytes(
        3, encode_bytes(2, encode_bytes(1, b"weights") + encode_bytes(2, encode_bytes(4, b"\x01" * (1 << 16))))
    ),
    "a name": encode_bytes(3, encode_bytes(2, encode_bytes(1, bytes(1 << 16)) + encode_bytes(2, b""))),
    "a loss": encode_bytes(4, bytes(1 << 16)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_memory_is_bounded_by_the_size_of_a_body(name: str) -> None:
    data = request_with() + HOSTILE[name]
    tracemalloc.start()
    try:
        assert decode_gradient_request(data).problem
        assert tracemalloc.get_traced_memory()[1] < 2 * len(data)
    finally:
        tracemalloc.stop()


# Any bytes --------------------------------------------------------------------------------------------------------------------

SEEDS = [
    request_with(),
    request_with(loss_fn_config={"beta": 0.5}, loss_fn_config_v2={"beta": {"number": 0.25}}, forward_only=True),
    written(body(ClientLoss.PPO, examples=2, clip_high_threshold=1.5)).SerializeToString(),
]


def changed(data: bytes, draw: Random) -> bytes:
    """Return the bytes with some of them replaced, removed, doubled or inserted."""
    for _ in range(draw.randint(0, 3)):
        start, length = draw.randint(0, len(data)), draw.choice((0, 1, 1, 2, 8, 64))
        new = draw.choice(
            (b"", draw.randbytes(1), draw.randbytes(3), data[start : start + 2 * length], data[start - length : start])
        )
        data = data[:start] + new + data[start + length :]
    return data


@settings(max_examples=500)
@given(st.sampled_from(SEEDS) | st.binary(max_size=64), st.randoms(use_true_random=True))
def test_any_bytes_are_read_as_by_protobuf_or_refused(data: bytes, draw: Random) -> None:
    for _ in range(20):
        assert_read_as_by_protobuf_or_refused(changed(data, draw))


def assert_read_as_by_protobuf_or_refused(data: bytes) -> None:
    try:
        request = decode_gradient_request(data)
    except RemoteProtocolError:
        return
    assert (request.body is None) != (request.problem is None)
    if request.body is not None:
        assert request == read_by_protobuf(data)
        if request.body.problem(1 << 16, 1 << 16) is None:
            assert codec.decode(RequestBody, codec.encode(request.body)) == request.body


# Messages of the schema whose fields are read, by name: number -> type of the field.
KNOWN = {name: {int(number): kind for number, kind, _ in map(str.split, fields.split(", "))} for name, fields in SCHEMA.items()}
JUNK = [b"\xa0\x06\x96\x01", b"\xa1\x06" + bytes(8), encode_bytes(100, b"abc"), b"\xa5\x06" + bytes(4), encode_bytes(9, b"\xff")]
OLD = {"string": b"old", "bytes": b"\1\2\3\4", "int32": 5, "bool": 1, "double": 0.25}  # values that a later one replaces


def wire_fields(data: bytes) -> list[tuple[int, int, bytes]]:
    """Return number, wire type and bytes of each field. The value of a varint is its bytes."""
    found, at, message = list[tuple[int, int, bytes]](), 0, memoryview(data)
    while at < len(data):
        tag, at = read_varint(message, at)
        size, start = {WireType.FIXED64: 8, WireType.FIXED32: 4}.get(WireType(tag & 7), 0), at
        if tag & 7 == WireType.BYTES:
            size, start = read_varint(message, at)
        elif tag & 7 == WireType.VARINT:
            size = read_varint(message, at)[1] - at
        found.append((tag >> 3, tag & 7, data[start : start + size]))
        at = start + size
    return found


def field_bytes(number: int, wire_type: int, value: bytes) -> bytes:
    return encode_bytes(number, value) if wire_type == WireType.BYTES else bytes([number << 3 | wire_type]) + value


def scalar_bytes(number: int, kind: str) -> bytes:
    value = OLD[kind]
    if isinstance(value, float):
        return encode_double(number, value)
    return encode_varint(number, value) if isinstance(value, int) else encode_bytes(number, value)


def rewritten(data: bytes, kinds: Mapping[int, str], draw: Random, junk: Sequence[bytes] = JUNK) -> bytes:
    """Return other bytes of the same message.

    Fields are in another order, unknown ones are between them, earlier values precede some values, packed numbers may be
    separate, and some entries of maps lack a key or a value that is the default.
    """
    by_number = dict[int, list[bytes]]()
    for number, wire_type, value in wire_fields(data):
        kind, parts = kinds.get(number, ""), by_number.setdefault(number, [])
        if kind.startswith("{}"):
            value = rewritten(value, {1: "string", 2: kind[2:]}, draw, junk=())
        elif kind.lstrip("*|") in KNOWN:
            value = rewritten(value, KNOWN[kind.lstrip("*|")], draw)
        elif kind == "*int64" and draw.random() < 0.7:
            packed, at = memoryview(value), 0
            while at < len(value):
                end = read_varint(packed, at)[1]
                is_packed = draw.random() < 0.5
                parts.append(encode_bytes(number, value[at:end]) if is_packed else field_bytes(number, 0, value[at:end]))
                at = end
            continue
        elif kind.lstrip("|?") in OLD:
            parts += [scalar_bytes(number, kind.lstrip("|?"))] * draw.choice((0, 0, 1, 2))
            if kind == "double" and value == bytes(8) and not parts:
                continue
        parts.append(field_bytes(number, wire_type, value))
    series = [*by_number.values(), *([each] for each in junk if draw.random() < 0.3)]
    order = [place for place, parts in enumerate(series) for _ in parts]
    draw.shuffle(order)
    return b"".join(series[place].pop(0) for place in order)


@settings(max_examples=100)
@given(st.sampled_from(ClientLoss), st.booleans(), st.booleans(), st.randoms(use_true_random=True))
def test_a_request_in_other_bytes_is_read_as_by_protobuf(loss: ClientLoss, shapes: bool, both: bool, draw: Random) -> None:
    zeros = {name: 0.0 for name, value in LOSS_DEFAULTS[loss].items() if value}
    request = body(loss, examples=draw.randint(1, 3), seed=draw.randint(0, 9), **zeros)
    message = written(request, both_maps=both, shapes=shapes)
    message.forward_only = draw.random() < 0.5
    data = rewritten(message.SerializeToString(), KNOWN["ForwardBackwardRequest"], draw)
    read = decode_gradient_request(data)
    assert read.problem is None and read == read_by_protobuf(data)
    assert (read.model_id, read.seq_id, read.forward_only, read.body) == (MODEL_ID, SEQ_ID, message.forward_only, request)


@given(st.integers(0, (1 << 64) - 1), st.binary(max_size=4))
def test_numbers_are_read_as_they_are_written(number: int, before: bytes) -> None:
    data = before + encode_varint(1, number)
    tag = len(before) + bool(number)
    assert number == 0 or read_varint(memoryview(data), tag) == (number, len(data))


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=8))
def test_packed_numbers_are_read_as_protobuf_writes_them(numbers: list[int]) -> None:
    (shape,) = FieldReader().read_fields(
        memoryview(CLASSES["Tensor"](shape=[1, *numbers]).SerializeToString()), {4: VARINTS_FIELD}
    )
    assert list(read_integers(shape)) == [1, *numbers]


# Results ----------------------------------------------------------------------------------------------------------------------

float32s = st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=5)


@given(
    st.lists(float32s, min_size=1, max_size=4),
    st.sampled_from([("logprobs",), ("logprobs", "elementwise_loss")]),
    st.dictionaries(st.sampled_from(["loss:sum", "tokens:sum", "ratio:mean"]), st.floats(allow_nan=False)),
)
def test_the_result_of_a_gradient_is_the_message_of_protobuf(
    values: list[list[float]], names: tuple[str, ...], metrics: dict[str, float]
) -> None:
    vectors = [np.array(each, dtype=np.float32) for each in values]
    record = {"num_datums": len(values), "fields": {}}
    starts = np.cumsum([0, *(4 * len(each) for each in values)])
    for name in names:
        batch = {"data": b"".join(floats(each) for each in values), "offsets": int64s(*starts), "dtype": FLOAT32}
        record["fields"][name] = batch  # type: ignore[index]
    expected = CLASSES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record], metrics=metrics)
    assert encode_gradient_result(dict.fromkeys(names, vectors), metrics) == expected.SerializeToString(deterministic=True)


@given(st.lists(st.tuples(st.lists(st.integers(0, 65_535), max_size=5), st.sampled_from(StopReason)), max_size=3), float32s)
def test_samples_are_the_message_of_protobuf(drawn: list[tuple[list[int], StopReason]], logprobs: list[float]) -> None:
    sequences = [SampledSequence(ids, [-0.5 * each for each in ids], stop) for ids, stop in drawn]
    parts = [
        {"stop_reason": int(each.stop_reason), "tokens": int32s(*each.tokens), "logprobs": floats(list(each.logprobs))}
        for each in sequences
    ]
    expected = CLASSES["SampleResponse"](sequences=parts)
    encoded = encode_samples(sequences, None)
    assert CLASSES["SampleResponse"].FromString(encoded) == expected
    assert encoded == expected.SerializeToString() or not all(each.tokens for each in sequences)
    expected.prompt_logprobs = floats([math.nan, *logprobs])
    assert CLASSES["SampleResponse"].FromString(encode_samples(sequences, [None, *logprobs])) == expected


def test_stopped_samples_and_samples_of_full_length_have_the_numbers_of_the_sdk() -> None:
    assert (StopReason.STOP, StopReason.LENGTH) == (0, 1)


def test_a_metric_without_an_operation_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="colon"):
        encode_gradient_result({"logprobs": [np.zeros(1, dtype=np.float32)]}, {"loss": 1.0})
