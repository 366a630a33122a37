"""Sets of preferences that people decided in a project: a voter derives those that plans wait for, and says what it found.

Every peer deletes sets that nobody may read any more. What is due follows from the applied state alone, so a restart forgets
nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import trio

from curation.ledger.curation_state import CurationState, TaskPageRow
from curation.limits import PAGE_BYTES_MAX
from curation.service.projects.page_fetcher import fetch_task_page
from curation.tasks.answers import QuestionKind
from curation.tasks.task_pages import TaskPageBlob, decode_page
from features.services import ServiceContext
from features.text_tables import pluralize
from ledger.members import MembersState
from ledger.network_governance import NetworkState
from protocol.errors import FolkmootError, MissingBlobError, RemoteProtocolError, UserError
from rlhf.data.preference_sets import PreferencePair, decided_pages, decided_pairs
from rlhf.data.tokenized_pairs import preference_set_manifest
from rlhf.ledger.preference_set_attestation import AttestPreferenceSet, PreferenceSetClaim, PreferenceSetSource, current_voters
from rlhf.ledger.rlhf_module import RlhfState, outdated_sets, sets_in_use
from rlhf.objectives.ppo import MODULE
from training.corpus import DataManifest, read_manifest, text_path
from training.job_disk_space import require_disk_space

# For one page, before the state is looked at again: a page that was redacted meanwhile never comes.
FETCHING_SECONDS = 10.0
RETRY_SECONDS = 5.0  # after this peer's statement was not decided

log = logging.getLogger("peer")


class _PageReplaced(FolkmootError):
    """A page has another one in its place by now."""


class _NoLongerNeeded(FolkmootError):
    """Nobody waits for the set any more."""


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
        while (claim := self._due().get(key)) is not None:
            try:
                await self._desk.submit_transaction("rlhf/set", AttestPreferenceSet(key, await self._build_set(key, claim)))
            except _NoLongerNeeded:
                continue
            except UserError as error:
                log.info("the set of plan %s: %s", key.hex()[:8], error)
                await trio.sleep(RETRY_SECONDS)
        self._begun.discard(key)

    async def _build_set(self, key: bytes, claim: PreferenceSetClaim) -> bytes | None:
        """The set that this peer derives; None if there is none. One that others can be asked for by its name is kept."""
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
        try:
            return read_manifest(key, self._desk.read_blob)
        except (MissingBlobError, RemoteProtocolError):
            return None


async def derive_pairs(
    desk: ServiceContext,
    source: PreferenceSetSource,
    goes_on: Callable[[], bool] = lambda: True,
    threads: trio.CapacityLimiter | None = None,
) -> list[PreferencePair]:
    """As `decided_pairs`, of the state as it is now. It waits for pages that are not here as long as it `goes_on`, and holds no
    thread meanwhile. Raises `_NoLongerNeeded`.
    """
    while True:
        state = desk.state.module_state(CurationState)
        try:
            pages = await trio.to_thread.run_sync(_pages, state, source, limiter=threads)
            await _fetched(desk, state, source, pages, goes_on)
            return await trio.to_thread.run_sync(_pairs, desk, state, source, limiter=threads)
        except _PageReplaced:
            await trio.lowlevel.checkpoint()


def _pages(state: CurationState, source: PreferenceSetSource) -> list[tuple[bytes, TaskPageRow]]:
    return [(key, entry) for key, entry, _ in decided_pages(state, source.project, source.height)]


async def _fetched(
    desk: ServiceContext,
    state: CurationState,
    source: PreferenceSetSource,
    pages: list[tuple[bytes, TaskPageRow]],
    goes_on: Callable[[], bool],
) -> None:
    """Returns when all of them are here. Raises `_PageReplaced`, `_NoLongerNeeded`."""
    project = state.projects.get_record(source.project)
    assert project is not None
    author = desk.state.module_state(MembersState).current_key(project.author)
    for key, entry in pages:
        is_here = False
        while not is_here:
            if not goes_on():
                raise _NoLongerNeeded("no plan waits for this set")
            if desk.state.module_state(CurationState).pages.get_record(key) != entry:
                raise _PageReplaced("a page was replaced")
            with trio.move_on_after(FETCHING_SECONDS):
                if not await fetch_task_page(desk, key, entry, author):
                    raise _PageReplaced("a page was replaced")
                is_here = True


def _pairs(desk: ServiceContext, state: CurationState, source: PreferenceSetSource) -> list[PreferencePair]:
    """In a thread. Raises `_PageReplaced`."""

    def page(key: bytes, entry: TaskPageRow) -> TaskPageBlob | None:
        try:
            return decode_page(desk.read_blob(entry.digest, PAGE_BYTES_MAX), QuestionKind.PAIR, entry.root, entry.count)
        except MissingBlobError:
            raise _PageReplaced("a page was replaced") from None
        except RemoteProtocolError:
            return None  # as at every peer: no tasks have this digest

    return decided_pairs(state, source.project, source.height, page)
