"""How a table is read from a store that has gone on since.

A store writes slots again, while somebody may still read an older table, a snapshot for example. What stood in these slots is
then kept in memory by the version of the older table. When nobody holds that table any more, its version goes, and these data
with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from protocol.errors import StorageError


class BucketStore(Protocol):
    """Where buckets are that are not in memory."""

    def read_bucket(self, slot: int, hash: bytes) -> bytes | None:
        """The data of the bucket in this slot. None: another one has been put there. Raises `StorageError`."""

    def missing_bucket_error(self) -> StorageError:
        """There is no bucket of that hash where one must be."""


class StoreVersion:
    """What a store holds after one commit, for whoever reads a tree of it later. Newer versions do not know the older ones."""

    __slots__ = ("_following", "_store", "_superseded")

    def __init__(self, store: BucketStore) -> None:
        self._store = store
        # By slot: hash and data of the bucket that the following commit put another one in the place of.
        self._superseded: dict[int, tuple[bytes, bytes]] = {}
        self._following: StoreVersion | None = None

    def read_bucket(self, slot: int, hash: bytes) -> bytes:
        data = self._kept(slot, hash)
        if data is None:
            data = self._store.read_bucket(slot, hash)
        if data is None:
            data = self._kept(slot, hash)  # a commit took the slot since we looked
        if data is None:
            raise self._store.missing_bucket_error()
        return data

    def _kept(self, slot: int, hash: bytes) -> bytes | None:
        version: StoreVersion | None = self
        while version is not None:
            found = version._superseded.get(slot)
            # Two commits of another thread may come while we look. The version that keeps our bucket then lies behind us, and the
            # next one keeps the bucket that followed ours in this slot.
            if found is not None and found[0] == hash:
                return found[1]
            version = version._following
        return None

    def keep_superseded(self, superseded: Iterable[tuple[int, tuple[bytes, bytes]]]) -> None:
        """Before these slots are written again."""
        self._superseded.update(superseded)

    def next_version(self) -> StoreVersion:
        """Once they are written."""
        self._following = StoreVersion(self._store)
        return self._following
