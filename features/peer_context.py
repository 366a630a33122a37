"""The running peer as a feature that answers calls sees it."""

from __future__ import annotations

from typing import Protocol

from features.services import ServiceContext
from ledger.core.genesis import Genesis
from ledger.ledger_state import LedgerState
from protocol.messages import LightBlock, Transaction
from storage.disk_blob_store import DiskBlobStore
from storage.ledger_store import LedgerStore


class PeerContext(Protocol):
    @property
    def me(self) -> bytes:
        """This peer's key."""

    @property
    def role(self) -> str:
        """Its name, as `--role` takes it."""

    @property
    def genesis(self) -> Genesis: ...

    @property
    def state(self) -> LedgerState:
        """After the last applied block."""

    @property
    def store(self) -> LedgerStore: ...

    @property
    def blobs(self) -> DiskBlobStore: ...

    def require_member(self) -> None:
        """Raises `UserError` unless this peer is a member."""

    def runs_service(self, name: str) -> bool: ...

    def service_context(self, service: str, /) -> ServiceContext: ...

    async def submit_transaction(self, kind: str, content: object) -> Transaction:
        """Returns when this transaction of this peer is decided. Raises `UserError` where it is refused."""

    async def fetch_blob(self, digest: bytes, size_max: int) -> None:
        """Returns when this blob is here, however long that takes."""

    async def newest_certified_state(self) -> tuple[LedgerState, tuple[LightBlock, ...]] | None:
        """The last certified state, and the links from the genesis to the block that certifies it; None: there is none yet."""
