"""What jobs in the line start from: a voter fetches and checks it, and says that it holds it. A job starts when a quorum does."""

from __future__ import annotations

import trio

from ledger.jobs import AttestStartModel, QueuedJob, StopJob
from peer.runtime.driver import Driver
from peer.runtime.transaction_submitter import TransactionSubmitter
from protocol.errors import UserError
from training.job_disk_space import require_disk_space
from training.job_spec import JobSpec

RETRY_SECONDS = 5.0  # after a statement was not decided, or there was no room


class StartModelAttester:
    """What is due follows from the applied state and what this process has looked at."""

    def __init__(self, driver: Driver, author: TransactionSubmitter) -> None:
        self._driver, self._author = driver, author
        self._begun: set[bytes] = set()

    async def run(self) -> None:
        self._begun.clear()  # a fault of the system may have ended the last run
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
        """Until it is decided that this voter has said something of the job, or the job waits no more."""
        from training import parameter_blob

        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._cancelled_when_over, key, nursery.cancel_scope)
            await self._fetched(spec)
            assert spec.initial_model is not None
            size = self._driver.blobs.size(spec.initial_model) or 0
            problem = await trio.to_thread.run_sync(parameter_blob.blob_problem, spec, size, self._driver.blobs.read_range)
            if problem is not None:
                text = f"job {spec.name!r} cannot start, and this voter wants it to end: {problem}"
                self._driver.events.add("warning", text, job=key)
            while key in self._due():
                try:
                    await self._author.submit(
                        *(("job/attest-start-model", AttestStartModel(key)) if problem is None else ("job/stop", StopJob(key)))
                    )
                except UserError as error:
                    self._driver.events.add_detail("warning", f"what job {spec.name!r} starts from: {error}", job=key)
                    await trio.sleep(RETRY_SECONDS)
        self._begun.discard(key)

    async def _cancelled_when_over(self, key: bytes, scope: trio.CancelScope) -> None:
        while key in self._due():
            await self._driver.block_applied.wait()
        scope.cancel()

    async def _fetched(self, spec: JobSpec) -> None:
        """From whoever has it, as soon as this disk has room for it."""
        from training import parameter_blob

        assert spec.initial_model is not None
        size, told = parameter_blob.blob_bytes(spec), False
        while True:
            try:
                require_disk_space(self._driver.store.path.parent, size, "first model")
                break
            except UserError as error:
                if not told:
                    self._driver.events.add("warning", f"job {spec.name!r} waits for this voter: {error}")
                told = True
                await trio.sleep(RETRY_SECONDS)
        await self._driver.network.fetch_blob(spec.initial_model, size, ())
        self._driver.blobs.pin_blob(spec.initial_model)
