"""Sets of preferences that people decided in a project: a voter derives those that plans wait for, and says what it found.

Every peer deletes sets that nobody may read any more. What is due follows from the applied state alone, so a restart forgets
nothing.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import trio

from features.services import ServiceContext
from features.text_tables import pluralize
from ledger.members import MembersState
from ledger.network_governance import NetworkState
from protocol.errors import MissingBlobError, RemoteProtocolError, UserError
from rlhf.ledger.preference_set_attestation import AttestPreferenceSet, PreferenceSetClaim, current_voters
from rlhf.ledger.rlhf_module import RlhfState, outdated_sets, sets_in_use
from rlhf.objectives.ppo import MODULE
from training.job_disk_space import require_disk_space

if TYPE_CHECKING:
    from training.corpus import DataManifest

RETRY_SECONDS = 5.0  # after this peer's statement was not decided

log = logging.getLogger("peer")


class PreferenceDatasetBuilder:
    def __init__(self, desk: ServiceContext) -> None:
        self._desk = desk
        self._begun: set[bytes] = set()
        self._forgotten: set[bytes] = set()
        self._threads = trio.CapacityLimiter(1)  # whatever plans are begun and cancelled, the peer's other work has its threads

    async def run(self) -> None:
        self._begun.clear()  # a fault of the system may have ended the last run
        async with trio.open_nursery() as nursery:
            while True:
                height = self._desk.height
                for key in self._due().keys() - self._begun:
                    self._begun.add(key)
                    nursery.start_soon(self._attest_set, key)
                await self._delete_outdated_sets()
                await self._desk.wait_for_block_above(height)

    def _due(self) -> dict[bytes, PreferenceSetClaim]:
        """By plan, what this peer has to say as a voter."""
        state, me = self._desk.state, self._desk.me
        if not state.module_state(NetworkState).module_version(MODULE) or me not in current_voters(
            state.module_state(MembersState)
        ):
            return {}
        running = state.module_state(RlhfState).running_plans()
        claims = {key: plan.claim for key, plan in running.items() if plan.claim is not None}
        return {key: claim for key, claim in claims.items() if not claim.is_decided and me not in claim.attestations}

    async def _attest_set(self, key: bytes) -> None:
        from rlhf.services.preference_derivation import NoLongerNeeded

        while (claim := self._due().get(key)) is not None:
            try:
                await self._desk.submit_transaction(
                    "rlhf/attest-set", AttestPreferenceSet(key, await self._build_set(key, claim))
                )
            except NoLongerNeeded:
                continue
            except UserError as error:
                log.info("the set of plan %s: %s", key.hex()[:8], error)
                await trio.sleep(RETRY_SECONDS)
        self._begun.discard(key)

    async def _build_set(self, key: bytes, claim: PreferenceSetClaim) -> bytes | None:
        """The set that this peer derives; None if there is none. One that others can be asked for by its name is kept."""
        from rlhf.data.tokenized_records import preference_set_manifest
        from rlhf.services.preference_derivation import derive_pairs

        pairs = await derive_pairs(self._desk, claim.source, lambda: key in self._due(), self._threads)
        try:
            found = await trio.to_thread.run_sync(preference_set_manifest, pairs, claim.source.tokens)
        except UserError:
            found = None
        where = f"project {claim.source.project.hex()[:16]} gives at height {claim.source.height}"
        if found is None or found.digest != claim.set:
            other = "no set" if found is None else f"the set {found.digest.hex()[:16]}"
            self._desk.log_event(f"{where} {other}, and not {claim.set.hex()[:16]}, which a plan names")
            return None if found is None else found.digest
        require_disk_space(self._desk.folder, found.size)
        await trio.to_thread.run_sync(preference_set_manifest, pairs, claim.source.tokens, self._desk.add_blob)
        self._desk.log_event(f"{where} the set {claim.set.hex()[:16]} of {pluralize(len(pairs), 'pair')}, as a plan says")
        return found.digest

    async def _delete_outdated_sets(self) -> None:
        """Deletes sets of which a pair is redacted, or which were not decided, as soon as no job needs them."""
        state = self._desk.state
        if not state.module_state(NetworkState).module_version(MODULE):
            return
        over = outdated_sets(state.module_state(RlhfState))
        used = sets_in_use(state) if over else set[bytes]()
        before, self._forgotten = self._forgotten, over - used  # one that is named again may be here again
        for key in self._forgotten - before:
            await trio.to_thread.run_sync(self._delete, key, used)

    def _delete(self, key: bytes, used: set[bytes]) -> None:
        """Sets of the same pairs that are cut into other tokens have the same shards: what a set in use has stays."""
        from training.corpus import text_path

        manifests = {other: found for other in {key, *used} if (found := self._manifest(other)) is not None}
        if key not in manifests:
            return
        goes = manifests.pop(key)
        kept = {shard for manifest in manifests.values() for shard in manifest.shards}
        for shard in {key, *goes.shards} - kept:
            self._desk.delete_blob(shard)
        if goes.text not in {manifest.text for manifest in manifests.values()}:
            text_path(self._desk.text_folder, goes).unlink(missing_ok=True)

    def _manifest(self, key: bytes) -> DataManifest | None:
        from training.corpus import read_manifest

        try:
            return read_manifest(key, self._desk.read_blob)
        except (MissingBlobError, RemoteProtocolError):
            return None
