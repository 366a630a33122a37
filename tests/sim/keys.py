"""Keyed hashes in place of Ed25519: whoever does not call `sign` with the signer at hand cannot make a signature."""

from __future__ import annotations

import hashlib


class FastSigner:
    def __init__(self, name: str) -> None:
        self.public = hashlib.sha256(b"public " + name.encode()).digest()

    def sign(self, data: bytes) -> bytes:
        return _signature(self.public, data)


class FastVerifier:
    def verify(self, public: bytes, data: bytes, signature: bytes) -> bool:
        return signature == _signature(public, data)


def _signature(public: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(data, key=public, digest_size=64).digest()
