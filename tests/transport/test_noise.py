"""The Noise core against published vectors, and its own refusals."""

from __future__ import annotations

import pytest

from protocol.errors import LocalProtocolError, RemoteProtocolError
from transport.wire import noise_session
from transport.wire.noise_session import CipherState, HandshakeState, KeyPair

# From `vectors.txt` of https://github.com/flynn/noise, in the form in which
# https://github.com/swift-libp2p/swift-noise, Tests/NoiseTests/NoiseTests.swift, quotes them.
KEYS = {
    "init_static": "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f",
    "resp_static": "0102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f20",
    "init_ephemeral": "202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f",
    "resp_ephemeral": "4142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f60",
}
FIRST = "358072d6365880d1aeea329adf9121383851ed21a28e3b75e965d0d2cd166254"
SECOND = (
    "64b101b1d0be5a8704bd078f9895001fc03e8e9f9522f188dd128d9846d48466"
    "3414af878d3e46a2f58911a816d6e8346d4ea17a6f2a0bb4ef4ed56c133cff45"
)
THIRD = "87f864c11ba449f46a0a4f4e2eacbb7b0457784f4fca1937f572c93603e9c4d9"
VECTORS = {
    "plain": (
        "",
        ["", "", ""],
        [
            FIRST,
            SECOND + "60a34e36ea82109f26cf2e5a5caf992b608d55c747f615e5a3425a7a19eefb8f",
            THIRD + "7e5ea11b16f3968710b23a3be3202dc1b5e1ce3c963347491e74f5c0768a9b42",
        ],
    ),
    "payloads": (
        "",
        ["746573745f6d73675f30", "746573745f6d73675f31", "746573745f6d73675f32"],
        [
            FIRST + "746573745f6d73675f30",
            SECOND + "72e7a2ba5123ac30618b3d205f5c2d17f50cbca216483ac56bcc78e33bf520303278db641e5e731b2e3a",
            THIRD + "f27e318e43ba630594c4d08eeb3b36d97c7377a2f4f9144b2f0c8095ad92140505b2ab53eff244b14138",
        ],
    ),
    "prologue": (
        "6e6f74736563726574",
        ["", "", ""],
        [
            FIRST,
            SECOND + "88f043d1e49a3289b1beeab8f96b0551a48cddf9f38b1a12e46c6908644198f3",
            THIRD + "5a04fa1f1c41fb3f00d496f242c1e44ce5b749b3d54bf74cea2dad086d601fb6",
        ],
    ),
}


def handshake(role: str, prologue: str = "") -> HandshakeState:
    static, ephemeral = (KeyPair.from_private(bytes.fromhex(KEYS[f"{role}_{kind}"])) for kind in ("static", "ephemeral"))
    return HandshakeState(initiator=role == "init", prologue=bytes.fromhex(prologue), static=static, ephemeral=ephemeral)


def complete(prologue: str, payloads: list[str]) -> tuple[list[str], HandshakeState, HandshakeState]:
    initiator, responder = handshake("init", prologue), handshake("resp", prologue)
    messages = []
    for step, payload in enumerate(payloads):
        writer, reader = (initiator, responder) if step % 2 == 0 else (responder, initiator)
        message = writer.write_message(lambda _, payload=payload: bytes.fromhex(payload))
        assert reader.read_message(message)[0].hex() == payload
        messages.append(message.hex())
    return messages, initiator, responder


@pytest.mark.parametrize("name", VECTORS)
def test_published_vectors_are_reproduced(name: str) -> None:
    prologue, payloads, ciphertexts = VECTORS[name]
    messages, initiator, responder = complete(prologue, payloads)
    assert messages == ciphertexts
    to_responder, from_responder = initiator.split()
    to_initiator, from_initiator = responder.split()
    for plaintext, expected, send, receive in (
        (
            b"yellowsubmarine",
            "a52ef02ba60e12696d1d6b9ef4245c88fca757b6134ad6e76b56e310a6adf6",
            to_responder,
            from_initiator,
        ),
        (
            b"submarineyellow",
            "2445aa438ebd649281c636cc7269ca82f1d9023d72520943aeabf909cdf521",
            to_initiator,
            from_responder,
        ),
    ):
        assert send.encrypt(plaintext).hex() == expected
        assert receive.decrypt(bytes.fromhex(expected)) == plaintext


def test_both_sides_hash_the_same_transcript_and_learn_the_static_keys() -> None:
    _, initiator, responder = complete("", ["", "", ""])
    assert initiator._symmetric.hash == responder._symmetric.hash
    assert responder.remote_static == KeyPair.from_private(bytes.fromhex(KEYS["init_static"])).public
    assert initiator.remote_static == KeyPair.from_private(bytes.fromhex(KEYS["resp_static"])).public


SMALL_ORDER = [
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0100000000000000000000000000000000000000000000000000000000000000",
    "e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800",
    "5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157",
    "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
]


@pytest.mark.parametrize("point", SMALL_ORDER)
def test_a_public_key_of_small_order_is_refused(point: str) -> None:
    responder = handshake("resp")
    responder.read_message(bytes.fromhex(point))
    with pytest.raises(RemoteProtocolError) as caught:
        responder.write_message(lambda _: b"")
    assert caught.value.reason == "low-order-key"


@pytest.mark.parametrize("length", range(32))
def test_a_message_too_short_for_its_key_is_refused(length: int) -> None:
    with pytest.raises(RemoteProtocolError, match="truncated"):
        handshake("resp").read_message(bytes(length))


def test_a_used_up_nonce_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise_session, "NONCE_MAX", 2)
    cipher = CipherState(bytes(32))
    assert cipher.encrypt(b"x") != cipher.encrypt(b"x")
    with pytest.raises(LocalProtocolError):
        cipher.encrypt(b"x")


def test_messages_out_of_turn_are_our_own_bug() -> None:
    with pytest.raises(LocalProtocolError):
        handshake("resp").write_message(lambda _: b"")
    with pytest.raises(LocalProtocolError):
        handshake("init").read_message(bytes(32))
    with pytest.raises(LocalProtocolError):
        handshake("init").split()
