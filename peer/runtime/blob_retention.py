"""Retention of blobs: those that modules name, start models of jobs, and payloads of old rounds."""

from __future__ import annotations

import logging
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from functools import cache

import trio

from ledger.core.module import BlobReplacement
from ledger.jobs import AttestStartModel, Job, JobPhase, QueuedJob, StopJob
from ledger.ledger_state import LedgerState, decode_body
from ledger.snapshots.snapshot_server import SNAPSHOT_HEIGHTS, SNAPSHOT_LAG_HEIGHTS, SNAPSHOTS_MAX
from peer.runtime.driver import Driver
from peer.runtime.transaction_submitter import TransactionSubmitter
from protocol import codec
from protocol.errors import MissingBlobError, UserError
from protocol.messages import Proposal
from training.job_disk_space import ROUNDS_MIN, job_disk_space, require_disk_space
from training.job_spec import ANCHOR_ROUNDS_MAX, JobSpec

# Blocks after a forgotten job's last round before its payloads are deleted: equal to ROUNDS_MIN, because a block closes at most
# one round of each job.
FORGOTTEN_JOB_HEIGHTS = 256

assert min(ROUNDS_MIN, FORGOTTEN_JOB_HEIGHTS) > 2 * (SNAPSHOT_LAG_HEIGHTS + SNAPSHOTS_MAX * SNAPSHOT_HEIGHTS) > ANCHOR_ROUNDS_MAX

FETCHES_MAX = 8  # concurrent fetches of pinned blobs: few, so that the transfers of rounds have room

log = logging.getLogger("peer")

RETRY_SECONDS = 5.0  # pause before a retry after an undecided transaction, or while the disk is full


@dataclass
class PayloadPruner:
    """The task that deletes payloads of old rounds, refused proposals and forgotten jobs, before they fill the disk.

    The newest payloads of each job that fit into the setting `payloads_gb` stay, or all payloads if the setting is 0. Payloads
    that a peer may still need always stay, even if an older round names them, too:

    | user of a payload                                     | rounds                                                      |
    | models that were not durable when the machine stopped | the last `ANCHOR_ROUNDS_MAX`                                |
    | peers that were away and fetch blocks, no snapshot    | one for each missing height, and for each that follows      |
    | trainers' earlier proposals, and their re-executors   | `suspension_rounds` before those that may still be audited  |

    `peer export` needs all payloads, and fetches missing ones from peers with a larger `payloads_gb`.

    | payload of                 | is deleted                 | reason                                                           |
    |----------------------------|----------------------------|------------------------------------------------------------------|
    | a refused proposal         | when the round is closed,  | no block names it, so it is never applied again, audited,        |
    |                            | or the job is over         | disputed, or proven by a snapshot                                |
    | a job that the ledger      | FORGOTTEN_JOB_HEIGHTS      | no audit or other job needs a forgotten job, and peers that are  |
    | has forgotten              | after its last round,      | so far behind fetch a snapshot without it                        |
    |                            | unless `payloads_gb` is 0  |                                                                  |
    """

    driver: Driver
    # (job, round) -> accepted payloads, for recent rounds.
    _lately: dict[tuple[bytes, int], Sequence[bytes]] = field(default_factory=dict)
    _jobs: Set[bytes] = frozenset()  # jobs in the state of the last call
    # Forgotten job with payloads -> (its last closed round, height of the block that closed this round). None: not loaded yet.
    _forgotten: dict[bytes, tuple[int, int]] | None = None

    async def run(self) -> None:
        """Delete unneeded payloads after each closed round, but not while an export copies payloads."""
        looked = dict[bytes, int]()
        while True:
            applied, state = self.driver.block_applied, self.driver.state
            if not self.driver.running_exports:
                await trio.to_thread.run_sync(self._delete_unneeded, state)
            for key, job in state.jobs.jobs.items():
                if job.round != looked.get(key) and not self.driver.running_exports:
                    await trio.to_thread.run_sync(self._delete, key, job, state)
                    looked[key] = job.round
            await applied.wait()

    def _delete_unneeded(self, state: LedgerState) -> None:
        self._delete_refused(state)
        if self.driver.payload_bytes:
            self._delete_forgotten(state)

    def _delete_refused(self, state: LedgerState) -> None:
        blobs, accepted = self.driver.blobs, cache(self._accepted)
        for digest, rounds in blobs.round_references().items():
            if any(is_round_open(*of, state) for of in rounds):
                continue
            named = [accepted(*of) if _is_closed(*of, state) else () for of in rounds]
            # After a snapshot, this peer does not know which payloads older rounds accepted. Unknown ones stay, since other peers
            # may need them.
            blobs.release_round_references(digest, rounds, keeps=any(of is None or digest in of for of in named))

    def _delete_forgotten(self, state: LedgerState) -> None:
        left, self._jobs = self._jobs - state.jobs.jobs.keys(), state.jobs.jobs.keys()
        if self._forgotten is None or left:
            closed = self.driver.store.last_round_by_job()
            left = closed.keys() - self._jobs if self._forgotten is None else left
            self._forgotten = (self._forgotten or {}) | {key: closed[key] for key in left if key in closed}
        for key, (last, height) in list(self._forgotten.items()):
            if state.height > height + FORGOTTEN_JOB_HEIGHTS:
                self._delete_before(key, last + 1, state)
                del self._forgotten[key]

    def _delete(self, key: bytes, job: Job, state: LedgerState) -> None:
        self._delete_before(key, first_kept_round(key, job, state, self.driver.payload_bytes), state)

    def _delete_before(self, key: bytes, first: int, state: LedgerState) -> None:
        """Delete payloads of the job's rounds before `first`, the oldest first.

        The search goes back from `first` until a round has no payloads. After an interruption, it therefore finds the remaining
        payloads.
        """
        passed = list[Sequence[bytes]]()
        for number in range(first - 1, -1, -1):
            named = self._accepted(key, number)
            here = [digest for digest in named or () if self.driver.blobs.size(digest) is not None]
            if named is None or (named and not here):
                break  # payloads of older rounds were deleted before, or never stored
            passed.append(here)
        lately = self._named_lately(state) if passed else set()
        for digests in reversed(passed):
            self.driver.blobs.drop_blobs(digest for digest in digests if digest not in lately)

    def _named_lately(self, state: LedgerState) -> set[bytes]:
        """Return the accepted payloads of recent rounds.

        These payloads stay even if an old round has accepted the same payload.
        """
        before, self._lately = self._lately, {}
        for key, job in state.jobs.jobs.items():
            if job.phase is not JobPhase.FINISHED:
                first = max(first_kept_round(key, job, state, self.driver.payload_bytes), job.round - ROUNDS_MIN)
                for of in ((key, number) for number in range(first, job.round)):
                    self._lately[of] = before[of] if of in before else tuple(self._accepted(*of) or ())
        return {digest for named in self._lately.values() for digest in named}

    def _accepted(self, key: bytes, number: int) -> Sequence[bytes] | None:
        """Return the digests of a closed round's accepted payloads, or None if its block is older than this peer's snapshot."""
        stored = self.driver.store.closed_round(key, number)
        decided = None if stored is None else self.driver.store.get_decision(stored.height)
        if decided is None:
            return None
        closings = [closing for closing in decode_body(decided.decode().body).round_certificates if closing.job == key]
        signed = [signed for closing in closings for signed in closing.proposals]
        return [codec.decode_message(item.body, (Proposal,)).payload for item in signed]


def is_round_open(key: bytes, number: int, state: LedgerState) -> bool:
    """Return whether the round is open, or not opened yet."""
    job = state.jobs.jobs.get(key)
    return job is not None and job.round <= number and job.phase is not JobPhase.FINISHED


def _is_closed(key: bytes, number: int, state: LedgerState) -> bool:
    """Return whether the round of this job was closed. A round that was open when its job ended was not."""
    job = state.jobs.jobs.get(key)
    return job is None or job.round > number


def first_kept_round(key: bytes, job: Job, state: LedgerState, bytes_max: int) -> int:
    """Return the first round of a job whose payloads stay.

    `bytes_max` bounds the size of a job's payloads, and 0 means no bound.
    """
    if not bytes_max:
        return 0
    spec, audits = JobSpec.decode(job.spec), state.audits.jobs.get(key)
    audited = (*audits.rounds, *(of.round for of in audits.disputes)) if audits else ()
    needed = min((job.round, *audited)) - spec.suspension_rounds - 1
    return max(0, min(needed, job.round - job_disk_space(spec, len(job.trainers), trains=False).rounds_kept(bytes_max)))


@dataclass
class BlobPinner:
    """The task that fetches and pins the blobs that modules of the ledger name (`Module.pinned_blobs`).

    Blobs for which a module names a replacement (`Module.replaced_blobs`) are replaced.
    """

    driver: Driver
    _places: trio.CapacityLimiter = field(default_factory=lambda: trio.CapacityLimiter(FETCHES_MAX))

    async def run(self) -> None:
        """Fetch the blobs that each block adds, and apply its replacements."""
        wanted = set[bytes]()  # blobs that are stored or being fetched
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
                log.debug("%s names the blob %s: fetching it", module, digest.hex()[:16])
            await self.driver.network.fetch_blob(digest, size_max, ())
            self.driver.blobs.pin_blob(digest)

    async def _replace(self, replaced: BlobReplacement) -> None:
        blobs = self.driver.blobs
        try:
            old = await trio.to_thread.run_sync(blobs.read_blob, replaced.old, replaced.size_max)
            made = await trio.to_thread.run_sync(replaced.make, old)
        except MissingBlobError:  # no replacement: most peers do not store the old blob
            return
        if made is not None:
            await trio.to_thread.run_sync(blobs.add_bytes, made)
            await trio.to_thread.run_sync(blobs.delete_blob, replaced.old)


class StartModelAttester:
    """The task that fetches and checks the start models of queued jobs, and attests that this voter has them.

    A job starts when a quorum of voters has attested its start model.
    """

    def __init__(self, driver: Driver, author: TransactionSubmitter) -> None:
        self._driver, self._author = driver, author
        self._begun: set[bytes] = set()

    async def run(self) -> None:
        self._begun.clear()  # a system fault may have ended an earlier call, whose tasks must begin again
        async with trio.open_nursery() as nursery:
            while True:
                applied = self._driver.block_applied
                for key, waiting in self._due().items():
                    if key not in self._begun:
                        self._begun.add(key)
                        nursery.start_soon(self._attest, key, JobSpec.decode(waiting.spec))
                await applied.wait()

    def _due(self) -> dict[bytes, QueuedJob]:
        state, me = self._driver.state, self._driver.signer.public
        if me not in state.members.voters:
            return {}
        return {
            waiting.job: waiting
            for waiting in state.jobs.queue
            if me not in (*waiting.start_model_holders, *waiting.stop_requests)
            and self._driver.host.terms_of_spec(waiting.spec).start is not None
        }

    async def _attest(self, key: bytes, spec: JobSpec) -> None:
        """Attest the job's start model, or request the end of the job if the model is invalid.

        The transaction is retried until it is decided, or until the job leaves the queue.
        """
        from training import parameter_blob

        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._cancelled_when_over, key, nursery.cancel_scope)
            await self._fetched(spec)
            assert spec.initial_model is not None
            size = self._driver.blobs.size(spec.initial_model) or 0
            problem = await trio.to_thread.run_sync(parameter_blob.blob_problem, spec, size, self._driver.blobs.read_range)
            if problem is not None:
                self._driver.events.add(
                    "warning", f"job {spec.name!r} cannot start: {problem}; this voter votes to end it", job=key
                )
            while key in self._due():
                try:
                    await self._author.submit(
                        *(("job/attest-start-model", AttestStartModel(key)) if problem is None else ("job/stop", StopJob(key)))
                    )
                except UserError as error:
                    self._driver.events.add_detail(
                        "warning", f"the initial model of job {spec.name!r} is not attested: {error}", job=key
                    )
                    await trio.sleep(RETRY_SECONDS)
        self._begun.discard(key)

    async def _cancelled_when_over(self, key: bytes, scope: trio.CancelScope) -> None:
        while key in self._due():
            await self._driver.block_applied.wait()
        scope.cancel()

    async def _fetched(self, spec: JobSpec) -> None:
        """Fetch a job's start model from any peer as soon as the disk has room for it, and pin the blob."""
        from training import parameter_blob

        assert spec.initial_model is not None
        size, told = parameter_blob.blob_bytes(spec), False
        while True:
            try:
                require_disk_space(self._driver.store.path.parent, size, "initial model")
                break
            except UserError as error:
                if not told:
                    self._driver.events.add("warning", f"job {spec.name!r} waits until this voter has its initial model: {error}")
                told = True
                await trio.sleep(RETRY_SECONDS)
        await self._driver.network.fetch_blob(spec.initial_model, size, ())
        self._driver.blobs.pin_blob(spec.initial_model)
