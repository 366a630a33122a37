"""The context of a service: a narrow view of the running peer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

from features.feature import Feature
from ledger.core.module import StateReader
from ledger.network_governance import NetworkState
from peer.features import FEATURES, versions_of
from peer.runtime.driver import Driver
from peer.runtime.transaction_submitter import TransactionSubmitter
from peer.settings.config import Config
from peer.settings.file_descriptors import connection_limits, descriptor_limit
from protocol import messages
from protocol.api import PeerApi
from protocol.identity import Signed, sign_message

PROTOCOL_TAGS = frozenset(tag for kind in vars(messages).values() if isinstance(tag := getattr(kind, "TAG", None), str))


class ReloadSignal:
    """SIGHUP, for services that read files again."""

    def __init__(self) -> None:
        self._event = trio.Event()

    def notify(self) -> None:
        event, self._event = self._event, trio.Event()
        event.set()

    async def wait(self) -> None:
        await self._event.wait()


@dataclass(frozen=True)
class DriverServiceContext:
    """Implements `features.services.ServiceContext`."""

    service_name: str  # its name, also of its events and its folder
    config: Config
    driver: Driver
    submitter: TransactionSubmitter
    folders: Path
    unseal: Callable[[bytes], bytes | None]
    api: PeerApi
    text_folder: Path
    reload_signal: ReloadSignal = field(default_factory=ReloadSignal)

    async def wait_for_reload(self) -> None:
        await self.reload_signal.wait()

    @property
    def me(self) -> bytes:
        return self.driver.signer.public

    @property
    def folder(self) -> Path:
        made = self.folders / self.service_name
        made.mkdir(parents=True, exist_ok=True)
        return made

    @property
    def state(self) -> StateReader:
        return self.driver.state

    @property
    def running_features(self) -> Sequence[Feature]:
        running = {module.name for module in self.driver.state.module_state(NetworkState).modules}
        return [feature for feature in FEATURES if versions_of(feature).keys() <= running]

    def get_setting(self, name: str) -> Any:
        return self.config.feature_settings[name]

    @property
    def http_connections_max(self) -> int:
        return connection_limits(descriptor_limit()).web

    @property
    def chain_id(self) -> bytes:
        return self.driver.chain_id

    @property
    def network(self) -> str:
        return self.driver.rules.genesis.network

    @property
    def state_root(self) -> bytes:
        return self.driver.state.state_root

    @property
    def time_ms(self) -> int:
        return self.driver.state.time_ms

    @property
    def seconds_since_block(self) -> float:
        return (
            max(0.0, self.driver.now() - self.driver.observer.last_decision_at) if self.driver.observer.last_decision_at else 0.0
        )

    def sign(self, statement: object) -> Signed:
        tag: str = getattr(statement, "TAG")  # noqa: B009 - of a message
        assert tag not in PROTOCOL_TAGS, f"a service signs no {tag}"
        return sign_message(self.driver.signer, self.driver.chain_id, statement)

    @property
    def height(self) -> int:
        return self.driver.state.height

    async def wait_for_block_above(self, height: int) -> None:
        while self.height <= height:
            await self.driver.block_applied.wait()

    async def submit_transaction(self, kind: str, content: object) -> messages.Transaction:
        return await self.submitter.submit(kind, content)

    async def fetch_blob(self, digest: bytes, size_max: int, sources: Iterable[bytes] = ()) -> None:
        await self.driver.network.fetch_blob(digest, size_max, sources)
        self.driver.blobs.pin_blob(digest)

    def read_blob(self, digest: bytes, size_max: int) -> bytes:
        return self.driver.blobs.read_blob(digest, size_max)

    def delete_blob(self, digest: bytes) -> None:
        self.driver.blobs.delete_blob(digest)

    def add_blob(self, data: bytes) -> bytes:
        return self.driver.blobs.add_bytes(data)

    def log_event(self, text: str) -> None:
        self.driver.events.add(self.service_name, text)

    def log_warning(self, text: str) -> None:
        self.driver.events.add_warning(self.service_name, text)
