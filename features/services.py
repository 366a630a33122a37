"""Services: what a peer does beside agreeing, such as serving annotators. A service sees its `ServiceContext` alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from features.feature import Feature
from ledger.core.module import StateReader
from protocol.api import PeerApi
from protocol.identity import Signed
from protocol.messages import Transaction


class ServiceContext(Protocol):
    """What a service may see and do."""

    @property
    def me(self) -> bytes:
        """This peer's key."""

    @property
    def folder(self) -> Path:
        """This folder outlives a restart. Nobody but the service writes there."""

    @property
    def text_folder(self) -> Path:
        """The folder with the texts of jobs, put together from their shards."""

    @property
    def state(self) -> StateReader:
        """The states of all modules after the last applied block."""

    @property
    def running_features(self) -> Sequence[Feature]:
        """The features of this program whose modules the network runs, in the order of their list."""

    def get_setting(self, name: str) -> Any:
        """One of the feature's own settings."""

    @property
    def http_connections_max(self) -> int:
        """How many HTTP connections may be open: their share of the file descriptors."""

    @property
    def chain_id(self) -> bytes: ...

    @property
    def network(self) -> str:
        """The network's name."""

    @property
    def state_root(self) -> bytes:
        """After the last applied block."""

    @property
    def time_ms(self) -> int:
        """That of the last applied block."""

    @property
    def seconds_since_block(self) -> float:
        """Since this peer applied it."""

    def sign(self, statement: object) -> Signed:
        """A statement of the service, with a tag that no message of the protocol has."""

    def unseal(self, sealed: bytes) -> bytes | None:
        """What somebody sealed for this peer's key; None if it was not."""

    @property
    def height(self) -> int:
        """The height of the last applied block."""

    async def wait_for_block_above(self, height: int) -> None:
        """Returns when a block above this height is applied, at once if one was while the service did something else."""

    async def wait_for_reload(self) -> None:
        """Returns at the next SIGHUP, if the peer goes on: files that the settings name may be others then."""

    async def submit_transaction(self, kind: str, content: object) -> Transaction:
        """Returns when this transaction of this peer is decided. Raises `UserError` where it is refused."""

    async def fetch_blob(self, digest: bytes, size_max: int, sources: Iterable[bytes] = ()) -> None:
        """Returns when this blob is here, and stays. It never gives up by itself."""

    def read_blob(self, digest: bytes, size_max: int) -> bytes:
        """A blob that is here. `MissingBlobError` if it is not, or is larger."""

    def delete_blob(self, digest: bytes) -> None:
        """Deletes a blob, if it is here."""

    def add_blob(self, data: bytes) -> bytes:
        """Keeps a blob, which others may fetch; its digest. It waits for the disk."""

    @property
    def api(self) -> PeerApi:
        """What this peer answers to its operator."""

    def log_event(self, text: str) -> None:
        """One line for the log, the prompt and the event stream."""

    def log_warning(self, text: str) -> None:
        """The same, of what a person has to mend: a warning in the log."""


class PeerService(Protocol):
    async def run(self) -> None:
        """Until it is cancelled. What it raises ends the peer."""


ServiceFactory = Callable[[ServiceContext], PeerService]
