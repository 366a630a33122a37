"""Keeps the blobs that the modules of the network name (`Module.pinned_blobs`): every peer has them, so none is lost.

Blobs that were replaced (`Module.replaced_blobs`) go wherever they are.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import trio

from ledger.core.module import BlobReplacement
from peer.runtime.driver import Driver
from protocol.errors import MissingBlobError

FETCHES_MAX = 8  # blobs that are fetched side by side: what rounds wait for goes on beside them

log = logging.getLogger("peer")


@dataclass
class BlobPinner:
    driver: Driver
    _places: trio.CapacityLimiter = field(default_factory=lambda: trio.CapacityLimiter(FETCHES_MAX))

    async def run(self) -> None:
        """After every block, fetches what the state names since then, and replaces what it replaces."""
        wanted = set[bytes]()  # that are here, or on their way
        seen: dict[str, object] = {}
        replaced: dict[str, int] = {}
        async with trio.open_nursery() as nursery:
            while True:
                applied = self.driver.block_applied
                for name, blobs in self.driver.rules.pinned_blobs(self.driver.state, seen):
                    for digest in blobs.keys() - wanted:
                        wanted.add(digest)
                        nursery.start_soon(self._pin_blob, name, digest, blobs[digest])
                for replacement in self.driver.rules.replaced_blobs(self.driver.state, replaced):
                    await self._replace(replacement)
                await applied.wait()

    async def _pin_blob(self, module: str, digest: bytes, size_max: int) -> None:
        async with self._places:
            if self.driver.blobs.size(digest) is None:
                log.debug("%s names the blob %s, which is fetched", module, digest.hex()[:16])
            await self.driver.network.fetch_blob(digest, size_max, ())
            self.driver.blobs.pin_blob(digest)

    async def _replace(self, replaced: BlobReplacement) -> None:
        blobs = self.driver.blobs
        try:
            old = await trio.to_thread.run_sync(blobs.read_blob, replaced.old, replaced.size_max)
            made = await trio.to_thread.run_sync(replaced.make, old)
        except MissingBlobError:  # as at most peers
            return
        if made is not None:
            await trio.to_thread.run_sync(blobs.add_bytes, made)
            await trio.to_thread.run_sync(blobs.delete_blob, replaced.old)
