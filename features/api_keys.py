"""API keys of programs: proof that a program may use this peer, and quotas for it."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from typing import Final

from protocol.errors import StorageError
from storage.api_key_store import KEYS_MAX, ApiKey, ApiKeyStore

BUCKET_SECONDS: Final = 60.0  # an unused minute may be spent at once
USE_RECORD_MS: Final = 60_000  # least time between two records of a key's use, because each record waits for the disk


class ApiKeys:
    """The API keys of a running peer. Threads may share an object. `find_key` and `is_open` read the disk at each call."""

    def __init__(self, store: ApiKeyStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        # Unspent tokens of a key and the time of that count, by the key's name, the least recently used first.
        self._buckets: dict[str, tuple[float, float]] = {}

    def is_open(self) -> bool:
        """Return whether no key was ever created. Programs on this machine are then served with any key, or without one."""
        return not self._store.exists()

    def find_key(self, secret: str) -> ApiKey | None:
        """Return the key with this secret and record its use. Return None for an unknown or revoked secret."""
        key, now_ms = self._store.find_key(secret), time.time_ns() // 1_000_000
        if key is not None and now_ms - (key.last_use_ms or 0) >= USE_RECORD_MS:
            with contextlib.suppress(StorageError):  # a valid key is served from a full disk, too
                self._store.record_use(key.name, now_ms)
        return key

    def spend_tokens(self, key: ApiKey, count: int, now_seconds: float) -> str | None:
        """Spend `count` of the key's tokens, all or none, and return None. Return the reason if the quota does not allow them.

        `now_seconds` is of one clock for all calls. The count is in memory only, so that a restart gives each key a full minute.
        """
        assert count >= 0
        quota = key.tokens_per_minute_max
        if count > quota:
            return f"{count:,} tokens at once are more than the quota of the key {key.name!r}, {quota:,} a minute: send fewer"
        with self._lock:
            unspent, before = self._buckets.pop(key.name, (float(quota), now_seconds))
            now_seconds = max(now_seconds, before)  # threads may come in another order than they read the clock
            unspent = min(float(quota), unspent + (now_seconds - before) * quota / BUCKET_SECONDS)
            is_allowed = count <= unspent
            self._buckets[key.name] = (unspent - count if is_allowed else unspent), now_seconds
            if len(self._buckets) > KEYS_MAX:  # some of these keys are revoked
                del self._buckets[next(iter(self._buckets))]
        if is_allowed:
            return None
        seconds = math.ceil((count - unspent) * BUCKET_SECONDS / quota)
        return f"the key {key.name!r} has used up its quota of {quota:,} tokens a minute: try again in {seconds} s"
