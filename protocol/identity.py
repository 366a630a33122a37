"""Ed25519 identities and the one way anything is signed.

What is signed is `"folkmoot/2/" + domain + 0x00 + chain id + body`: the domain is the message's tag, so that no signature given
for one purpose, or on one chain, can be used for another.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, TypeVar

from nacl import bindings, exceptions
from nacl.public import PublicKey, SealedBox
from nacl.signing import SigningKey, VerifyKey

from protocol.codec import Digest, Key, Length, SignatureBytes, decode_message, encode
from protocol.errors import RemoteProtocolError, UserError
from protocol.limits import MESSAGE_BYTES_MAX

M = TypeVar("M")

WIRE_VERSION = 3  # of what peers say on a link: ends of other versions part
VERIFIED_SIGNATURES_MAX = 8_192  # a block of COST_PER_BLOCK_MAX, and heights of VOTERS_MAX votes: 2 MB
SIGNED_VERSION = 2  # part of all that is signed. It stays: blocks of every later release are verified with it


@dataclass(frozen=True, slots=True)
class Signed:
    """A message as it was signed: the received bytes stay together with their signature and are never re-encoded."""

    body: Annotated[bytes, Length(1, MESSAGE_BYTES_MAX)]
    signer: Key
    signature: SignatureBytes


class Signer(Protocol):
    """Whatever can sign for one key; the simulator injects a fast one."""

    @property
    def public(self) -> bytes: ...

    def sign(self, data: bytes) -> bytes: ...


class Verifier(Protocol):
    def verify(self, public: bytes, data: bytes, signature: bytes) -> bool: ...


class Identity:
    """An Ed25519 key pair, made from its 32-byte seed."""

    def __init__(self, seed: bytes) -> None:
        self._key = SigningKey(seed)
        self.public: bytes = bytes(self._key.verify_key)

    @classmethod
    def generate(cls) -> Identity:
        return cls(bytes(SigningKey.generate()))

    @property
    def seed(self) -> bytes:
        return bytes(self._key)

    def sign(self, data: bytes) -> bytes:
        return self._key.sign(data).signature

    def unseal(self, sealed: bytes) -> bytes | None:
        """What was sealed for this identity; None if this was not."""
        try:
            return SealedBox(self._key.to_curve25519_private_key()).decrypt(sealed)
        except exceptions.CryptoError:
            return None


class Ed25519Verifier:
    """Stateless verification with libsodium, which refuses small-order keys and non-canonical signatures."""

    def verify(self, public: bytes, data: bytes, signature: bytes) -> bool:
        try:
            _verify_key(public).verify(data, signature)
        except (exceptions.BadSignatureError, exceptions.ValueError, exceptions.TypeError):
            return False
        return True


class RecentDigests:
    """The digests that were added or found last, `count_max` of them. Each takes about 250 bytes.

    Threads may share it: each step is one operation of a dictionary, and another thread may have removed the digest in between.
    """

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._digests: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._digests)

    def __contains__(self, digest: bytes) -> bool:
        try:
            self._digests.move_to_end(digest)
        except KeyError:
            return False
        return True

    def add(self, digest: bytes) -> None:
        self._digests[digest] = None
        while len(self._digests) > self._count_max:
            with contextlib.suppress(KeyError):
                self._digests.popitem(last=False)


class CachingVerifier:
    """Checks each signature once: the votes seen one by one come back inside certificates. Only good ones are kept."""

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier
        self._good = RecentDigests(VERIFIED_SIGNATURES_MAX)

    def verify(self, public: bytes, data: bytes, signature: bytes) -> bool:
        entry = hashlib.sha256(public + signature + data).digest()
        if entry in self._good:
            return True
        if not self._verifier.verify(public, data, signature):
            return False
        self._good.add(entry)
        return True


_verify_key = functools.lru_cache(maxsize=1024)(VerifyKey)


def seal(public: bytes, data: bytes) -> bytes | None:
    """Only the identity with this key unseals it. None: libsodium takes no such key, and its owner chose it so."""
    try:
        return SealedBox(_sealing_key(public)).encrypt(data)
    except exceptions.CryptoError:
        return None


@functools.lru_cache(maxsize=1024)
def _sealing_key(public: bytes) -> PublicKey:
    return _verify_key(public).to_curve25519_public_key()


def signing_preimage(domain: str, chain_id: bytes, body: bytes) -> bytes:
    return _prefix(domain, chain_id) + body


@functools.lru_cache(maxsize=1024)
def _prefix(domain: str, chain_id: bytes) -> bytes:
    return b"folkmoot/%d/" % SIGNED_VERSION + domain.encode() + b"\x00" + chain_id


def sign_message(signer: Signer, chain_id: Digest, message: Any) -> Signed:
    body = encode(message)
    return Signed(body, signer.public, signer.sign(signing_preimage(message.TAG, chain_id, body)))


def derive_secret(signer: Signer, domain: str, chain_id: Digest, body: bytes) -> bytes:
    """32 bytes that only this signer can find, and finds again: the hash of a signature that is never shown to anybody.

    Ed25519 signatures are deterministic (RFC 8032), so nothing has to be stored. No message has `domain` as its tag.
    """
    return hashlib.sha256(signer.sign(signing_preimage(domain, chain_id, body))).digest()


def open_signed(signed: Signed, chain_id: Digest, verifier: Verifier, kinds: tuple[type[M], ...]) -> M:
    """The signed message, after checking type, form and signature; `RemoteProtocolError` otherwise."""
    message = decode_message(signed.body, kinds)
    tag: str = getattr(message, "TAG")  # noqa: B009 - TAG is what makes a dataclass a message
    if not verifier.verify(signed.signer, signing_preimage(tag, chain_id, signed.body), signed.signature):
        raise RemoteProtocolError("bad-signature", f"{tag} of {short_id(signed.signer)}")
    return message


@functools.lru_cache(maxsize=1024)
def peer_id(public: bytes) -> str:
    """The full, typeable form of a public key: 52 letters and digits."""
    return base64.b32encode(public).decode().lower().rstrip("=")


def short_id(public: bytes) -> str:
    """The form people see: the first eight characters of `peer_id`."""
    return peer_id(public)[:8]


def parse_peer_id(text: str) -> bytes:
    """The public key of a full peer id. Raises `UserError` naming the text."""
    try:
        public = base64.b32decode(text.strip().upper() + "====")
    except ValueError:
        public = b""
    if len(public) != 32 or peer_id(public) != text.strip().lower():
        raise UserError(f"{text!r} is not a peer id: expected the 52 characters that `peer identity` prints on its machine")
    return public


# X25519: a secret that two parties share if each knows the other's public key ------------------------------------------


def x25519_public_key(private: bytes) -> bytes:
    """Of any 32 bytes."""
    return bindings.crypto_scalarmult_base(private)


def x25519_shared_secret(private: bytes, public: bytes) -> bytes | None:
    """The same 32 bytes for both. None: the public key is of small order, and its owner chose it so."""
    try:
        return bindings.crypto_scalarmult(private, public)
    except exceptions.RuntimeError:
        return None
