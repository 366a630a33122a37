"""Calls about trained models: generated text, exports of a run, and model files."""

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
from protocol.sampling import Activations, SamplingOptions
from training import worker_protocol
from training.api.job_builder import fetch_job_blob
from training.transformer import int8_problem

# Longest fetch of all missing updates; after it, the export fails and names the block of a missing update.
EXPORT_FETCH_SECONDS_MAX = 600.0
UPDATE_FETCH_SECONDS_MAX = 20.0  # longest fetch of one update: it may be that no peer has the update any more


@dataclass(frozen=True)
class ModelRpcHandler(ModelRpc):
    peer: RunningPeer

    async def sample_text(
        self, prompt: str, how: SamplingOptions, job: str = "", turns: tuple[str, ...] | None = None
    ) -> AsyncGenerator[TextPieceView, None]:
        computing = self.peer.driver.round_executor.participant.worker_client
        if computing is None:
            raise UserError("this peer cannot generate text without a worker: use a peer with --role trainer")
        if not prompt:
            raise UserError("the prompt is empty: give some text to continue")
        if len(prompt) > worker_protocol.TEXT_BYTES_MAX:
            raise UserError(
                f"the prompt has {len(prompt)} characters, at most {worker_protocol.TEXT_BYTES_MAX} are allowed: shorten it"
            )
        if sum(map(len, turns or ())) > worker_protocol.TEXT_BYTES_MAX:
            raise UserError(
                f"the earlier turns have more than {worker_protocol.TEXT_BYTES_MAX} characters: leave out the first ones"
            )
        driver = self.peer.driver
        key, number, newer = choose_model(driver.state, driver.host, job)
        found = driver.state.jobs.jobs[key]
        opened = driver.round_executor.make_context((key, found.round), found)
        kind, spec = opened.spec.resolved_objective, opened.spec
        if not kind.makes_text:
            no_text = f"job {found.name!r} generates no text: its objective is {spec.objective!r}"
            raise UserError(f"{no_text}; `peer model DIR --job {key.hex()[:8]}` writes its model")
        problem = int8_problem(spec.model) if how.activations is Activations.INT8 else None
        if problem:
            raise UserError(f"job {found.name!r}: {problem}")
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
                try:
                    async for done in made:
                        if done.text or done.is_withheld:
                            yield TextPieceView(done.text, is_withheld=done.is_withheld)
                except worker_protocol.WorkerFailed as error:
                    raise UserError(f"job {found.name!r}: {error}") from None

    async def saved_samples(self) -> tuple[SampleView, ...]:
        computing = self.peer.driver.round_executor.participant.worker_client
        if computing is None:
            return ()
        kept = await trio.to_thread.run_sync(trainer.saved_samples, computing.text_folder)
        return tuple(SampleView(job, round, text) for job, round, text in kept)

    async def export_run(self, path: str) -> RunExportView:
        """Fetch missing updates from other peers, then export the run.

        Updates are fetched one by one, so that votes find free links.
        """
        driver, folder = self.peer.driver, Path(path)
        await trio.to_thread.run_sync(state_to_export, driver.store, driver.host, self.peer.genesis, folder)
        missing = await trio.to_thread.run_sync(missing_payloads, driver.store, driver.blobs)
        driver.running_exports += 1
        try:
            with trio.move_on_after(EXPORT_FETCH_SECONDS_MAX):
                for digest, size in missing.items():
                    with trio.move_on_after(UPDATE_FETCH_SECONDS_MAX):
                        await driver.network.fetch_blob(digest, size, ())
            stores = driver.store, driver.blobs, driver.host
            return await trio.to_thread.run_sync(export_run, *stores, self.peer.genesis, folder, self.peer.batches)
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
