"""Accounts of custodial annotators: a name, and a key that this peer keeps under the person's passphrase.

The key's seed is sealed (XSalsa20-Poly1305) under Argon2id of the passphrase (RFC 9106), both as libsodium has them. Somebody who
has the file guesses at the price of one Argon2id each.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from nacl.exceptions import CryptoError
from nacl.pwhash import argon2id
from nacl.secret import SecretBox
from nacl.utils import random

from curation.service.sqlite_database import open_database
from protocol.identity import Identity

PASSES: Final = argon2id.OPSLIMIT_INTERACTIVE
MEMORY_BYTES: Final = argon2id.MEMLIMIT_INTERACTIVE  # 64 MiB: a peer on a small machine has them, once at a time
_SCHEMA = "CREATE TABLE IF NOT EXISTS accounts (name TEXT PRIMARY KEY, salt BLOB NOT NULL, sealed BLOB NOT NULL) WITHOUT ROWID"


class CustodialAccounts:
    """`create_account` and `open_account` take a tenth of a second and 64 MiB: one at a time, in a thread."""

    def __init__(self, folder: Path) -> None:
        path = folder / "accounts.sqlite"
        path.touch(mode=0o600)
        self._database = open_database(path, _SCHEMA)

    def close(self) -> None:
        self._database.close()

    def create_account(self, name: str, passphrase: str) -> Identity | None:
        """A new account, on the disk; or the one that there is. None if that one has another passphrase."""
        salt, identity = random(argon2id.SALTBYTES), Identity.generate()
        sealed = _box(passphrase, salt).encrypt(identity.seed)
        made = self._database.execute("INSERT OR IGNORE INTO accounts VALUES (?, ?, ?)", (name, salt, bytes(sealed)))
        return identity if made.rowcount else self.open_account(name, passphrase)

    def open_account(self, name: str, passphrase: str) -> Identity | None:
        """None if there is no such account, or it has another passphrase."""
        found = self._database.execute("SELECT salt, sealed FROM accounts WHERE name = ?", (name,)).fetchone()
        salt, sealed = found or (bytes(argon2id.SALTBYTES), b"")  # a name that is nobody's takes as long
        try:
            return Identity(_box(passphrase, salt).decrypt(sealed))
        except (CryptoError, ValueError):
            return None

    def delete_account(self, name: str) -> None:
        self._database.execute("DELETE FROM accounts WHERE name = ?", (name,))


def _box(passphrase: str, salt: bytes) -> SecretBox:
    key = argon2id.kdf(SecretBox.KEY_SIZE, passphrase.encode(), salt, opslimit=PASSES, memlimit=MEMORY_BYTES)
    return SecretBox(key)
