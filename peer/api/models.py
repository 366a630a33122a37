"""Calls about what was trained: text from a model, and everything decided as files."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import trio

from ledger.jobs import Job
from peer.api.new_job import fetched
from peer.api.running import RunningPeer
from peer.export import taking
from peer.export.found import of_state
from peer.export.writing import export, exported_state, missing_payloads
from peer.roles import samples
from protocol.api import ExportView, ModelCalls, ModelFilesView, SampleView
from protocol.errors import UserError
from rlhf.blocklist import WITHHELD
from training import tasks
from training.spec import JobSpec

FETCHING_SECONDS_MAX = 600.0  # of all updates that an export lacks: it is told what is missing then
FETCHING_ONE_SECONDS_MAX = 20.0  # of one of them, which nobody may hold any more


@dataclass(frozen=True)
class ModelAnswers(ModelCalls):
    peer: RunningPeer

    async def sample(self, prompt: str, tokens: int, temperature: float, seed: int) -> str:
        computing = self.peer.driver.workshop.role.computing
        if computing is None:
            raise UserError("this peer has no worker to generate with: ask one with --role trainer")
        key, job = self._latest_job()
        opened = self.peer.driver.workshop.view((key, job.round), job)
        directory = str(self.peer.driver.host.directory(key, job.round))
        done = await computing.ask(opened, tasks.Generate(key, directory, prompt, tokens, temperature, seed))
        return WITHHELD if done.is_withheld else done.text.decode(errors="replace")

    async def samples(self) -> tuple[SampleView, ...]:
        computing = self.peer.driver.workshop.role.computing
        if computing is None:
            return ()
        kept = await trio.to_thread.run_sync(samples.kept, computing.texts)
        return tuple(SampleView(job, round, text) for job, round, text in kept)

    def _latest_job(self) -> tuple[bytes, Job]:
        jobs = [
            (job.started, key, job)
            for key, job in self.peer.driver.state.jobs.jobs.items()
            if JobSpec.decode(job.spec).kind.makes_text
        ]
        if not jobs:
            raise UserError("no model has been trained yet: start one with `train`")
        _, key, job = max(jobs, key=lambda item: item[:2])
        return key, job

    async def export(self, path: str) -> ExportView:
        """What others hold of the updates that this peer lacks is fetched first, one by one: votes come before."""
        driver, folder = self.peer.driver, Path(path)
        await trio.to_thread.run_sync(exported_state, driver.store, driver.host, self.peer.genesis, folder)
        missing = await trio.to_thread.run_sync(missing_payloads, driver.store, driver.blobs)
        with trio.move_on_after(FETCHING_SECONDS_MAX):
            for digest, size in missing.items():
                with trio.move_on_after(FETCHING_ONE_SECONDS_MAX):
                    await driver.network.fetch(digest, size, ())
        return await trio.to_thread.run_sync(export, driver.store, driver.blobs, driver.host, self.peer.genesis, folder)

    async def model(self, path: str, job: str, format: str) -> ModelFilesView:
        return await trio.to_thread.run_sync(self._take, Path(path), job, format)

    def _take(self, folder: Path, job: str, format: str) -> ModelFilesView:
        taking.require_new(folder)
        driver = self.peer.driver
        read = partial(fetched, self.peer)
        return taking.write(of_state(driver.state, self.peer.genesis, driver.store, driver.host, read, job), folder, format)
