"""The samplers of a gateway: models from which clients draw samples.

A sampler is the model of a finished job, or the model of a run at the time when the sampler was made. The gateway keeps a copy of
the adapters of the latter, since peers delete the models of past rounds. Samplers stay after a restart. Samples do not: the SDK
requests lost samples again.
"""

from __future__ import annotations

import logging
import shutil
import struct
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio

from clients.gateway.request_store import RequestStore, StoredCheckpoint, StoredSampler
from clients.gateway.sample_request import SampleRequest, pack_tokens, parse_sample_request
from clients.gateway.threads import decode_in_thread, run_in_thread
from clients.records import TOKEN_BYTES
from clients.wire.results import SampledSequence, StopReason, encode_samples
from ledger.jobs import Job
from protocol.errors import FolkmootError, UserError
from protocol.sampling import EndReason
from training.api.initial_model import resolve_base_job
from training.api.job_builder import fetch_job_blob
from training.data.tokenizer import ByteTokenizer, parse_bpe
from training.job_spec import JobSpec
from training.round_context import OpenRoundContext, TrainingPeer, WorkerClient
from training.worker_protocol import GenerateTokensRequest, ScoreTokensRequest, TokenSample, generate_tokens
from web.calls import Json

# Samplers of one model whose copies stay: a loop makes a new sampler after each step, and uses the last ones.
SAMPLERS_OF_MODEL_MAX: Final = 8
# Requests that are computed at once. The worker keeps eight unfinished ones, of which other programs need some.
REQUESTS_AT_ONCE: Final = 4
# Requests that wait for their samples. A key has at most half of those that others leave: the SDK has 400 for each session.
WAITING_MAX: Final = 1_024
RESULTS_BYTES_MAX: Final = 64 << 20  # bytes of all results in memory; the SDK requests lost samples again


log = logging.getLogger("site")


@dataclass(frozen=True, slots=True)
class SampleFault:
    text: str
    is_of_client: bool


class Samplers:
    def __init__(
        self,
        peer: TrainingPeer,
        store: RequestStore,
        folder: Path,
        announce: Callable[[str], None],
        spawn: Callable[[Callable[[], Awaitable[None]]], None],
    ) -> None:
        """`announce` is called with the name of each request that has a result. `spawn` runs a function in a task of its own."""
        self._peer, self._store, self._folder, self._announce, self._spawn = peer, store, folder, announce, spawn
        self._limiter = trio.CapacityLimiter(REQUESTS_AT_ONCE)
        self._waiting = dict[str, str]()  # owner of each request that waits, by its name
        self._results = OrderedDict[str, bytes | SampleFault]()
        self._results_bytes = 0

    # Samplers --------------------------------------------------------------------------------------------------------

    async def open_base(self, sampler: str, owner: str, base: str) -> None:
        """Open a sampler of a finished job, given by its name or id. Raises `UserError`."""
        reference, _, _ = resolve_base_job(self._peer, base, "base_model")
        stored = StoredSampler(sampler, owner, reference.job, reference.round)
        await run_in_thread(self._store.add_sampler, stored)

    async def open_saved(self, sampler: str, found: StoredCheckpoint) -> None:
        """Open a sampler of a checkpoint."""
        stored = StoredSampler(sampler, found.owner, found.job, found.round, path=found.path)
        await run_in_thread(self._store.add_sampler, stored)

    async def open_run(self, sampler: str, model: str, key: bytes) -> None:
        """Open a sampler of the present adapters of a client's model. No step of its run may be open until this call returns."""
        job, known = self._job(key), await run_in_thread(self._store.find_model, model)
        assert known is not None
        copy = self._copy_of(key, job.round)
        if not copy.is_dir():
            source = self._peer.make_round_context(key, job.round, job).model_directory
            await run_in_thread(_copy_directory, source, copy)
        await run_in_thread(self._store.add_sampler, StoredSampler(sampler, known.owner, key, job.round, model))
        await self._delete_copies_but(model, SAMPLERS_OF_MODEL_MAX)

    async def delete_copies(self, model: str) -> None:
        """Delete the adapters of all samplers of a client's model, whose session is over."""
        await self._delete_copies_but(model, 0)

    async def _delete_copies_but(self, model: str, newest: int) -> None:
        copies = [self._copy_of(*each) for each in await run_in_thread(self._store.list_copied_models, model)]
        old = set(copies[newest:]) - set(copies[:newest])
        await run_in_thread(_delete_directories, self._folder, old)

    def _copy_of(self, key: bytes, round: int) -> Path:
        return self._folder / f"{key.hex()[:32]}-{round}"

    # Samples ---------------------------------------------------------------------------------------------------------

    def find_result(self, name: str) -> bytes | SampleFault | None:
        """Return the result of a request; None: it is being computed. Raises `KeyError` if it is unknown or was dropped."""
        return None if name in self._waiting else self._results[name]

    def request_samples(self, name: str, sampler: StoredSampler, given: Json, spend: Callable[[int], str | None]) -> None:
        """Begin to compute samples. The same name is the same request.

        `spend` accounts for a number of tokens, and returns why a quota refuses them. Raises `OverflowError` if too many requests
        of the same owner wait.
        """
        if name in self._waiting or name in self._results:
            return
        own = sum(owner == sampler.owner for owner in self._waiting.values())
        others = len(self._waiting) - own
        if own >= (WAITING_MAX - others) // 2:
            raise OverflowError
        self._waiting[name] = sampler.owner
        self._spawn(lambda: self._compute(name, sampler, given, spend))

    async def _compute(self, name: str, sampler: StoredSampler, given: Json, spend: Callable[[int], str | None]) -> None:
        try:
            job = self._job(sampler.job)
            model = JobSpec.decode(job.spec).model
            # A prompt may have some ten thousand numbers, so it is checked in a thread.
            request = await decode_in_thread(parse_sample_request, given, model.context, model.vocabulary)
            del given  # A thousand waiting requests with their JSON would take gigabytes.
            if refusal := spend(request.tokens_max):
                raise UserError(refusal)
            async with self._limiter:
                result: bytes | SampleFault = await self._draw(sampler, job, request)
        except FolkmootError as error:
            result = SampleFault(str(error), isinstance(error, UserError))
        except Exception:  # a bug of ours in one request must not stop the peer: the log describes the bug
            log.exception("request %s failed", name)
            result = SampleFault("internal error of the gateway: its log has the details", is_of_client=False)
        self._store_result(name, result)

    async def _draw(self, sampler: StoredSampler, job: Job, request: SampleRequest) -> bytes:
        worker = self._peer.worker_client
        if worker is None:
            raise UserError("this peer has no worker, which a gateway needs: run it with --role full")
        context = self._peer.make_round_context(sampler.job, job.round, job)
        directory = self._peer.models.round_directory(sampler.job, sampler.round)
        if sampler.path is not None and not directory.is_dir():
            raise UserError(f"the weights {sampler.path!r} have expired")
        if sampler.model is not None:
            directory = self._copy_of(sampler.job, sampler.round)
            if not directory.is_dir():
                why = f"its model has {SAMPLERS_OF_MODEL_MAX} newer samplers, or its session is over"
                raise UserError(f"the adapters of sampler {sampler.sampler!r} are deleted: {why}")
        stops = list(request.stop_tokens)
        if request.stops_at_end:
            end = await run_in_thread(self._end_of_text, context.spec)
            stops += [] if end is None else [end]
        asked = GenerateTokensRequest(
            sampler.job,
            str(directory),
            request.prompt,
            request.options,
            request.samples,
            tuple(pack_tokens((token,)) for token in stops),
        )
        samples = await generate_tokens(lambda each: worker.ask_worker(context, each), asked)
        logprobs = await _score_prompt(worker, context, str(directory), request.prompt) if request.scores_prompt else None
        return await decode_in_thread(_encode_result, request, samples, logprobs)

    def _end_of_text(self, spec: JobSpec) -> int | None:
        if spec.tokenizer is None:
            return ByteTokenizer(spec.model.vocabulary).end_of_text
        return parse_bpe(fetch_job_blob(self._peer, spec.tokenizer)).end_of_text

    def _store_result(self, name: str, result: bytes | SampleFault) -> None:
        self._results[name] = result
        self._results_bytes += _result_bytes(result)
        while self._results_bytes > RESULTS_BYTES_MAX and len(self._results) > 1:
            _, dropped = self._results.popitem(last=False)
            self._results_bytes -= _result_bytes(dropped)
        self._waiting.pop(name, None)
        self._announce(name)

    def _job(self, key: bytes) -> Job:
        job = self._peer.state.jobs.jobs.get(key)
        if job is None:
            raise UserError(f"the network has deleted the model of job {key.hex()[:8]}")
        return job


async def _score_prompt(worker: WorkerClient, context: OpenRoundContext, directory: str, prompt: bytes) -> bytes:
    """Return the log-probabilities of the prompt's tokens after the first, float32, little-endian."""
    if len(prompt) == TOKEN_BYTES:
        return b""
    return (await worker.ask_worker(context, ScoreTokensRequest(context.job, directory, prompt))).logprobs


def _encode_result(request: SampleRequest, samples: Sequence[TokenSample], logprobs: bytes | None) -> bytes:
    """Encode samples, and the prompt's log-probabilities if there are any. The first token has none."""
    scores: list[float | None] | None = None
    if logprobs is not None:
        scores = [None, *struct.unpack(f"<{request.prompt_tokens - 1}f", logprobs)]
        if request.scored_last is not None:
            unwanted = max(0, len(scores) - request.scored_last)
            scores[:unwanted] = [None] * unwanted
    return encode_samples([_sequence(sample) for sample in samples], scores)


def _sequence(sample: TokenSample) -> SampledSequence:
    length = len(sample.tokens) // 2
    reason = StopReason.STOP if sample.end is EndReason.STOP else StopReason.LENGTH
    return SampledSequence(struct.unpack(f"<{length}H", sample.tokens), struct.unpack(f"<{length}f", sample.logprobs), reason)


def _result_bytes(result: bytes | SampleFault) -> int:
    """Return the memory that a result is counted with, including its name."""
    return 200 + (len(result) if isinstance(result, bytes) else len(result.text))


def _delete_directories(folder: Path, old: set[Path]) -> None:
    for directory in old.intersection(folder.iterdir() if folder.exists() else ()):
        shutil.rmtree(directory, ignore_errors=True)


def _copy_directory(source: Path, target: Path) -> None:
    """Copy a directory. An interrupted copy leaves no target."""
    unfinished = target.with_suffix(".part")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source, unfinished)
    unfinished.rename(target)
