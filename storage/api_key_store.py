"""API keys on disk: one SQLite file with the SHA-256 hash, the quotas and the last use of each key.

Each call opens the file anew, so that a running peer and the command `peer key` see each other's changes at once. The first key
creates the file. It stays after the last key is revoked, so that a peer never returns to serving without keys by itself.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Final

from protocol.errors import StorageError, UserError
from storage.durable_files import explain_os_errors, sync_directory

SECRET_PREFIX: Final = "tml-"  # the SDK `tinker` refuses keys with another beginning
SECRET_BYTES: Final = 32  # random bytes: nobody guesses them, so a hash without salt and without delay is enough
KEYS_MAX: Final = 1_000  # each request compares its key with all hashes, in about 2 ms for this number
BUSY_SECONDS: Final = 10.0  # timeout of a call that waits for another process; a write takes milliseconds

# Columns in the order of the fields of `ApiKey`, after the hash.
_SCHEMA: Final = """CREATE TABLE IF NOT EXISTS keys (
    secret_hash BLOB PRIMARY KEY, name TEXT UNIQUE NOT NULL, created_ms INTEGER NOT NULL, models_max INTEGER NOT NULL,
    stored_bytes_max INTEGER NOT NULL, tokens_per_minute_max INTEGER NOT NULL, last_use_ms INTEGER
) WITHOUT ROWID"""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """An API key without its secret. Its name is unique among the keys of a peer."""

    name: str
    created_ms: int
    models_max: int  # open runs
    stored_bytes_max: int  # bytes of stored requests and checkpoints
    tokens_per_minute_max: int
    last_use_ms: int | None = None


class ApiKeyStore:
    """The API keys in a file. Threads may share an object. Raises `StorageError` if the file cannot be read or written."""

    def __init__(self, path: Path) -> None:
        """Create an object for the file, which need not exist."""
        self.path = path

    def exists(self) -> bool:
        """Return whether a key was ever created."""
        with explain_os_errors(self.path, "access"):
            try:
                self.path.stat()
            except FileNotFoundError:
                return False
        return True

    def create_key(self, key: ApiKey) -> str:
        """Store a new key durably, and return its secret. Raises `UserError` if the name is in use, or for too many keys."""
        secret = SECRET_PREFIX + secrets.token_urlsafe(SECRET_BYTES)
        with explain_os_errors(self.path):
            self.path.touch(mode=0o600)
            sync_directory(self.path.parent)
        with self._transaction() as database:
            try:
                database.execute("INSERT INTO keys VALUES (?, ?, ?, ?, ?, ?, ?)", (hash_secret(secret), *astuple(key)))
            except sqlite3.IntegrityError:
                way_out = f"choose another name, or revoke that key with `peer key revoke {key.name}`"
                raise UserError(f"there is a key {key.name!r} already: {way_out}") from None
            if database.execute("SELECT count(*) FROM keys").fetchone()[0] > KEYS_MAX:
                raise UserError(f"this peer has {KEYS_MAX:,} keys, and {key.name!r} would be one more: revoke unused keys first")
        return secret

    def list_keys(self) -> tuple[ApiKey, ...]:
        """Return all keys, the oldest first."""
        return tuple(sorted(self._read_keys().values(), key=lambda key: (key.created_ms, key.name)))

    def find_key(self, secret: str) -> ApiKey | None:
        """Return the key with this secret, or None."""
        given = hash_secret(secret)
        # All hashes are compared, each in constant time, so that the duration tells nothing about them.
        found = [key for secret_hash, key in self._read_keys().items() if hmac.compare_digest(secret_hash, given)]
        return found[0] if found else None

    def record_use(self, name: str, now_ms: int) -> None:
        """Store the time of a key's last use."""
        with self._transaction() as database:
            database.execute("UPDATE keys SET last_use_ms = ? WHERE name = ?", (now_ms, name))

    def revoke_key(self, name: str) -> bool:
        """Delete a key durably. Return False if there is no key with this name."""
        if not self.exists():
            return False
        with self._transaction() as database:
            return database.execute("DELETE FROM keys WHERE name = ?", (name,)).rowcount == 1

    def _read_keys(self) -> dict[bytes, ApiKey]:
        """Return the keys by the hashes of their secrets."""
        if not self.exists():
            return {}
        with self._transaction() as database:
            return {secret_hash: ApiKey(*fields) for secret_hash, *fields in database.execute("SELECT * FROM keys")}

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection to the existing file. Its changes are durable after the `with` block, or undone if that fails."""
        try:
            place = f"{self.path.absolute().as_uri()}?mode=rw"
            with closing(sqlite3.connect(place, uri=True, timeout=BUSY_SECONDS)) as database, database:
                # Without EXTRA, SQLite does not sync the deletion of its journal, and a power failure could undo a revocation.
                database.execute("PRAGMA synchronous=EXTRA")
                database.execute(_SCHEMA)
                yield database
        except sqlite3.Error as error:
            way_out = "check the disk and the owner of the file; if it is damaged, move it away and create new keys"
            raise StorageError(f"cannot use {self.path} ({error}): {way_out}") from error


def hash_secret(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()
