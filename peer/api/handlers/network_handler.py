"""Calls about what the network runs, and how it moves on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import trio

from consensus.block import encode_header, make_header
from consensus.voter_set import VoterSet
from features.feature import Feature
from ledger.ledger_state import LedgerState
from ledger.network_governance import PARAMETERS_LIMIT, ModuleUpgrade, NetworkLimit, NetworkState
from peer import features
from peer.api.running_peer import RunningPeer
from peer.export.row_proof_file import write_row_proof
from protocol import codec
from protocol.api import BlockRpc, BlockView, LimitView, LivenessMatrix, ModuleView, NetworkRpc, RowProofRpc, RowProofView
from protocol.errors import UserError
from protocol.identity import peer_id
from protocol.limits import PARAMETERS_ALLOWED_MAX
from protocol.messages import Commit

UPGRADE_HEIGHTS = 100  # from now to an upgrade whose height nobody names: minutes of a network that trains


@dataclass(frozen=True)
class NetworkRpcHandler(NetworkRpc):
    peer: RunningPeer

    async def voter_liveness(self) -> LivenessMatrix:
        return self.peer.liveness_monitor.liveness_matrix()

    async def modules(self) -> tuple[ModuleView, ...]:
        network = self._network
        mine, views = _known(), []
        for name in dict.fromkeys((*(running.name for running in network.modules), *mine)):
            feature, knows = mine.get(name, (None, ()))
            due = next((upgrade for upgrade in network.due_upgrades if upgrade.module == name), None)
            views.append(
                ModuleView(
                    module=name,
                    feature=feature.name if feature else "",
                    about=feature.about if feature else "",
                    active_version=network.module_version(name),
                    known_versions=knows,
                    due_version=due.version if due else 0,
                    due_height=due.height if due else 0,
                    wishes=tuple(self._wish(wish, count) for wish, count in self._wishes(name).items()),
                )
            )
        return tuple(views)

    @property
    def _network(self) -> NetworkState:
        return self.peer.driver.state.module_state(NetworkState)

    def _wishes(self, module: str) -> Counter[ModuleUpgrade]:
        return Counter(wish for wish in self._network.upgrade_votes.values() if wish.module == module)

    def _wish(self, wish: ModuleUpgrade, count: int) -> str:
        needed = VoterSet(self.peer.driver.state.members.voters).quorum
        return f"{count} of the {needed} voters needed want {wish.version} from height {wish.height}"

    async def request_upgrade(self, module: str, version: int, height: int) -> str:
        self.peer.require_member()
        known = _known()
        _, versions = known.get(module, (None, ()))
        if version not in versions:
            has = f"it knows {module} {', '.join(map(str, versions))}" if versions else f"it knows {', '.join(known)}"
            raise UserError(f"this program has no {module} {version} ({has}): it could not go on itself after that upgrade")
        wish = ModuleUpgrade(module, version, height or self.peer.driver.state.height + UPGRADE_HEIGHTS)
        await self.peer.submitter.submit("network/upgrade", wish)
        if wish in self._network.due_upgrades:
            return f"decided: the network runs {module} {version} from height {wish.height} on; peers that lack it stop before"
        return self._wish(wish, self._wishes(module)[wish])

    async def limits(self) -> tuple[LimitView, ...]:
        wishes = tuple(self._limit_wish(wish, count) for wish, count in Counter(self._network.limit_votes.values()).items())
        return (LimitView(PARAMETERS_LIMIT, self._network.parameters_max, wishes),)

    async def set_limit(self, name: str, most: int) -> str:
        self.peer.require_member()
        if name != PARAMETERS_LIMIT:
            raise UserError(f"{name!r} is no limit that voters set; say `limit {PARAMETERS_LIMIT} N`")
        if most > PARAMETERS_ALLOWED_MAX:
            raise UserError(f"{PARAMETERS_LIMIT} {most}: {PARAMETERS_ALLOWED_MAX} are the most that voters can allow")
        wish = NetworkLimit(name, most)
        await self.peer.submitter.submit("network/limit", wish)
        if self._network.parameters_max == most:
            return f"decided: models of jobs have {most} {name} at most from now on"
        return self._limit_wish(wish, Counter(self._network.limit_votes.values())[wish])

    def _limit_wish(self, wish: NetworkLimit, count: int) -> str:
        needed = VoterSet(self.peer.driver.state.members.voters).quorum
        return f"{count} of the {needed} voters needed want models of at most {wish.most} {wish.name}"


def _known() -> dict[str, tuple[Feature, tuple[int, ...]]]:
    """By module: the feature of this program that brings it, and the versions that it knows."""
    return {
        name: (feature, versions) for feature in features.FEATURES for name, versions in features.versions_of(feature).items()
    }


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
