"""Calls about what was trained: text from a model, and everything decided as files."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import trio

from peer.api.running_peer import RunningPeer
from peer.export import model_export
from peer.export.model_provenance import choose_model, model_from_state
from peer.export.run_export import export_run, missing_payloads, require_new_folder, state_to_export
from peer.roles import trainer
from protocol.api import ModelFilesView, ModelRpc, RunExportView, SampleView, TextPieceView
from protocol.errors import UserError
from protocol.sampling import SamplingOptions
from training import worker_protocol
from training.api.job_builder import fetch_job_blob

EXPORT_FETCH_SECONDS_MAX = 600.0  # of all updates that an export lacks: it is told what is missing then
UPDATE_FETCH_SECONDS_MAX = 20.0  # of one of them, which nobody may hold any more


@dataclass(frozen=True)
class ModelRpcHandler(ModelRpc):
    peer: RunningPeer

    async def sample_text(
        self, prompt: str, how: SamplingOptions, job: str = "", turns: tuple[str, ...] | None = None
    ) -> AsyncGenerator[TextPieceView, None]:
        computing = self.peer.driver.round_executor.participant.worker_client
        if computing is None:
            raise UserError("this peer has no worker to generate with: ask one with --role trainer")
        if not prompt:
            raise UserError("the prompt is empty: say some text to go on from")
        if len(prompt) > worker_protocol.TEXT_BYTES_MAX:
            raise UserError(
                f"a prompt of {len(prompt)} characters is longer than {worker_protocol.TEXT_BYTES_MAX}: leave some out"
            )
        if sum(map(len, turns or ())) > worker_protocol.TEXT_BYTES_MAX:
            raise UserError(
                f"the turns before have more than {worker_protocol.TEXT_BYTES_MAX} characters: leave the first ones out"
            )
        driver = self.peer.driver
        key, number, newer = choose_model(driver.state, driver.host, job)
        found = driver.state.jobs.jobs[key]
        opened = driver.round_executor.make_context((key, found.round), found)
        kind, spec = opened.spec.resolved_objective, opened.spec
        if not kind.makes_text:
            raise UserError(f"job {found.name!r} makes no text: it is of the objective {spec.objective!r}")
        directory, stop = str(driver.host.round_directory(key, number)), kind.stop_token(spec)
        if turns is not None and stop is None and not how.stop:
            how = replace(how, stop=("\n",))
        request = worker_protocol.GenerateRequest(key, directory, prompt, how.validated(), stop, turns or ())
        with self.peer.text_slot():
            if newer:
                yield TextPieceView("", newer_round=newer, round=number)
            if kind.moderates_output(spec):
                yield TextPieceView("", is_checked=True)
            async with aclosing(worker_protocol.stream_text(partial(computing.ask_worker, opened), request)) as made:
                async for done in made:
                    if done.text or done.is_withheld:
                        yield TextPieceView(done.text, is_withheld=done.is_withheld)

    async def saved_samples(self) -> tuple[SampleView, ...]:
        computing = self.peer.driver.round_executor.participant.worker_client
        if computing is None:
            return ()
        kept = await trio.to_thread.run_sync(trainer.saved_samples, computing.text_folder)
        return tuple(SampleView(job, round, text) for job, round, text in kept)

    async def export_run(self, path: str) -> RunExportView:
        """What others hold of the updates that this peer lacks is fetched first, one by one: votes come before."""
        driver, folder = self.peer.driver, Path(path)
        await trio.to_thread.run_sync(state_to_export, driver.store, driver.host, self.peer.genesis, folder)
        missing = await trio.to_thread.run_sync(missing_payloads, driver.store, driver.blobs)
        driver.running_exports += 1
        try:
            with trio.move_on_after(EXPORT_FETCH_SECONDS_MAX):
                for digest, size in missing.items():
                    with trio.move_on_after(UPDATE_FETCH_SECONDS_MAX):
                        await driver.network.fetch_blob(digest, size, ())
            return await trio.to_thread.run_sync(export_run, driver.store, driver.blobs, driver.host, self.peer.genesis, folder)
        finally:
            driver.running_exports -= 1

    async def export_model(self, path: str, job: str, format: str) -> ModelFilesView:
        return await trio.to_thread.run_sync(self._take, Path(path), job, format)

    def _take(self, folder: Path, job: str, format: str) -> ModelFilesView:
        require_new_folder(folder)
        driver = self.peer.driver
        read = partial(fetch_job_blob, self.peer)
        return model_export.write_model_files(
            model_from_state(driver.state, self.peer.genesis, driver.store, driver.host, read, job), folder, format
        )
