"""One encrypted connection: bytes in, events out. Sans-IO; unusable after an error.

The handshake is `Noise_XX_25519_ChaChaPoly_SHA256` of the Noise Protocol Framework, revision 34, with the names of that document.

Both sides begin with an unencrypted preamble: magic, wire version, and a tag of the chain. Peers with different wire versions or
chain ids close the connection. The preamble explains to a person *why* two peers do not talk, and is not trusted. The prologue of
Noise repeats the preamble with the whole chain id, so that the handshake fails if the preamble was changed on the way. The three
handshake messages have fixed lengths. They are followed by frames: `length u16, ciphertext`.

The encrypted payloads of messages 2 and 3 authenticate the peers. Each payload contains the sender's Ed25519 key, and its
signature of (context, chain id, role, handshake hash). The hash covers the prologue, both ephemeral keys and the ciphertext of
the signer's static key. The keys that decrypt this ciphertext follow from the two ephemeral keys, so the hash also binds the
static key. Therefore:

- a signature is valid in one handshake only, since another handshake has other ephemeral keys and so another hash;
- a third party cannot put its own identity on a handshake, since the payload is encrypted with keys that need a private key of
  one of the two ends;
- both ends authenticate each other, or one of them fails. The responder's signature does not name the initiator. But the
  initiator's signature names the responder, whose encrypted identity is in the signed hash. No third party can write message 3
  for the ephemeral keys of two other peers;
- the role prevents the reflection of a signature to its author.
"""

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
from protocol.identity import WIRE_VERSION, Ed25519Verifier, Signer, Verifier, short_id, signing_preimage
from transport.wire.framing import FRAME_PLAINTEXT_MAX, TAG_BYTES, Inbox, Message, Outbox

PROTOCOL_NAME: Final = b"Noise_XX_25519_ChaChaPoly_SHA256"
DH_BYTES: Final = 32
NONCE_MAX: Final = 2**64 - 1  # nonce that the Noise specification reserves; no message uses it

_MESSAGES: Final = (  # tokens of the three messages of the pattern XX (section 7.5)
    ("e",),  # sent by the initiator
    ("e", "ee", "s", "es"),  # sent by the responder
    ("s", "se"),  # sent by the initiator
)

MAGIC: Final = b"folkmoot"
# Bytes of the chain's tag: enough to explain a wrong chain to a person; the prologue has the whole chain id.
CHAIN_TAG_BYTES: Final = 8
PREAMBLE_BYTES: Final = len(MAGIC) + 2 + CHAIN_TAG_BYTES
IDENTITY_BYTES: Final = 32 + 64  # Ed25519 key and signature
HANDSHAKE_BYTES: Final = (  # lengths of the three messages
    DH_BYTES,
    DH_BYTES + DH_BYTES + TAG_BYTES + IDENTITY_BYTES + TAG_BYTES,
    DH_BYTES + TAG_BYTES + IDENTITY_BYTES + TAG_BYTES,
)
LENGTH_BYTES: Final = 2
_DOMAIN: Final = "noise-identity"  # domain of signed handshake hashes: no message's tag equals it
_ROLES: Final = {True: b"initiator", False: b"responder"}


@dataclass(frozen=True, slots=True, repr=False)
class KeyPair:
    private: bytes
    public: bytes

    @classmethod
    def from_private(cls, private: bytes) -> KeyPair:
        return cls(private, bindings.crypto_scalarmult_base(private))


class CipherState:
    def __init__(self, key: bytes, nonce: int = 0) -> None:
        self._key = key
        self._nonce = nonce

    def split_by_priority(self, count: int) -> tuple[CipherState, ...]:
        """Split an unused state into one state per lane.

        Lanes have separate nonces, so that messages of one lane may overtake those of another (section 11.4).
        """
        assert self._nonce == 0, "these nonces are in use"
        return tuple(CipherState(self._key, lane * (NONCE_MAX // count)) for lane in range(count))

    def encrypt(self, plaintext: bytes, ad: bytes = b"") -> bytes:
        return bindings.crypto_aead_chacha20poly1305_ietf_encrypt(plaintext, ad, self._next_nonce(), self._key)

    def decrypt(self, ciphertext: bytes, ad: bytes = b"") -> bytes:
        try:
            return bindings.crypto_aead_chacha20poly1305_ietf_decrypt(ciphertext, ad, self._next_nonce(), self._key)
        except CryptoError:
            raise RemoteProtocolError("bad-tag", "a ciphertext failed authentication") from None

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
    """The state of a handshake at one end.

    Call `write_message` and `read_message` in turn until `complete`, then `split` once.
    """

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

    def write_message(self, payload: Callable[[bytes], bytes]) -> bytes:
        """Return the next handshake message. `payload` makes its payload from the hash of the handshake before the payload."""
        if self.complete or self._initiator_writes() != self._initiator:
            raise LocalProtocolError("it is not our turn in the handshake")
        message = b"".join([self._write_token(token) for token in _MESSAGES[self._step]])
        message += self._symmetric.encrypt_and_hash(payload(self._symmetric.hash))
        self._step += 1
        return message

    def read_message(self, message: bytes) -> tuple[bytes, bytes]:
        """Return the payload, and the hash of the handshake before it. Raises `RemoteProtocolError` for an invalid message."""
        if self.complete or self._initiator_writes() == self._initiator:
            raise LocalProtocolError("it is not the peer's turn in the handshake")
        for token in _MESSAGES[self._step]:
            message = message[self._read_token(token, message) :]
        hash_before = self._symmetric.hash
        payload = self._symmetric.decrypt_and_hash(message)
        self._step += 1
        return payload, hash_before

    def split(self) -> tuple[CipherState, CipherState]:
        """Return the ciphers to send and to receive with."""
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
        """Mix a shared secret into the keys.

        The token `es`, at either end, means the initiator's ephemeral and the responder's static key.
        """
        mine = token[0] if self._initiator else token[1]
        theirs = token[1] if self._initiator else token[0]
        key_pair = self._e if mine == "e" else self._s
        public = self._re if theirs == "e" else self.remote_static
        try:
            self._symmetric.mix_key(bindings.crypto_scalarmult(key_pair.private, public))
        except SodiumError:  # libsodium rejects an all-zero secret, which only the peer can cause.
            raise RemoteProtocolError("low-order-key", "a public key of small order") from None


def _hkdf(chaining_key: bytes, material: bytes) -> tuple[bytes, bytes]:
    temporary = hmac.digest(chaining_key, material, "sha256")
    first = hmac.digest(temporary, b"\x01", "sha256")
    return first, hmac.digest(temporary, first + b"\x02", "sha256")


def chain_tag(chain_id: bytes) -> bytes:
    """Return the public tag of a network, which does not reveal its chain id."""
    return hashlib.sha256(chain_id).digest()[:CHAIN_TAG_BYTES]


@dataclass(frozen=True, slots=True)
class PeerAuthenticated:
    """The event that the peer has proven its key. From now on, no third party can read or write on this connection."""

    peer: bytes
    incarnation: bytes  # the peer's static Noise key, which is new at each start of its process


class NoiseSession:
    """One side of an encrypted connection.

    `expected` is the only accepted key of the peer; None accepts any. `context` is a part of the prologue, so that both ends
    agree on the transport. Key pairs are arguments, since this module has no source of randomness. The ephemeral key pair must be
    new for each session.
    """

    def __init__(
        self,
        identity: Signer,
        chain_id: bytes,
        *,
        initiator: bool,
        static: KeyPair,
        ephemeral: KeyPair,
        expected: bytes | None = None,
        verifier: Verifier | None = None,
        context: bytes = b"",
    ) -> None:
        self.outbox, self.inbox = Outbox(), Inbox()
        self.peer: bytes | None = None
        self._identity, self._chain_id = identity, chain_id
        self._initiator, self._expected, self._context = initiator, expected, context
        self._verifier = verifier or Ed25519Verifier()
        self._static, self._ephemeral = static, ephemeral
        # (cipher to send, cipher to receive); None: the handshake is not complete.
        self._ciphers: tuple[CipherState, CipherState] | None = None
        self._buffer = bytearray()
        self._next: Callable[[], list[PeerAuthenticated | Message] | None] = self._read_preamble
        self._step = 0  # number of the next handshake message
        self._dead = False
        self._ready = b""
        if initiator:
            self._open()

    def receive(self, data: bytes) -> list[PeerAuthenticated | Message]:
        """Return the events that `data` completes. Raises `RemoteProtocolError`, and after that only `LocalProtocolError`."""
        if self._dead:
            raise LocalProtocolError("this session has failed")
        self._buffer += data
        events: list[PeerAuthenticated | Message] = []
        try:
            while (more := self._next()) is not None:
                events += more
        except RemoteProtocolError:
            self._dead = True
            raise
        return events

    def receive_eof(self) -> None:
        """Record that the peer sends no more bytes. Raises `RemoteProtocolError` if a handshake or frame is incomplete."""
        self._dead = True
        if self._buffer or self.peer is None:
            raise RemoteProtocolError("truncated", "the connection ended inside a handshake or frame")

    def data_to_send(self, frame_bytes: int = FRAME_PLAINTEXT_MAX) -> bytes:
        """Return handshake bytes, or one sealed frame with at most `frame_bytes` of plaintext; empty if nothing is to be sent."""
        data, self._ready = self._ready, b""
        if data or self._dead or self._ciphers is None:
            return data
        plaintext = self.outbox.next_frame(frame_bytes)
        if not plaintext:
            return b""
        ciphertext = self._ciphers[0].encrypt(plaintext)
        return len(ciphertext).to_bytes(LENGTH_BYTES, "big") + ciphertext

    # Handshake -------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        prologue = MAGIC + WIRE_VERSION.to_bytes(2, "big") + self._chain_id + self._context
        self._handshake = HandshakeState(
            initiator=self._initiator, prologue=prologue, static=self._static, ephemeral=self._ephemeral
        )
        self._ready = self._preamble()
        if self._initiator:
            self._write_handshake()

    def _preamble(self) -> bytes:
        return MAGIC + WIRE_VERSION.to_bytes(2, "big") + chain_tag(self._chain_id)

    def _read_preamble(self) -> list[PeerAuthenticated | Message] | None:
        theirs = bytes(self._buffer[:PREAMBLE_BYTES])
        # The first wrong byte is refused at once, since another program may never send as many bytes as a preamble has.
        if theirs[: len(MAGIC)] != MAGIC[: len(theirs)]:
            raise RemoteProtocolError("not-folkmoot", "the program at the other end is not a Folkmoot peer")
        if len(theirs) < PREAMBLE_BYTES:
            return None
        version = int.from_bytes(theirs[len(MAGIC) : len(MAGIC) + 2], "big")
        if not self._initiator:
            self._open()  # Even a refused peer gets the preamble, which shows the reason.
        if version != WIRE_VERSION:
            raise RemoteProtocolError(
                "wrong-version", f"the peer speaks wire version {version}, this peer {WIRE_VERSION}: update the older one"
            )
        if theirs != self._preamble():
            raise RemoteProtocolError("wrong-chain", "the peer belongs to another network")
        self._take(PREAMBLE_BYTES)
        self._step = 1 if self._initiator else 0
        self._next = self._read_handshake
        return []

    def _read_handshake(self) -> list[PeerAuthenticated | Message] | None:
        if len(self._buffer) < HANDSHAKE_BYTES[self._step]:
            return None
        message = self._take(HANDSHAKE_BYTES[self._step])
        try:
            payload, signed_hash = self._handshake.read_message(message)
        except RemoteProtocolError as error:
            reason = "handshake" if error.reason == "bad-tag" else error.reason
            raise RemoteProtocolError(reason, str(error)) from None
        if self._step:
            self._check_identity(payload, signed_hash)
        if not self._handshake.complete:
            self._write_handshake()
        self._step += 2
        if not self._handshake.complete:
            return []
        return self._establish()

    def _check_identity(self, payload: bytes, signed_hash: bytes) -> None:
        key, signature = payload[:32], payload[32:]
        signed = signing_preimage(_DOMAIN, self._chain_id, _ROLES[not self._initiator] + signed_hash)
        if not self._verifier.verify(key, signed, signature):
            raise RemoteProtocolError("bad-signature", f"the signature of {short_id(key)} is invalid")
        if self._expected is not None and key != self._expected:
            raise RemoteProtocolError("wrong-peer", f"peer {short_id(key)} answers there, expected {short_id(self._expected)}")
        self.peer = key

    def _write_handshake(self) -> None:
        first = self._initiator and self._step == 0
        self._ready += self._handshake.write_message(lambda _: b"") if first else self._handshake.write_message(self._prove)

    def _prove(self, handshake_hash: bytes) -> bytes:
        body = _ROLES[self._initiator] + handshake_hash
        return self._identity.public + self._identity.sign(signing_preimage(_DOMAIN, self._chain_id, body))

    def _establish(self) -> list[PeerAuthenticated | Message]:
        assert self.peer is not None, "message 2 and message 3 both carry an identity"
        self._ciphers = self._handshake.split()
        self._next = self._read_frame
        return [PeerAuthenticated(self.peer, self._handshake.remote_static)]

    # Frames ----------------------------------------------------------------------------------------------------------

    def _read_frame(self) -> list[PeerAuthenticated | Message] | None:
        if len(self._buffer) < LENGTH_BYTES:
            return None
        length = int.from_bytes(self._buffer[:LENGTH_BYTES], "big")
        if length <= TAG_BYTES:
            raise RemoteProtocolError("bad-frame", f"a frame of {length} bytes has no content")
        if len(self._buffer) < LENGTH_BYTES + length:
            return None
        assert self._ciphers is not None
        ciphertext = self._take(length, skip=LENGTH_BYTES)
        return list(self.inbox.receive_frame(self._ciphers[1].decrypt(ciphertext)))

    def _take(self, length: int, skip: int = 0) -> bytes:
        data = bytes(memoryview(self._buffer)[skip : skip + length])
        del self._buffer[: skip + length]
        return data
