"""The queue of one model: its requests are computed one after the other, in the order of their numbers.

A fault of the client is the failure of its request's future, and never of the connection. The client goes on with the next
number, and the gradients of its other requests are used.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Final

import trio

from clients.gateway.checkpoints import PATH_CHARACTERS_MAX, Checkpoints
from clients.gateway.client_runs import ClientRuns, LossReport
from clients.gateway.request_store import (
    CREATE_NUMBER,
    END_NUMBER,
    Outcome,
    RequestKind,
    RequestStore,
    StoredModel,
    StoredRequest,
)
from clients.gateway.samplers import Samplers
from clients.gateway.threads import decode_in_thread, run_in_thread
from clients.ledger.clients_module import StepOutcome
from clients.records import OptimizerStep
from protocol import codec
from protocol.codec import Count, Length
from protocol.errors import FolkmootError, StorageError, UserError
from protocol.messages import Name

# Seconds for which a missing number holds up later ones. Numbers are in order for clients that obey the flag
# `parallel_fwdbwd_chunks: false`. A number that is never sent, because the client failed to encode the request, must not hold up
# the next call for long.
GAP_SECONDS: Final = 10.0

# Newest requests of a model whose results stay. A client waits for at most some hundred results at once.
REQUESTS_KEPT: Final = 1_024

LATE: Final = "request {} arrived after request {} was computed: requests are computed in the order of their numbers"
ENDED: Final = "this model is over, because its session was finished: create another one"

log = logging.getLogger("site")


@dataclass(frozen=True, slots=True)
class CreateModel:
    """The payload of a request that creates a model."""

    base: Name
    rank: Count
    seed: Count
    train_attn: bool
    train_mlp: bool
    train_unembed: bool
    path: Annotated[str, Length(0, PATH_CHARACTERS_MAX)] = ""  # checkpoint with which the model begins; empty: with the base
    with_moments: bool = False


@dataclass(frozen=True, slots=True)
class SaveCheckpoint:
    """The payload of a request that saves the model."""

    checkpoint: Name
    expires_ms: Count
    overwrite: bool
    stored_max: Count  # quota of the key: bytes that its owner may store


@dataclass(frozen=True, slots=True)
class LoadCheckpoint:
    """The payload of a request that loads a checkpoint into the model."""

    path: Annotated[str, Length(1, PATH_CHARACTERS_MAX)]
    with_moments: bool


@dataclass(frozen=True, slots=True)
class CreateSampler:
    """The payload of a request that creates a sampler of the model."""

    sampler: Name


@dataclass(frozen=True, kw_only=True)
class ResultEncoders:
    """Functions that encode results for the client."""

    created: Callable[[str], bytes]  # function of the model
    losses: Callable[[LossReport], bytes]
    step: Callable[[StepOutcome], bytes]
    sampler: Callable[[str], bytes]  # function of the sampler
    saved: Callable[[str], bytes]  # function of the checkpoint's path
    loaded: Callable[[str, str], bytes]  # function of the model and the checkpoint's path


class ModelQueue:
    def __init__(
        self,
        model: str,
        runs: ClientRuns,
        samplers: Samplers,
        checkpoints: Checkpoints,
        store: RequestStore,
        encoders: ResultEncoders,
        opening: trio.Lock,
        announce: Callable[[str, int], None],
    ) -> None:
        """Make the queue of a model.

        The queues of all models share the lock `opening`, with which each opens a run and stores its id. `announce` is called
        with the model and the number of each request with an outcome.
        """
        self.model = model
        self._runs, self._samplers, self._checkpoints, self._store = runs, samplers, checkpoints, store
        self._encoders, self._opening, self._announce = encoders, opening, announce
        self._added = trio.Event()

    def wake(self) -> None:
        """Let the queue look for a new request."""
        self._added.set()

    async def run(self) -> None:
        """Compute requests until none is left."""
        while (request := await self._next_request()) is not None:
            outcome, result = await self._compute(request)
            await run_in_thread(self._store.set_outcome, self.model, request.number, outcome, result)
            if request.kind in (RequestKind.STEP, RequestKind.END):
                await run_in_thread(self._store.drop_bodies, self.model, request.number)
            await run_in_thread(self._store.drop_old_requests, self.model, REQUESTS_KEPT)
            self._announce(self.model, request.number)

    async def _next_request(self) -> StoredRequest | None:
        """Return the next request, or None if there is none. Wait for missing earlier numbers for at most `GAP_SECONDS`."""
        deadline: float | None = None
        while True:
            added = self._added = trio.Event()
            last = await run_in_thread(self._store.last_number, self.model)
            request = await run_in_thread(self._store.find_pending, self.model)
            if request is None:
                if added.is_set():
                    continue
                return None
            if request.number < last:
                late = (ENDED if last == END_NUMBER else LATE.format(request.number, last)).encode()
                await run_in_thread(self._store.refuse_request, self.model, request.number, late)
                return replace(request, kind=RequestKind.INVALID, payload=late)
            deadline = trio.current_time() + GAP_SECONDS if deadline is None else deadline
            # No number is missing before an end: the client has said that it sends no further requests.
            if request.number in (last + 1, END_NUMBER) or trio.current_time() >= deadline:
                return request
            with trio.move_on_at(deadline):
                await added.wait()

    async def _compute(self, request: StoredRequest) -> tuple[Outcome, bytes]:
        try:
            return Outcome.DONE, await self._answer(request)
        except FolkmootError as error:
            if isinstance(error, UserError) and not isinstance(error, StorageError):
                return Outcome.CLIENT_FAULT, str(error).encode()
            log.warning("request %d of %s failed: %s", request.number, self.model, error)
            return Outcome.GATEWAY_FAULT, str(error).encode()
        except Exception:  # a bug of ours in one request must not stop the peer: the log describes the bug
            log.exception("request %d of %s failed", request.number, self.model)
            return Outcome.GATEWAY_FAULT, b"internal error of the gateway: its log has the details"

    async def _answer(self, request: StoredRequest) -> bytes:
        match request.kind:
            case RequestKind.CREATE:
                said = codec.decode(CreateModel, request.payload)
                await self._create(said)
                return self._encoders.loaded(self.model, said.path) if said.path else self._encoders.created(self.model)
            case RequestKind.SAVE:
                save = codec.decode(SaveCheckpoint, request.payload)
                job = await self._job()
                path = await self._checkpoints.save_model(
                    self.model,
                    job,
                    save.checkpoint,
                    save.expires_ms,
                    overwrite=save.overwrite,
                    stored_max=save.stored_max,
                )
                return self._encoders.saved(path)
            case RequestKind.LOAD:
                load = codec.decode(LoadCheckpoint, request.payload)
                await self._job()
                await self._load(request.number, load.path, load.with_moments)
                return self._encoders.loaded(self.model, load.path)
            case RequestKind.FORWARD | RequestKind.GRADIENT:
                backward = request.kind is RequestKind.GRADIENT
                report = await self._runs.compute_losses(await self._job(), request.payload, backward=backward)
                return await decode_in_thread(self._encoders.losses, report)
            case RequestKind.STEP:
                return self._encoders.step(await self._step(request))
            case RequestKind.SAMPLER:
                sampler, job = codec.decode(CreateSampler, request.payload).sampler, await self._job()
                await self._samplers.open_run(sampler, self.model, job)
                return self._encoders.sampler(sampler)
            case RequestKind.END:
                model = await self._model()
                if model.job is not None:
                    await self._runs.end_run(model.job)
                await self._samplers.delete_copies(self.model)
                return b"{}"
            case RequestKind.INVALID:
                raise UserError(request.payload.decode())

    async def _create(self, said: CreateModel) -> None:
        """Give the model its first run."""
        if said.path:
            await self._load(CREATE_NUMBER, said.path, said.with_moments)
            return
        open_run = partial(
            self._runs.open_run,
            said.base,
            rank=said.rank,
            seed=said.seed,
            train_attn=said.train_attn,
            train_mlp=said.train_mlp,
            train_unembed=said.train_unembed,
        )
        await self._give_run(CREATE_NUMBER, open_run)

    async def _load(self, number: int, path: str, with_moments: bool) -> None:
        """Give the model a new run, which continues from a checkpoint."""

        async def open_run() -> bytes:
            found = await self._checkpoints.find_checkpoint((await self._model()).owner, path)
            return await self._checkpoints.load_checkpoint(found, with_moments=with_moments)

        await self._give_run(number, open_run)

    async def _give_run(self, number: int, open_run: Callable[[], Awaitable[bytes]]) -> None:
        """Give the model a new run for request `number`, and end the runs that no model has.

        These are the model's former run, and those that a killed process has opened. Its transactions are decided once this one
        has opened a run, because they have the same nonces.
        """
        async with self._opening:
            if (await self._model()).opened_by != number:  # A killed process may have opened the run.
                try:
                    job = await open_run()
                except UserError:  # A run without a model may have the last place.
                    await self._end_unused_runs()
                    job = await open_run()
                await run_in_thread(self._store.set_job, self.model, job, number)
            await self._end_unused_runs()

    async def _end_unused_runs(self) -> None:
        await self._runs.end_unused_runs(await run_in_thread(self._store.list_jobs))

    async def _step(self, request: StoredRequest) -> StepOutcome:
        job = await self._job()
        gradients = await run_in_thread(self._store.gradients_since_step, self.model, request.number)
        if not gradients:
            raise UserError("this step has no gradient: call forward_backward before optim_step")
        step = request.step
        if step is None:
            step = await self._runs.wait_for_turn(job)
            await run_in_thread(self._store.set_step, self.model, request.number, step)
        bodies = [partial(self._store.read_payload, self.model, number) for number in gradients]
        return await self._runs.take_step(job, step, bodies, codec.decode(OptimizerStep, request.payload))

    async def _job(self) -> bytes:
        job = (await self._model()).job
        if job is None:
            raise UserError(f"model {self.model} was not created: see the failure of create_model")
        return job

    async def _model(self) -> StoredModel:
        model = await run_in_thread(self._store.find_model, self.model)
        assert model is not None, "models with requests are not deleted"
        return model
