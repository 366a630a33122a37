"""Calls about decided blocks and rows of the state, and what shows that they were decided."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import trio

from consensus.block import encode_header, make_header
from consensus.voter_set import VoterSet
from ledger.ledger_state import LedgerState
from peer.api.running_peer import RunningPeer
from peer.export.row_proof_file import write_row_proof
from protocol import codec
from protocol.api import BlockRpc, BlockView, RowProofRpc, RowProofView
from protocol.errors import UserError
from protocol.identity import peer_id
from protocol.messages import Commit


@dataclass(frozen=True)
class BlockRpcHandler(BlockRpc):
    peer: RunningPeer

    async def block(self, height: int) -> BlockView:
        return await trio.to_thread.run_sync(self._block, height or self.peer.driver.state.height, self.peer.driver.state)

    def _block(self, height: int, state: LedgerState) -> BlockView:
        store = self.peer.driver.store
        decided = store.get_decision(height)
        if decided is None:
            raise UserError(f"there is no block of height {height} here: this peer has applied height {state.height}")
        block, certificate = decided.decode(), decided.certificate
        voters = next((voters for voters in self._sets(state) if voters.hash == block.voters), None)
        if voters is None:
            raise UserError(f"this peer no longer knows who voted at height {height}")
        return BlockView(
            height=height,
            digest=decided.digest.hex(),
            time_ms=block.time_ms,
            proposer=peer_id(block.proposer),
            view=codec.decode_message(certificate.vote, (Commit,)).view,
            signers=tuple(map(peer_id, certificate.signatures)),
            voters_count=len(voters),
            quorum=voters.quorum,
            certified_root=block.state_root.hex(),
            own_root=own.hex() if (own := store.state_root(height - 1)) else "",
            body_bytes=len(block.body),
            header=encode_header(make_header(block)).hex(),
            certificate=codec.encode(certificate).hex(),
            voters=codec.encode(voters.keys).hex(),
        )

    def _sets(self, state: LedgerState) -> Iterator[VoterSet]:
        """All sets of voters that this peer knows, the newest first as far as that is cheap."""
        yield from map(VoterSet, (state.members.voters, state.members.previous, state.members.upcoming))
        yield from (
            VoterSet(link.next_voters) for link in self.peer.driver.store.light_blocks(0, state.height) if link.next_voters
        )
        yield self.peer.genesis.voters


@dataclass(frozen=True)
class RowProofRpcHandler(RowProofRpc):
    peer: RunningPeer

    async def prove_row(self, table: str, key: bytes, path: str) -> RowProofView:
        proven = await self.peer.driver.state_sync.newest_certified_state()
        if proven is None:
            raise UserError("no state is certified yet: the next decided block certifies the one before it")
        state, links = proven
        return await trio.to_thread.run_sync(write_row_proof, self.peer.genesis, state, links, table, key, Path(path))
