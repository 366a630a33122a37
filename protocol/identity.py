"""Ed25519 identities, and the only code that signs and verifies messages.

The signed bytes are `"folkmoot/2/" + domain + 0x00 + chain id + body`. The domain is the message's tag. A signature for one
purpose and one chain is invalid for any other.
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

WIRE_VERSION = 3  # version of the messages on a link: peers with different versions disconnect
# Cached signatures: enough for a block of COST_PER_BLOCK_MAX and some heights of VOTERS_MAX voters, in 2 MB.
VERIFIED_SIGNATURES_MAX = 8_192
SIGNED_VERSION = 2  # version in all signed bytes, which never changes: every later release verifies old blocks with it


@dataclass(frozen=True, slots=True)
class Signed:
    """A signed message. The received bytes stay with their signature and are never encoded again."""

    body: Annotated[bytes, Length(1, MESSAGE_BYTES_MAX)]
    signer: Key
    signature: SignatureBytes


class Signer(Protocol):
    """A signer with one key. The simulator uses a fast implementation."""

    @property
    def public(self) -> bytes: ...

    def sign(self, data: bytes) -> bytes: ...


class Verifier(Protocol):
    def verify(self, public: bytes, data: bytes, signature: bytes) -> bool: ...


class Identity:
    """An Ed25519 key pair from a seed of 32 bytes."""

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
        """Decrypt data that was sealed for this identity. Return None for any other data."""
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
    """An LRU set of at most `count_max` digests. A digest takes about 250 bytes.

    Threads may share it: each step is one dictionary operation. Between two steps, another thread may remove the digest.
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
    """A verifier that caches valid signatures, because signatures of single votes appear again in certificates."""

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
    """Encrypt data so that only the identity with this key can decrypt it. None: the key is weak, and libsodium refuses it."""
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
    """Return 32 bytes that only this signer can derive: the hash of a signature that the signer never sends.

    Ed25519 signatures are deterministic (RFC 8032), so the secret need not be stored. `domain` must not be a message's tag.
    """
    return hashlib.sha256(signer.sign(signing_preimage(domain, chain_id, body))).digest()


def open_signed(signed: Signed, chain_id: Digest, verifier: Verifier, kinds: tuple[type[M], ...]) -> M:
    """Return the decoded message of a signed message.

    Raises `RemoteProtocolError` if its type, encoding or signature is wrong.
    """
    message = decode_message(signed.body, kinds)
    tag: str = getattr(message, "TAG")  # noqa: B009 - TAG is what makes a dataclass a message
    if not verifier.verify(signed.signer, signing_preimage(tag, chain_id, signed.body), signed.signature):
        raise RemoteProtocolError("bad-signature", f"{tag} of {short_id(signed.signer)}")
    return message


@functools.lru_cache(maxsize=1024)
def peer_id(public: bytes) -> str:
    """Return the peer id of a public key, in a form that people can type: 52 letters and digits."""
    return base64.b32encode(public).decode().lower().rstrip("=")


def short_id(public: bytes) -> str:
    """Return the first eight characters of the key's `peer_id`, which pages and logs show."""
    return peer_id(public)[:8]


def parse_peer_id(text: str) -> bytes:
    """Return the public key of a complete peer id. Raises `UserError` with the text if the text is no peer id."""
    try:
        public = base64.b32decode(text.strip().upper() + "====")
    except ValueError:
        public = b""
    if len(public) != 32 or peer_id(public) != text.strip().lower():
        raise UserError(f"{text!r} is not a peer id: expected the 52 characters that `peer identity` prints on its machine")
    return public


# X25519: two parties share a secret if each knows the other's public key -----------------------------------------------


def x25519_public_key(private: bytes) -> bytes:
    """Return the X25519 public key of a private key, which may be any 32 bytes."""
    return bindings.crypto_scalarmult_base(private)


def x25519_shared_secret(private: bytes, public: bytes) -> bytes | None:
    """Return the 32 bytes that both parties share. None: the public key has small order, so its owner chose it on purpose."""
    try:
        return bindings.crypto_scalarmult(private, public)
    except exceptions.RuntimeError:
        return None
