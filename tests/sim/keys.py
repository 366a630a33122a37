"""Keyed hashes in place of Ed25519: a signature needs a call of `sign` with the signer itself."""

from __future__ import annotations

import hashlib

from protocol.identity import Ed25519Verifier, Identity, Signer, Verifier


class FastSigner:
    def __init__(self, name: str, salt: bytes = b"\x00") -> None:
        self.public = hashlib.sha256(b"public " + name.encode()).digest()
        self._name, self._salt = name, salt

    def sign(self, data: bytes) -> bytes:
        return _signature(self.public, data, self._salt)

    def again(self) -> FastSigner:
        """Return the same key with other signature bytes, as most schemes allow."""
        return FastSigner(self._name, b"\x01")


class FastVerifier:
    def verify(self, public: bytes, data: bytes, signature: bytes) -> bool:
        return signature == _signature(public, data, signature[-1:])


def _signature(public: bytes, data: bytes, salt: bytes) -> bytes:
    return hashlib.blake2b(data, key=public, salt=salt, digest_size=63).digest() + salt


def signers(count: int, ed25519: bool) -> list[Signer]:
    """Return signers in ascending order of their keys."""
    made: list[Signer] = [
        Identity(hashlib.sha256(f"peer {i}".encode()).digest()) if ed25519 else FastSigner(f"peer {i}") for i in range(count)
    ]
    return sorted(made, key=lambda signer: signer.public)


def another(like: Signer, name: str) -> Signer:
    """Return an unknown key of the same scheme."""
    if isinstance(like, FastSigner):
        return FastSigner(name)
    return Identity(hashlib.sha256(name.encode()).digest())


def verifier(ed25519: bool) -> Verifier:
    return Ed25519Verifier() if ed25519 else FastVerifier()
