"""Services: tasks that a peer runs beside agreement, such as serving annotators. A service only sees its `ServiceContext`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from features.api_keys import ApiKeys
from features.feature import Feature
from ledger.core.module import StateReader
from protocol.api import PeerApi
from protocol.identity import Signed
from protocol.messages import Transaction

if TYPE_CHECKING:
    from ledger.core.genesis import Genesis
    from ledger.ledger_state import LedgerState
    from protocol.messages import LightBlock
    from storage.batch_store import BatchStore
    from storage.disk_blob_store import DiskBlobStore
    from storage.ledger_store import LedgerStore


class ServiceContext(Protocol):
    """The part of the peer that a service may use."""

    @property
    def me(self) -> bytes:
        """This peer's key."""

    @property
    def peer(self) -> PeerContext:
        """The running peer, as handlers of RPC calls see it."""

    @property
    def folder(self) -> Path:
        """The service's own folder. Its files stay after a restart."""

    @property
    def text_folder(self) -> Path:
        """The folder with texts of jobs, assembled from their shards."""

    @property
    def state(self) -> StateReader:
        """The states of all modules after the last applied block."""

    @property
    def running_features(self) -> Sequence[Feature]:
        """The features whose modules the network runs, in the order of `peer.features`."""

    def get_setting(self, name: str) -> Any:
        """Return a setting of a feature."""

    @property
    def api_keys(self) -> ApiKeys:
        """The API keys of this peer, with their quotas. All services share them."""

    @property
    def http_connections_max(self) -> int:
        """Largest number of open HTTP connections: the part of the file descriptors that is reserved for them."""

    @property
    def chain_id(self) -> bytes: ...

    @property
    def network(self) -> str:
        """Name of the network."""

    @property
    def state_root(self) -> bytes:
        """State root after the last applied block."""

    @property
    def time_ms(self) -> int:
        """Time of the last applied block in milliseconds since the epoch."""

    @property
    def seconds_since_block(self) -> float:
        """Seconds since this peer applied its last block, or 0 before the first."""

    def sign(self, statement: object) -> Signed:
        """Sign a statement of the service with this peer's key. The tag must differ from all tags of protocol messages."""

    def unseal(self, sealed: bytes) -> bytes | None:
        """Return the content of a box that was sealed (encrypted) for this peer's key; None if it was sealed for another key."""

    @property
    def height(self) -> int:
        """Height of the last applied block."""

    async def wait_for_block_above(self, height: int) -> None:
        """Wait until the last applied block is above this height."""

    async def wait_for_reload(self) -> None:
        """Wait for the next SIGHUP that does not end the peer. Files that settings name may have changed afterwards."""

    async def submit_transaction(self, kind: str, content: object, seconds_max: float = ...) -> Transaction:
        """Submit a transaction of this peer, wait until it is decided, and return it.

        Raises `UserError` if it is refused, or is not decided within `seconds_max`. In the second case it may be decided later.
        """

    async def fetch_blob(self, digest: bytes, size_max: int, sources: Iterable[bytes] = ()) -> None:
        """Fetch a blob from other peers and pin it, so that it is not deleted. The call waits without a timeout."""

    def read_blob(self, digest: bytes, size_max: int) -> bytes:
        """Return a stored blob of this peer. Raises `MissingBlobError` if it is missing or larger than `size_max` bytes."""

    def delete_blob(self, digest: bytes) -> None:
        """Delete a blob, if this peer has it."""

    def add_blob(self, data: bytes) -> bytes:
        """Store a blob, which other peers may fetch, and return its digest. The call blocks while it writes to the disk."""

    @property
    def api(self) -> PeerApi:
        """An object with the RPC calls that this peer's operator may make."""

    def log_event(self, text: str) -> None:
        """Add an event to the log and the event stream. Its kind is the service's name."""

    def log_warning(self, text: str) -> None:
        """Add an event like `log_event`, at the level `warning`, about a problem that a person has to fix."""


class PeerContext(Protocol):
    """The part of the running peer that a feature's RPC handler may use."""

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

    @property
    def batches(self) -> BatchStore:
        """The data of client runs that this peer keeps."""

    def require_member(self) -> None:
        """Raise `UserError` unless this peer is a member."""

    def runs_service(self, name: str) -> bool: ...

    def service_context(self, service: str, /) -> ServiceContext: ...

    async def submit_transaction(self, kind: str, content: object, seconds_max: float = ...) -> Transaction:
        """Submit a transaction like `ServiceContext.submit_transaction`."""

    async def fetch_blob(self, digest: bytes, size_max: int) -> None:
        """Fetch a blob from other peers. The call waits without a timeout."""

    async def newest_certified_state(self) -> tuple[LedgerState, tuple[LightBlock, ...]] | None:
        """Return the last certified state, and the light blocks from the genesis to its certificate; None if there is none."""


class PeerService(Protocol):
    async def run(self) -> None:
        """Run the service until it is cancelled. An exception ends the peer."""


ServiceFactory = Callable[[ServiceContext], PeerService]
