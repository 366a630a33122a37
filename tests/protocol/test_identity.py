from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import RemoteProtocolError, UserError
from protocol.identity import (
    Ed25519Verifier,
    Identity,
    Signed,
    open_signed,
    parse_peer_id,
    peer_id,
    seal,
    short_id,
    sign_message,
    signing_preimage,
)

CHAIN = bytes(range(32))
ALICE, BOB = Identity(b"a" * 32), Identity(b"b" * 32)
VERIFIER = Ed25519Verifier()


@dataclass(frozen=True, slots=True)
class Letter:
    TAG: ClassVar[str] = "letter"
    text: str


@dataclass(frozen=True, slots=True)
class Note:
    TAG: ClassVar[str] = "note"
    text: str


def refused(reason: str, signed: Signed, chain: bytes = CHAIN) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        open_signed(signed, chain, VERIFIER, (Letter,))
    assert caught.value.reason == reason


def test_what_was_signed_opens() -> None:
    assert open_signed(sign_message(ALICE, CHAIN, Letter("hello")), CHAIN, VERIFIER, (Note, Letter)) == Letter("hello")


@given(st.data())
def test_a_flipped_bit_anywhere_is_refused(data: st.DataObject) -> None:
    signed = sign_message(ALICE, CHAIN, Letter("hello"))
    name = data.draw(st.sampled_from(["body", "signer", "signature"]))
    changed = bytearray(getattr(signed, name))
    changed[data.draw(st.integers(0, len(changed) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(RemoteProtocolError):
        open_signed(replace(signed, **{name: bytes(changed)}), CHAIN, VERIFIER, (Letter,))


def test_a_signature_given_on_another_chain_is_refused() -> None:
    refused("bad-signature", sign_message(ALICE, bytes(32), Letter("hello")))


def test_a_signature_given_for_another_purpose_is_refused() -> None:
    body = sign_message(ALICE, CHAIN, Letter("hello")).body
    refused("bad-signature", Signed(body, ALICE.public, ALICE.sign(signing_preimage("note", CHAIN, body))))


def test_a_signature_of_another_key_is_refused() -> None:
    refused("bad-signature", replace(sign_message(BOB, CHAIN, Letter("hello")), signer=ALICE.public))


def test_a_message_of_a_kind_that_is_not_expected_is_refused_though_signed() -> None:
    refused("unknown-message", sign_message(ALICE, CHAIN, Note("hello")))


@pytest.mark.parametrize("key", [bytes(32), b"\x01" + bytes(31), b"\xff" * 32, b"short"])
def test_a_weak_or_malformed_key_verifies_nothing(key: bytes) -> None:
    assert not VERIFIER.verify(key, b"data", bytes(64))


def test_a_signature_of_another_length_is_refused() -> None:
    assert not VERIFIER.verify(ALICE.public, b"data", ALICE.sign(b"data")[:-1])


def test_the_seed_is_the_whole_identity() -> None:
    made = Identity.generate()
    assert Identity(made.seed).public == made.public
    assert Identity.generate().public != made.public


def test_domain_chain_and_body_cannot_be_shifted_into_one_another() -> None:
    assert signing_preimage("ab", CHAIN, b"c") != signing_preimage("a", CHAIN, b"bc")


@given(st.binary(min_size=32, max_size=32))
def test_a_peer_id_is_typed_back_to_its_key(public: bytes) -> None:
    assert len(peer_id(public)) == 52
    assert parse_peer_id(f" {peer_id(public).upper()} ") == public
    assert peer_id(public).startswith(short_id(public))


@pytest.mark.parametrize("text", ["", "abc", "!" * 52, "é" * 52, "a" * 51, "a" * 53, peer_id(ALICE.public)[:-1] + "z"])
def test_what_is_no_peer_id_is_named_in_the_error(text: str) -> None:
    with pytest.raises(UserError, match="is not a peer id"):
        parse_peer_id(text)


def test_what_is_sealed_for_a_key_is_its_owners_alone() -> None:
    sealed = seal(ALICE.public, b"secret")
    assert sealed is not None and b"secret" not in sealed
    assert ALICE.unseal(sealed) == b"secret" and BOB.unseal(sealed) is None
    assert all(ALICE.unseal(data) is None for data in (b"", b"x" * 128, sealed[:-1]))
    assert seal(bytes(32), b"secret") is None, "a key of small order"
