"""Retention of the data of client runs, at a peer with the setting `keep_batches_gb`."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

import trio

from ledger.jobs import Job
from ledger.ledger_state import LedgerState
from peer.node.future_messages import RoundKey
from peer.roles.voter import fetch_brief
from peer.runtime.blob_retention import is_round_open
from peer.runtime.driver import Driver
from protocol.errors import FolkmootError, MissingBlobError, StorageError
from protocol.units import display_round_number
from protocol.verdicts import Verdict
from storage.batch_store import BatchStore
from training.job_spec import JobSpec
from training.round_context import RoundContext


@dataclass
class BatchKeeper:
    """The task that keeps the data of rounds on request that accepted an update.

    All peers delete these data when a round closes, so it fetches them while the round is open, whatever role this peer has. It
    does not get the data of a round that closes earlier, or while this peer is away.
    """

    driver: Driver
    batches: BatchStore
    _fetching: dict[RoundKey, trio.CancelScope] = field(default_factory=dict)  # rounds that are open and not linked yet
    _begun: Set[RoundKey] = frozenset()  # open rounds whose fetch has begun
    _settling: trio.Lock = field(default_factory=trio.Lock)

    async def run(self) -> None:
        self._begun = self.batches.open_rounds()
        async with trio.open_nursery() as nursery:
            while True:
                applied, state = self.driver.block_applied, self.driver.state
                opened = {(key, job.round): job for key, job in state.jobs.running().items() if job.brief}
                for key in self._fetching.keys() - opened.keys():
                    self._fetching[key].cancel()
                await self._settle()
                for key in opened.keys() - self._begun:
                    nursery.start_soon(self._fetch, key, opened[key])
                self._begun = opened.keys()
                await applied.wait()

    async def _settle(self) -> None:
        async with self._settling:
            await trio.to_thread.run_sync(self._settle_closed_rounds, self.driver.state)

    def _settle_closed_rounds(self, state: LedgerState) -> None:
        """Keep the data of rounds that accepted an update, and delete those of others."""
        for key in self.batches.open_rounds():
            if is_round_open(*key, state):
                continue
            closed = self.driver.store.closed_round(*key)
            if closed is None or Verdict.ACCEPT.label not in closed.verdicts.values():
                self.batches.drop_open_round(*key)
                continue
            for deleted in self.batches.keep_round(*key, closed.height):
                text = f"deleted the data of round {display_round_number(deleted.round)}: keep_batches_gb is reached"
                self.driver.events.add("job", text, job=deleted.job, round=deleted.round)

    async def _fetch(self, key: RoundKey, job: Job) -> None:
        driver = self.driver
        if not is_round_open(*key, driver.state):
            return
        round = RoundContext(
            me=driver.signer.public,
            spec=JobSpec.decode(job.spec),
            model=driver.host.open_model(*key),
            model_directory=driver.host.round_directory(*key),
            blobs=driver.blobs,
            fetch=driver.network.fetch_blob,
            brief=job.brief,
        )
        problem = "it closed before this peer had them"
        try:
            with trio.CancelScope() as self._fetching[key]:
                fetched = await fetch_brief(round)
                files = {digest: driver.blobs.path(digest) for digest in fetched.files}
                await trio.to_thread.run_sync(self.batches.add_open_round, *key, files)
                problem = ""
        except FolkmootError as error:
            if isinstance(error, StorageError) and not isinstance(error, MissingBlobError):
                raise
            problem = str(error)
        finally:
            del self._fetching[key]
            driver.blobs.release_owner(round.blob_owner)
        if problem:
            text = f"the data of round {display_round_number(key[1])} are not kept: {problem}"
            driver.events.add("job", text, job=key[0], round=key[1])
        # The round may have closed while the files were linked, and there may be no further block.
        await self._settle()
