from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import codec
from protocol.codec import Between, Length
from protocol.errors import RemoteProtocolError
from protocol.limits import MESSAGE_BYTES_MAX
from protocol.messages import (
    AGREEMENT_MESSAGES,
    GOSSIP_MESSAGES,
    LINK_MESSAGES,
    Certificate,
    GetBlob,
    Judgement,
    Status,
    TimeoutCertificate,
)
from protocol.verdicts import Verdict


class Colour(enum.StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True)
class Leaf:
    number: int
    colour: Colour


@dataclass(frozen=True, slots=True)
class Everything:
    TAG: ClassVar[str] = "everything"
    flag: bool
    number: int
    real: float
    text: str
    data: Annotated[bytes, Length(1, 4)]
    small: Annotated[int, Between(0, 9)]
    leaves: tuple[Leaf, ...]
    pair: tuple[int, str]
    table: dict[str, int]
    maybe: Leaf | None


integers = st.integers(-codec.INTEGER_MAX, codec.INTEGER_MAX)
leaves = st.builds(Leaf, integers, st.sampled_from(Colour))
everything = st.builds(
    Everything,
    st.booleans(),
    integers,
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(),
    st.binary(min_size=1, max_size=4),
    st.integers(0, 9),
    st.lists(leaves, max_size=3).map(tuple),
    st.tuples(integers, st.text()),
    st.dictionaries(st.text(), integers, max_size=4),
    st.none() | leaves,
)
EXAMPLE = Everything(True, -3, 0.5, "text", b"ab", 7, (Leaf(1, Colour.RED),), (2, "x"), {"a": 1, "b": 2}, None)


def refused(reason: str, kind: type, plain: object) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        codec.decode(kind, msgpack.packb(plain, use_bin_type=True))
    assert caught.value.reason == reason


def changed(index: int, value: object) -> list[object]:
    plain = list(codec.to_plain(EXAMPLE))
    plain[index] = value
    return plain


@given(everything)
def test_what_was_encoded_decodes_to_the_same_value(value: Everything) -> None:
    assert codec.decode(Everything, codec.encode(value)) == value


@given(everything, everything)
def test_equal_bytes_mean_equal_values(left: Everything, right: Everything) -> None:
    assert (codec.encode(left) == codec.encode(right)) == (repr(left) == repr(right))


def test_the_order_in_which_a_dictionary_was_filled_does_not_show() -> None:
    assert codec.encode({"b": 1, "a": 2}) == codec.encode({"a": 2, "b": 1})


@pytest.mark.parametrize(
    ("index", "value"),
    [
        (1, 1),  # a number is no truth value
        (2, True),  # and the reverse
        (2, 1.0),
        (2, 2**63),
        (3, 1),
        (4, b"text"),
        (5, "ab"),
        (6, 10),
        (6, -1),
        (7, {}),
        (7, [[1, "green"]]),
        (7, [[1, 1.5]]),
        (7, [[1]]),
        (7, [[1, "red", 2]]),
        (8, [1]),
        (8, [1, "x", 2]),
        (9, {"a": 1}),
        (9, [["a", "1"]]),
        (10, False),
    ],
)
def test_a_mistyped_field_is_refused(index: int, value: object) -> None:
    refused("mistyped", Everything, changed(index, value))


@pytest.mark.parametrize("pairs", [[["b", 1], ["a", 2]], [["a", 1], ["a", 2]]])
def test_unsorted_or_repeated_keys_are_refused(pairs: list[object]) -> None:
    refused("non-canonical", Everything, changed(9, pairs))


def test_missing_and_unknown_fields_are_refused() -> None:
    plain = codec.to_plain(EXAMPLE)
    refused("mistyped", Everything, plain[:-1])
    refused("mistyped", Everything, [*plain, 0])


@dataclass(frozen=True, slots=True)
class Released:
    name: str
    number: codec.Count


@dataclass(frozen=True, slots=True)
class Later:
    """`Released` with two fields of a later release."""

    name: str
    number: codec.Count
    note: Annotated[bytes, Length(0, 8)] = codec.added_field(b"")
    tags: tuple[str, ...] = codec.added_field(())


@given(st.text(max_size=5), st.integers(0, 9), st.binary(max_size=2), st.lists(st.text(max_size=2), max_size=2))
def test_added_fields_have_one_encoding_which_is_the_released_one_without_them(
    name: str, number: int, note: bytes, tags: list[str]
) -> None:
    value, released = Later(name, number, note, tuple(tags)), codec.encode(Released(name, number))
    assert codec.decode(Later, codec.encode(value)) == value
    assert (codec.encode(value) == released) == (not note and not tags)
    assert codec.decode(Later, released) == Later(name, number)


@pytest.mark.parametrize("plain", [["a", 1, b""], ["a", 1, b"x", []], ["a", 1, b"", []], ["a"], ["a", 1, b"x", ["t"], 1]])
def test_an_added_field_with_its_default_and_other_counts_of_fields_are_refused(plain: list[object]) -> None:
    with pytest.raises(RemoteProtocolError, match=r"default value|field before"):
        codec.decode(Later, codec.pack(plain))


@dataclass(frozen=True, slots=True)
class Holder:
    number: int
    held: Later


def test_a_value_in_an_added_field_is_found_at_any_depth() -> None:
    assert not codec.has_added_value(Holder(1, Later("a", 1)))
    assert codec.has_added_value(Holder(1, Later("a", 1, tags=("new",)))) and codec.has_added_value(Later("a", 1, b"new"))


def test_added_fields_come_last() -> None:
    @dataclass(frozen=True)
    class Wrong:
        name: str
        note: bytes = codec.added_field(b"")
        number: int = 0

    with pytest.raises(TypeError, match="added fields come last"):
        codec.encode(Wrong("a"))


def test_another_tag_is_refused() -> None:
    refused("unknown-message", Everything, changed(0, "nothing"))
    refused("unknown-message", Everything, [])


@pytest.mark.parametrize(("index", "value"), [(5, b""), (5, b"abcde")])
def test_lengths_outside_their_bounds_are_refused(index: int, value: object) -> None:
    refused("oversized", Everything, changed(index, value))


def test_a_collection_without_a_bound_of_its_own_is_bounded_all_the_same() -> None:
    refused("oversized", str, "a" * (codec.COLLECTION_MAX + 1))
    refused("oversized", tuple[int | None, ...], [None] * (codec.COLLECTION_MAX + 1))


def test_a_longer_bound_admits_more_than_the_default_one_but_not_more_than_itself() -> None:
    kind = Annotated[bytes, Length(0, codec.COLLECTION_MAX + 1)]
    longest = b"a" * (codec.COLLECTION_MAX + 1)
    assert codec.decode(kind, codec.encode(longest)) == longest
    refused("oversized", kind, longest + b"a")
    refused("mistyped", kind, longest.decode())


def test_longer_than_the_limit_is_refused_before_it_is_read() -> None:
    with pytest.raises(RemoteProtocolError, match="oversized"):
        codec.decode(bytes, b"\xc1" * 9, size_max=8)
    with pytest.raises(RemoteProtocolError, match="oversized"):
        codec.decode(bytes, bytes(MESSAGE_BYTES_MAX + 1))


@pytest.mark.parametrize(
    "data",
    [
        b"\xcd\x00\x07",  # 7 as 16-bit integer
        b"\xd3" + bytes(7) + b"\x07",  # 7 as 64-bit integer
    ],
)
def test_integers_in_a_longer_form_are_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="non-canonical"):
        codec.decode(int, data)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_floats_that_are_no_numbers_have_no_encoding(value: float) -> None:
    refused("mistyped", float, value)
    with pytest.raises(TypeError):
        codec.encode(value)


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", b"\x92\x01", b"\x01\x01", b"\xa1\xff", b"\x91" * 100_000, b"\xd4\x05\x00", b"\x81\x01\x02"]
)
def test_bytes_that_are_no_plain_msgpack_are_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        codec.decode(tuple[int, ...], data)


def test_what_has_no_encoding_is_our_own_mistake() -> None:
    with pytest.raises(TypeError):
        codec.encode(object())


KINDS = (*AGREEMENT_MESSAGES, *GOSSIP_MESSAGES, *LINK_MESSAGES)


@given(st.binary(max_size=200))
def test_random_bytes_never_do_more_than_raise_the_protocol_error(data: bytes) -> None:
    for kind in (Everything, Certificate, TimeoutCertificate, Judgement, dict[bytes, int], tuple[float, ...]):
        try:
            value = codec.decode(kind, data)
        except RemoteProtocolError:
            continue
        assert codec.encode(value) == data


plains = st.recursive(
    st.none() | st.booleans() | integers | st.floats() | st.text(max_size=5) | st.binary(max_size=70),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=20,
)


@given(st.sampled_from(KINDS), st.lists(plains, max_size=6))
def test_well_formed_msgpack_of_any_shape_never_does_more_than_raise_the_protocol_error(kind: type, fields: list[object]) -> None:
    data = msgpack.packb([kind.TAG, *fields], use_bin_type=True)  # type: ignore[attr-defined]
    try:
        value = codec.decode_message(data, KINDS)
    except RemoteProtocolError:
        return
    assert codec.encode(value) == data


@given(everything, st.data())
def test_no_changed_byte_goes_unnoticed(value: Everything, data: st.DataObject) -> None:
    encoded = bytearray(codec.encode(value))
    encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        other = codec.decode(Everything, bytes(encoded))
    except RemoteProtocolError:
        return
    assert repr(other) != repr(value)


def test_a_message_is_read_by_its_tag_and_only_if_its_kind_is_expected() -> None:
    status = Status(3, 1)
    assert codec.decode_message(codec.encode(status), (GetBlob, Status)) == status
    with pytest.raises(RemoteProtocolError, match="unknown-message"):
        codec.decode_message(codec.encode(status), (GetBlob,))


def test_every_tag_is_used_once() -> None:
    tags = [kind.TAG for kind in KINDS]
    assert len(set(tags)) == len(tags)


def test_an_enumeration_of_numbers_takes_no_truth_value() -> None:
    assert codec.decode(Verdict, codec.encode(Verdict.STALE)) is Verdict.STALE
    refused("mistyped", Verdict, True)
    refused("mistyped", Verdict, 99)


# One item of an array of any types ---------------------------------------------------------------------------------------


def test_one_item_of_an_array_is_cut_out_as_it_stands() -> None:
    parts = [codec.encode(value) for value in (1, (b"ab", ("x", None)), {b"k": 1.5}, 2**40, "é", None)]
    data = bytes([0x90 + len(parts)]) + b"".join(parts)
    assert [codec.encoded_item(data, index) for index in range(len(parts))] == parts


@pytest.mark.parametrize(
    "data", [b"", b"\x90", b"\x91", b"\x01", b"\x92\x01", b"\xdd\xff\xff\xff\xff\x01", b"\xc1", b"\x91" * 5_000]
)
def test_what_has_no_such_item_is_refused(data: bytes) -> None:
    for index in (1, 3, 2**40):
        with pytest.raises(RemoteProtocolError, match="malformed"):
            codec.encoded_item(data, index)
