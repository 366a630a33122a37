"""Services of RLHF in a daemon. The applied state and the stored figures determine the due work, so a restart loses nothing.

| service | work |
|---|---|
| `PreferenceDatasetBuilder` | as a voter, derives the preference sets that plans wait for; deletes redacted and refused sets |
| `FinalModelEvaluator` | measures last models of finished jobs; as a voter, reports on the reward models that plans wait for |
| `BlobPrefetcher` | prefetches blobs of queued jobs and later stages, because their sources may be gone when the job starts |
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import cast

import trio

from features.services import ServiceContext
from features.text_tables import pluralize
from ledger.jobs import JobPhase, JobsState
from ledger.members import MembersState
from ledger.network_governance import NetworkState
from protocol import codec
from protocol.errors import MissingBlobError, RemoteProtocolError, UserError
from rlhf.ledger import tuning_plans
from rlhf.ledger.preference_set_attestation import AttestPreferenceSet, PreferenceSetClaim, current_voters
from rlhf.ledger.rlhf_module import RlhfState, outdated_sets, sets_in_use
from rlhf.ledger.tuning_plans import ReportAccuracy, TuningPlan
from rlhf.objectives.ppo import MODULE
from rlhf.pair_accuracy import PairAccuracy
from rlhf.rpc import RlhfRpc
from training.job_disk_space import require_disk_space
from training.job_spec import JobSpec

# Seconds before the retry of a refused transaction or a failed measurement. Each further failed measurement doubles the delay.
RETRY_SECONDS = 5.0
RETRY_SECONDS_MAX = 600.0
FETCHING_SECONDS = 10.0  # timeout of a fetch: the service then reads the state again, because the plan may be over

log = logging.getLogger("peer")


class RlhfService:
    """Base of services that look for due work after each block, and start each piece of work once."""

    def __init__(self, desk: ServiceContext) -> None:
        self._desk = desk
        self._begun: set[bytes] = set()  # keys of the work that has begun: ids of plans or jobs, or digests of blobs

    async def run(self) -> None:
        self._begun.clear()  # The last run may have ended by an error of the system.
        async with trio.open_nursery() as nursery:
            while True:
                height = self._desk.height
                for key, work in self._due_work().items():
                    if key not in self._begun:
                        self._begun.add(key)
                        nursery.start_soon(work, key)
                await self._finish_block()
                await self._desk.wait_for_block_above(height)

    def _due_work(self) -> Mapping[bytes, Callable[[bytes], Awaitable[None]]]:
        raise NotImplementedError

    async def _finish_block(self) -> None:
        """Do the further work of a service after each block. The due work of the block has already started."""

    @property
    def _is_run(self) -> bool:
        return self._desk.state.module_state(NetworkState).module_version(MODULE) > 0

    def _plans_of_voter(self) -> dict[bytes, TuningPlan]:
        """Return the running tuning plans by key, or no plan if this peer is not a voter."""
        state = self._desk.state
        if not self._is_run or self._desk.me not in current_voters(state.module_state(MembersState)):
            return {}
        return state.module_state(RlhfState).running_plans()


class PreferenceDatasetBuilder(RlhfService):
    def __init__(self, desk: ServiceContext) -> None:
        super().__init__(desk)
        self._forgotten: set[bytes] = set()
        # one thread for derivations: plans that start and stop rapidly must not occupy all threads of the peer
        self._threads = trio.CapacityLimiter(1)

    def _due_work(self) -> Mapping[bytes, Callable[[bytes], Awaitable[None]]]:
        return dict.fromkeys(self._due(), self._attest_set)

    def _due(self) -> dict[bytes, PreferenceSetClaim]:
        """Return the claims of preference sets that this peer still has to attest as a voter, by plan."""
        claims = {key: plan.claim for key, plan in self._plans_of_voter().items() if plan.claim is not None}
        return {key: claim for key, claim in claims.items() if not claim.is_decided and self._desk.me not in claim.attestations}

    async def _attest_set(self, key: bytes) -> None:
        from rlhf.preference_derivation import NoLongerNeeded

        while (claim := self._due().get(key)) is not None:
            try:
                await self._desk.submit_transaction(
                    "rlhf/attest-set", AttestPreferenceSet(key, await self._build_set(key, claim))
                )
            except NoLongerNeeded:
                continue
            except UserError as error:
                log.info("preference set of plan %s: %s", key.hex()[:8], error)
                await trio.sleep(RETRY_SECONDS)
        self._begun.discard(key)

    async def _build_set(self, key: bytes, claim: PreferenceSetClaim) -> bytes | None:
        """Derive the preference set of a claim and return its digest. None: the pairs give no valid set.

        A set that equals the claimed set is stored as blobs.
        """
        from rlhf.data.tokenized_records import preference_set_manifest
        from rlhf.preference_derivation import derive_pairs

        pairs = await derive_pairs(self._desk, claim.source, lambda: key in self._due(), self._threads)
        try:
            found = await trio.to_thread.run_sync(preference_set_manifest, pairs, claim.source.tokens)
        except UserError:
            found = None
        where = f"project {claim.source.project.hex()[:16]} gives at height {claim.source.height}"
        if found is None or found.digest != claim.set:
            other = "no set" if found is None else f"the set {found.digest.hex()[:16]}"
            self._desk.log_event(f"{where} {other}, but a plan names {claim.set.hex()[:16]}")
            return None if found is None else found.digest
        require_disk_space(self._desk.folder, found.size)
        await trio.to_thread.run_sync(preference_set_manifest, pairs, claim.source.tokens, self._desk.add_blob)
        self._desk.log_event(f"{where} the set {claim.set.hex()[:16]} of {pluralize(len(pairs), 'pair')}, as a plan says")
        return found.digest

    async def _finish_block(self) -> None:
        """Delete outdated sets that no job needs: sets with a redacted pair, and undecided sets that ended plans claimed."""
        if not self._is_run:
            return
        state = self._desk.state
        over = outdated_sets(state.module_state(RlhfState))
        used = sets_in_use(state) if over else set[bytes]()
        before, self._forgotten = self._forgotten, over - used  # a set that a job uses may be deleted later
        for key in self._forgotten - before:
            await trio.to_thread.run_sync(self._delete, key, used)

    def _delete(self, key: bytes, used: set[bytes]) -> None:
        """Delete the blobs and the text of a preference set.

        Blobs of used sets stay: sets that differ only in their tokenizer share shards.
        """
        from training.corpus import DataManifest, read_manifest, text_path

        manifests: dict[bytes, DataManifest] = {}
        for other in {key, *used}:
            with contextlib.suppress(MissingBlobError, RemoteProtocolError):
                manifests[other] = read_manifest(other, self._desk.read_blob)
        if key not in manifests:
            return
        goes = manifests.pop(key)
        kept = {shard for manifest in manifests.values() for shard in manifest.shards}
        for shard in {key, *goes.shards} - kept:
            self._desk.delete_blob(shard)
        if goes.text not in {manifest.text for manifest in manifests.values()}:
            text_path(self._desk.text_folder, goes).unlink(missing_ok=True)


class FinalModelEvaluator(RlhfService):
    def _due_work(self) -> Mapping[bytes, Callable[[bytes], Awaitable[None]]]:
        known = self._desk.state.module_state(JobsState).jobs
        finished = [key for key, job in known.items() if job.phase is JobPhase.FINISHED]
        own = [key for key in finished if JobSpec.decode(known[key].spec).resolved_objective.module == MODULE]
        return dict.fromkeys(self._reports_due(), self._report) | dict.fromkeys(own, self._measure)

    def _reports_due(self) -> dict[bytes, bytes]:
        """Return the jobs of the reward models on which this peer has to report as a voter, by plan."""
        jobs = self._desk.state.module_state(JobsState)
        waiting = {key: plan for key, plan in self._plans_of_voter().items() if tuning_plans.awaits_reports(plan, jobs)}
        return {key: plan.current.job for key, plan in waiting.items() if self._desk.me not in plan.reports}

    async def _report(self, key: bytes) -> None:
        pause = RETRY_SECONDS
        while (job := self._reports_due().get(key)) is not None:
            try:
                found = await cast(RlhfRpc, self._desk.api).measure_last_model(job.hex(), True)
            except UserError as error:
                log.info("no report on the reward model of plan %s: %s", key.hex()[:8], error)
                await trio.sleep(pause)
                pause = min(2 * pause, RETRY_SECONDS_MAX)
                continue
            accuracy = PairAccuracy.from_share(found.held_out_accuracy or 0.0, found.held_out_pairs or 0)
            try:
                await self._desk.submit_transaction("rlhf/report-accuracy", ReportAccuracy(key, accuracy))
            except UserError as error:
                log.info("the report on the reward model of plan %s: %s", key.hex()[:8], error)
                await trio.sleep(RETRY_SECONDS)
        self._begun.discard(key)

    async def _measure(self, job: bytes) -> None:
        try:
            await cast(RlhfRpc, self._desk.api).measure_last_model(job.hex(), False)
        except UserError as error:
            log.debug("%s", error)


class BlobPrefetcher(RlhfService):
    def _due_work(self) -> Mapping[bytes, Callable[[bytes], Awaitable[None]]]:
        return dict.fromkeys(self._named(), self._get)

    def _named(self) -> dict[bytes, int]:
        """Return the blobs that queued jobs and later stages of plans need: maximum size in bytes by digest."""
        if not self._is_run:
            return {}
        state = self._desk.state
        specs = [waiting.spec for waiting in state.module_state(JobsState).queue]
        specs += [
            stage.spec for plan in state.module_state(RlhfState).running_plans().values() for stage in plan.stages if stage.spec
        ]
        # not `JobSpec.decode`, which refuses a stage whose reward model is not known yet
        jobs = [codec.decode(JobSpec, spec) for spec in specs]
        return {digest: size for job in jobs for digest, size in job.resolved_objective.required_files(job).items()}

    async def _get(self, digest: bytes) -> None:
        while (size := self._named().get(digest)) is not None:
            with trio.move_on_after(FETCHING_SECONDS):
                await self._desk.fetch_blob(digest, size)
                return  # the fetched blob is pinned; its entry in `_begun` prevents another fetch
        self._begun.discard(digest)
