"""The desk of a part: a narrow view of the running peer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

from ledger.core.module import StateReader
from peer.driver.author import Author
from peer.driver.driver import Driver
from peer.settings.config import Config
from protocol import messages
from protocol.api import PeerApi
from protocol.identity import Signed, sign_message

PROTOCOL_TAGS = frozenset(tag for kind in vars(messages).values() if isinstance(tag := getattr(kind, "TAG", None), str))


class Hangup:
    """SIGHUP, for parts that read files again."""

    def __init__(self) -> None:
        self._event = trio.Event()

    def tell(self) -> None:
        event, self._event = self._event, trio.Event()
        event.set()

    async def wait(self) -> None:
        await self._event.wait()


@dataclass(frozen=True)
class DriverDesk:
    """Implements `features.parts.Desk`."""

    part: str  # its name, also of its events and its folder
    config: Config
    driver: Driver
    author: Author
    folders: Path
    unseal: Callable[[bytes], bytes | None]
    api: PeerApi
    texts: Path
    hangup: Hangup = field(default_factory=Hangup)

    async def hung_up(self) -> None:
        await self.hangup.wait()

    @property
    def me(self) -> bytes:
        return self.driver.signer.public

    @property
    def folder(self) -> Path:
        made = self.folders / self.part
        made.mkdir(parents=True, exist_ok=True)
        return made

    @property
    def state(self) -> StateReader:
        return self.driver.state

    def setting(self, name: str) -> Any:
        return self.config.of_features[name]

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
        return max(0.0, self.driver.now() - self.driver.witness.last_decision_at) if self.driver.witness.last_decision_at else 0.0

    def sign(self, statement: object) -> Signed:
        tag: str = getattr(statement, "TAG")  # noqa: B009 - of a message
        assert tag not in PROTOCOL_TAGS, f"a part signs no {tag}"
        return sign_message(self.driver.signer, self.driver.chain_id, statement)

    @property
    def height(self) -> int:
        return self.driver.state.height

    async def block_above(self, height: int) -> None:
        while self.height <= height:
            await self.driver.applied.wait()

    async def submit(self, kind: str, content: object) -> messages.Transaction:
        return await self.author.submit(kind, content)

    async def fetch(self, digest: bytes, size_max: int, sources: Iterable[bytes] = ()) -> None:
        await self.driver.network.fetch_blob(digest, size_max, sources)
        self.driver.blobs.pin_blob(digest)

    def read(self, digest: bytes, size_max: int) -> bytes:
        return self.driver.blobs.read_blob(digest, size_max)

    def delete(self, digest: bytes) -> None:
        self.driver.blobs.delete_blob(digest)

    def keep(self, data: bytes) -> bytes:
        return self.driver.blobs.add_bytes(data)

    def tell(self, text: str) -> None:
        self.driver.events.add(self.part, text)

    def warn(self, text: str) -> None:
        self.driver.events.warn(self.part, text)
