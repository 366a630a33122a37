"""The part of the running peer that a feature's RPC handler may use."""

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
        """Name of the role, as in `--role`."""

    @property
    def genesis(self) -> Genesis: ...

    @property
    def state(self) -> LedgerState:
        """The ledger after the last applied block."""

    @property
    def store(self) -> LedgerStore: ...

    @property
    def blobs(self) -> DiskBlobStore: ...

    def require_member(self) -> None:
        """Raise `UserError` unless this peer is a member."""

    def runs_service(self, name: str) -> bool: ...

    def service_context(self, service: str, /) -> ServiceContext: ...

    async def submit_transaction(self, kind: str, content: object) -> Transaction:
        """Submit a transaction of this peer, wait until it is decided, and return it. Raises `UserError` if it is refused."""

    async def fetch_blob(self, digest: bytes, size_max: int) -> None:
        """Fetch a blob from other peers. The call waits without a timeout."""

    async def newest_certified_state(self) -> tuple[LedgerState, tuple[LightBlock, ...]] | None:
        """Return the last certified state, and the light blocks from the genesis to its certificate; None if there is none."""
