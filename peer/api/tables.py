"""Calls about the rows of tables."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import trio

from peer.api.running import RunningPeer
from peer.export.proving import prove
from protocol.api import RowProofRpc, RowProofView
from protocol.errors import UserError


@dataclass(frozen=True)
class TableAnswers(RowProofRpc):
    peer: RunningPeer

    async def prove_row(self, table: str, key: bytes, path: str) -> RowProofView:
        proven = await self.peer.driver.snapshots.newest_proven()
        if proven is None:
            raise UserError("no state is certified yet: the next decided block certifies the one before it")
        state, links = proven
        return await trio.to_thread.run_sync(prove, self.peer.genesis, state, links, table, key, Path(path))
