"""This peer's own proposals while others audit them: buffers that auditors ask for, and losses that this peer opens."""

from __future__ import annotations

import logging
import math

import trio

from ledger.audits.audit_state import LOSS_OPENING_KIND, LossOpeningDuty, loss_opening_duties, proposals_to_serve
from peer.roles import voter
from peer.runtime.driver import Driver
from peer.runtime.transaction_submitter import TransactionSubmitter
from protocol.errors import FolkmootError, StorageError
from protocol.units import display_round_number
from storage.disk_blob_store import JOB_BYTES

RETRY_SECONDS = 5.0  # after this peer's own worker failed, or its transaction was refused; doubled each time
RETRY_SECONDS_MAX = 300.0

log = logging.getLogger("peer")


class AuditedProposals:
    def __init__(self, driver: Driver, author: TransactionSubmitter) -> None:
        self._driver, self._author, self._me = driver, author, driver.signer.public
        self._opening: set[LossOpeningDuty] = set()  # what this peer is opening, or cannot open

    def open_losses(self, nursery: trio.Nursery) -> None:
        """Begins to open losses that are due."""
        begun, audits = self._opening, self._driver.rules.audits_module
        self._opening = set(audits.loss_openings_due(self._me, self._driver.state))
        for due in self._opening - begun:
            nursery.start_soon(self._open_loss, due)

    async def _open_loss(self, due: LossOpeningDuty) -> None:
        """Tried again, with pauses, while it is due: what is not opened in time costs a reward, and no more."""
        computing, pause = self._driver.round_executor.participant.worker_client, RETRY_SECONDS
        kept = voter.read_opening(computing.text_folder, due.job, due.round, due.trainer) if computing else None
        while computing is not None and kept is not None and due in self._opening:
            try:
                await self._author.submit(LOSS_OPENING_KIND, kept, math.inf)
                path = voter.opening_path(computing.text_folder, due.job, due.round, due.trainer)
                voter.delete_files([path])
                return
            except StorageError:
                raise
            except FolkmootError as error:
                log.info("the loss of round %d is not opened yet: %s", display_round_number(due.round), error)
            await trio.sleep(pause)
            pause = min(RETRY_SECONDS_MAX, 2 * pause)

    async def delete_expired_files(self) -> None:
        """Deletes buffers that no auditor may ask for any more, and losses that are not to be opened.

        The audit window bounds the buffers that may be asked for; `training.job_spec.AUDIT_BYTES_MAX` bounds them when a job
        begins.
        """
        # What is here is listed before the state is looked at: the files of a round that opens meanwhile stay.
        kept = await trio.to_thread.run_sync(self._driver.blobs.retained_rounds)
        computing = self._driver.round_executor.participant.worker_client
        sealed = await trio.to_thread.run_sync(voter.list_opening_files, computing.text_folder) if computing else ()
        state = self._driver.state
        served, running = proposals_to_serve(self._me, state), state.jobs.unfinished()
        asked = {(proposal.job[:JOB_BYTES], proposal.round) for proposal in served}
        opened = {key[:JOB_BYTES]: job.round for key, job in running.items()}
        unasked = [entry for entry in kept if entry not in asked and entry[1] < opened.get(entry[0], entry[1] + 1)]
        if unasked:
            await trio.to_thread.run_sync(self._driver.blobs.delete_rounds, unasked)
        if sealed:
            mine = {(due.job, due.round) for due in loss_opening_duties(self._me, state)}
            mine |= {(proposal.job, proposal.round) for proposal in served} | {(key, job.round) for key, job in running.items()}
            prefixes = tuple(voter.round_file_prefix(*place) for place in mine)
            unneeded = [path for path in sealed if not path.name.startswith(prefixes)]
            await trio.to_thread.run_sync(voter.delete_files, unneeded)
