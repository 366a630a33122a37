"""`Noise_XX_25519_ChaChaPoly_SHA256` after the Noise Protocol Framework, revision 34. Sans-IO; the names are the document's."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from nacl import bindings
from nacl.exceptions import CryptoError
from nacl.exceptions import RuntimeError as SodiumError

from protocol.errors import LocalProtocolError, RemoteProtocolError

PROTOCOL_NAME: Final = b"Noise_XX_25519_ChaChaPoly_SHA256"
DH_BYTES: Final = 32
TAG_BYTES: Final = 16
NONCE_MAX: Final = 2**64 - 1  # reserved by the document: never used for a message

_MESSAGES: Final = (  # section 7.5
    ("e",),  # -> from the initiator
    ("e", "ee", "s", "es"),  # <-
    ("s", "se"),  # ->
)


@dataclass(frozen=True, slots=True, repr=False)
class KeyPair:
    private: bytes
    public: bytes

    @classmethod
    def from_private(cls, private: bytes) -> KeyPair:
        return cls(private, bindings.crypto_scalarmult_base(private))


def dh(key_pair: KeyPair, public: bytes) -> bytes:
    try:
        return bindings.crypto_scalarmult(key_pair.private, public)
    except SodiumError:  # libsodium refuses an all-zero result: the other side would have chosen the secret
        raise RemoteProtocolError("low-order-key", "a public key of small order") from None


class CipherState:
    def __init__(self, key: bytes, nonce: int = 0) -> None:
        self._key = key
        self._nonce = nonce

    def split_by_priority(self, count: int) -> tuple[CipherState, ...]:
        """Of a fresh state: for messages that may overtake those of other lanes (section 11.4). Each has nonces of its own."""
        assert self._nonce == 0, "these nonces are in use"
        return tuple(CipherState(self._key, lane * (NONCE_MAX // count)) for lane in range(count))

    def encrypt(self, plaintext: bytes, ad: bytes = b"") -> bytes:
        return bindings.crypto_aead_chacha20poly1305_ietf_encrypt(plaintext, ad, self._next_nonce(), self._key)

    def decrypt(self, ciphertext: bytes, ad: bytes = b"") -> bytes:
        try:
            return bindings.crypto_aead_chacha20poly1305_ietf_decrypt(ciphertext, ad, self._next_nonce(), self._key)
        except CryptoError:
            raise RemoteProtocolError("bad-tag", "a ciphertext is not what the peer encrypted next") from None

    def _next_nonce(self) -> bytes:
        if self._nonce == NONCE_MAX:
            raise LocalProtocolError("this connection's nonces are used up")
        nonce = bytes(4) + self._nonce.to_bytes(8, "little")
        self._nonce += 1
        return nonce


class SymmetricState:
    def __init__(self) -> None:
        assert len(PROTOCOL_NAME) == 32, "a name of another length would be hashed or padded"
        self.hash = self._chaining_key = PROTOCOL_NAME
        self._cipher: CipherState | None = None

    def mix_hash(self, data: bytes) -> None:
        self.hash = hashlib.sha256(self.hash + data).digest()

    def mix_key(self, secret: bytes) -> None:
        self._chaining_key, key = _hkdf(self._chaining_key, secret)
        self._cipher = CipherState(key)

    def encrypt_and_hash(self, plaintext: bytes) -> bytes:
        ciphertext = plaintext if self._cipher is None else self._cipher.encrypt(plaintext, self.hash)
        self.mix_hash(ciphertext)
        return ciphertext

    def decrypt_and_hash(self, ciphertext: bytes) -> bytes:
        plaintext = ciphertext if self._cipher is None else self._cipher.decrypt(ciphertext, self.hash)
        self.mix_hash(ciphertext)
        return plaintext

    def split(self) -> tuple[CipherState, CipherState]:
        first, second = _hkdf(self._chaining_key, b"")
        return CipherState(first), CipherState(second)


class HandshakeState:
    """One side of one handshake. Call `write_message` and `read_message` in turn until `complete`, then `split` once."""

    def __init__(self, *, initiator: bool, prologue: bytes, static: KeyPair, ephemeral: KeyPair) -> None:
        self._initiator = initiator
        self._s, self._e = static, ephemeral
        self._re = b""
        self.remote_static = b""
        self._symmetric = SymmetricState()
        self._symmetric.mix_hash(prologue)
        self._step = 0

    @property
    def complete(self) -> bool:
        return self._step == len(_MESSAGES)

    @property
    def handshake_hash(self) -> bytes:
        return self._symmetric.hash

    def write_message(self, payload: Callable[[bytes], bytes]) -> bytes:
        """The next message. `payload` gets the handshake hash over everything before it, this message's keys included."""
        if self.complete or self._initiator_writes() != self._initiator:
            raise LocalProtocolError("not our turn in the handshake")
        message = b"".join([self._write_token(token) for token in _MESSAGES[self._step]])
        message += self._symmetric.encrypt_and_hash(payload(self._symmetric.hash))
        self._step += 1
        return message

    def read_message(self, message: bytes) -> tuple[bytes, bytes]:
        """The payload, and the handshake hash over everything before it. Raises `RemoteProtocolError`."""
        if self.complete or self._initiator_writes() == self._initiator:
            raise LocalProtocolError("not the peer's turn in the handshake")
        for token in _MESSAGES[self._step]:
            message = message[self._read_token(token, message) :]
        hash_before = self._symmetric.hash
        payload = self._symmetric.decrypt_and_hash(message)
        self._step += 1
        return payload, hash_before

    def split(self) -> tuple[CipherState, CipherState]:
        """The ciphers to send and to receive with."""
        if not self.complete:
            raise LocalProtocolError("the handshake is not complete")
        first, second = self._symmetric.split()
        return (first, second) if self._initiator else (second, first)

    def _initiator_writes(self) -> bool:
        return self._step % 2 == 0

    def _write_token(self, token: str) -> bytes:
        if token == "e":
            self._symmetric.mix_hash(self._e.public)
            return self._e.public
        if token == "s":
            return self._symmetric.encrypt_and_hash(self._s.public)
        self._mix_dh(token)
        return b""

    def _read_token(self, token: str, message: bytes) -> int:
        if token == "e":
            self._re = message[:DH_BYTES]
            self._check_length(self._re, DH_BYTES)
            self._symmetric.mix_hash(self._re)
            return DH_BYTES
        if token == "s":
            length = DH_BYTES + TAG_BYTES
            self._check_length(message[:length], length)
            self.remote_static = self._symmetric.decrypt_and_hash(message[:length])
            return length
        self._mix_dh(token)
        return 0

    def _check_length(self, part: bytes, length: int) -> None:
        if len(part) != length:
            raise RemoteProtocolError("truncated", "a handshake message is too short")

    def _mix_dh(self, token: str) -> None:
        """`es` is between the initiator's ephemeral and the responder's static key, whoever computes it."""
        mine = token[0] if self._initiator else token[1]
        theirs = token[1] if self._initiator else token[0]
        key_pair = self._e if mine == "e" else self._s
        public = self._re if theirs == "e" else self.remote_static
        self._symmetric.mix_key(dh(key_pair, public))


def _hkdf(chaining_key: bytes, material: bytes) -> tuple[bytes, bytes]:
    temporary = hmac.digest(chaining_key, material, "sha256")
    first = hmac.digest(temporary, b"\x01", "sha256")
    return first, hmac.digest(temporary, first + b"\x02", "sha256")
