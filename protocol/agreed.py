"""X25519: what two parties have in common if each knows the other's public key."""

from __future__ import annotations

from nacl import bindings
from nacl.exceptions import RuntimeError as SodiumError


def x25519_public_key(private: bytes) -> bytes:
    """Of any 32 bytes."""
    return bindings.crypto_scalarmult_base(private)


def x25519_shared_secret(private: bytes, public: bytes) -> bytes | None:
    """The same 32 bytes for both. None: the public key is of small order, and its owner chose it so."""
    try:
        return bindings.crypto_scalarmult(private, public)
    except SodiumError:
        return None
