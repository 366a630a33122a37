"""The HTTP API of a gateway for programs with the SDK `tinker`, versions 0.25 to 0.38.

A call that starts work returns the id of a request. `retrieve_future` returns its result, or its failure. Faults of a client are
such failures, so that a loop that has sent several requests sees each fault in the result of its own request. The SDK repeats
calls with the statuses 408, 409, 429 and 5xx for minutes, and raises all others at once.
"""

from __future__ import annotations

import json
import math
import reprlib
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast

import numpy as np
import trio

from clients.gateway.checkpoints import PATH_CHARACTERS_MAX, SAMPLER_WEIGHTS, WEIGHTS, Checkpoints, expiry, require_name
from clients.gateway.client_runs import ClientRuns, LossReport
from clients.gateway.model_queue import (
    CreateModel,
    CreateSampler,
    LoadCheckpoint,
    ModelQueue,
    ResultEncoders,
    SaveCheckpoint,
)
from clients.gateway.request_store import (
    CREATE_NUMBER,
    END_NUMBER,
    SAMPLER_PART,
    Outcome,
    RequestKind,
    RequestStore,
    StoredModel,
    StoredRequest,
    StoredSampler,
    owner_of,
)
from clients.gateway.rest_api import RestApi, describe_run
from clients.gateway.samplers import SampleFault, Samplers
from clients.gateway.threads import decode_in_thread, run_in_thread
from clients.ledger.clients_module import StepOutcome
from clients.records import RANK_MAX, OptimizerStep
from clients.wire.gradient_request import SEQ_ID_MAX, decode_gradient_request
from clients.wire.results import encode_gradient_result
from features.services import ServiceContext
from protocol import codec
from protocol.codec import COUNT_MAX
from protocol.errors import RemoteProtocolError, UserError
from protocol.limits import NAME_CHARACTERS_MAX
from storage.api_key_store import ApiKey
from training.round_context import TrainingPeer
from web.calls import BytesReply, Credentials, FieldType, HeldReply, HttpProblem, Json
from web.held_replies import HeldReplies

Task = Callable[[], Awaitable[None]]
PROTOBUF: Final = "application/x-protobuf"
FAULT_CATEGORIES: Final = {Outcome.CLIENT_FAULT: "user", Outcome.GATEWAY_FAULT: "server"}
SAMPLE_IDS_MAX: Final = 4_096  # ids in the reply to one request for samples, which may request too many
SESSION_BYTES: Final = 12  # random bytes of a session's id
# Ended and failed models of a key that stay in lists: each costs some hundred bytes of disk.
OLD_MODELS_MAX: Final = 1_024
# Requests of a model without an outcome: more than any loop sends ahead. The SDK repeats one beyond them until it is accepted.
PENDING_MAX: Final = 1_024
WHO_READS: Final = (
    "Every trainer of this network can read the data of your requests, and every peer has your adapters. The ledger keeps the "
    "digests of your data."
)
OBJECT: Final = FieldType("a JSON object", {"type": "object"}, lambda value: isinstance(value, dict))
# Threads that read keys at once. A read takes a millisecond, but once a minute it waits for the disk to record the use of a key:
# programs with hundreds of calls must not occupy all threads of the peer.
AUTHORIZATIONS_AT_ONCE: Final = 4
# The key of all programs on this machine while no key exists. The machine's owner runs them, so the ledger alone bounds them.
LOCAL_PROGRAMS: Final = ApiKey("", 0, 64, 1 << 40, 1 << 40)
# Values of a LoRA configuration that the client leaves out, as in the SDK.
RANK, SEED = 32, 0
# Names of the SDK for the terms of a step that the ledger names otherwise.
SDK_TERMS: Final = {"rate": "learning_rate", "epsilon": "eps", "clip": "grad_clip_norm"}
SEEDS: Final = COUNT_MAX + 1  # number of seeds of a job; other whole numbers are taken modulo this number


@dataclass
class TinkerApi:
    desk: ServiceContext
    held: HeldReplies = field(default_factory=HeldReplies)

    def __post_init__(self) -> None:
        self._peer = peer = cast(TrainingPeer, self.desk.peer)
        self._runs = ClientRuns(peer)
        self._store = RequestStore(self.desk.folder)
        self._queues = dict[str, ModelQueue]()  # running queues, by model
        self._opening, self._creating = trio.Lock(), trio.Lock()
        # Tasks that do not run yet. The quota of models and `samplers.WAITING_MAX` bound their number.
        self._tasks, self._new_tasks = trio.open_memory_channel[Task](math.inf)
        self._authorizations = trio.CapacityLimiter(AUTHORIZATIONS_AT_ONCE)
        self._encoders = ResultEncoders(
            created=_created, losses=_losses, step=_step, sampler=_sampler, saved=_saved, loaded=_loaded
        )
        self._checkpoints = Checkpoints(self._runs, self._store)
        self.rest = RestApi(peer, self._store, self._checkpoints, self._runs)
        self._samplers = Samplers(peer, self._store, self.desk.folder / "samplers", self.held.announce, self._tasks.send_nowait)

    async def authorize(self, credentials: Credentials) -> ApiKey:
        """Return the key of a program. While no key exists, return `LOCAL_PROGRAMS` for the programs on this machine.

        Raises `HttpProblem` for all other programs.
        """
        return await trio.to_thread.run_sync(self._find_key, credentials, limiter=self._authorizations)

    def _find_key(self, credentials: Credentials) -> ApiKey:
        keys = self.desk.api_keys
        if (key := keys.find_key(credentials.token)) is not None:
            return key
        if not keys.is_open():
            raise HttpProblem("unauthorized", "unknown API key: `peer key new NAME` makes one")
        if not credentials.is_local:
            raise HttpProblem(
                "unauthorized",
                "this peer has no API keys, so it serves programs on its own machine alone, and none behind a proxy",
            )
        return LOCAL_PROGRAMS

    async def _require_model(self, key: ApiKey, model: str) -> StoredModel:
        """Return a model of this key. Raises `HttpProblem`."""
        known = await run_in_thread(self._store.find_model, model)
        if known is None or known.owner != owner_of(key):
            raise HttpProblem("not-found", f"no model {model!r}: create one with create_model")
        return known

    async def run_tasks(self) -> None:
        """Compute the requests of all models, also those of an earlier process."""
        for model in await run_in_thread(self._store.list_pending_models):
            self._wake_queue(model)
        async with trio.open_nursery() as nursery:
            async for task in self._new_tasks:
                nursery.start_soon(task)

    def _wake_queue(self, model: str) -> None:
        """Let the queue of a model look for a new request. A queue runs while its model has requests without an outcome."""
        if model in self._queues:
            self._queues[model].wake()
            return
        queue = self._queues[model] = ModelQueue(
            model,
            self._runs,
            self._samplers,
            self._checkpoints,
            self._store,
            self._encoders,
            self._opening,
            lambda model, number: self.held.announce(request_id(model, number)),
        )

        async def run() -> None:
            await queue.run()
            del self._queues[model]  # without a checkpoint after the queue has found no request

        self._tasks.send_nowait(run)

    # Sessions --------------------------------------------------------------------------------------------------------

    async def client_config(self, key: ApiKey) -> Json:
        return {
            "pjwt_auth_enabled": False,
            "parallel_fwdbwd_chunks": False,
            "proto_compress_fwdbwd": False,
            "use_pyqwest_transport": False,
            "sample_use_retrieve_futures": False,
            "custom_loss_server_side": False,
            "create_model_via_load_weights": True,
            "sample_join_sampling_session": False,
            "sample_max_concurrent_requests": 64,
        }

    async def client_dynamic_config(self, key: ApiKey) -> Json:
        return {}

    async def open_session(self, key: ApiKey) -> Json:
        return {"type": "create_session", "session_id": secrets.token_hex(SESSION_BYTES), "info_message": WHO_READS}

    async def session_heartbeat(self, key: ApiKey, session_id: str) -> Json:
        return {"type": "session_heartbeat"}

    async def close_session(self, key: ApiKey, session_id: str) -> Json:
        """Request the ends of a session's runs. Each follows the requests of its model."""
        for model in await run_in_thread(self._store.list_unended_models, owner_of(key), session_id):
            await self._add(key, model, END_NUMBER, RequestKind.END, b"")
        return {}

    async def collect_telemetry(self, key: ApiKey) -> Json:
        return {"status": "accepted"}

    async def check_gateway(self, key: ApiKey) -> Json:
        return {"status": "ok"}

    async def server_capabilities(self, key: ApiKey) -> Json:
        models = [
            {"model_name": name, "max_context_length": context, "trainable": True, "sampleable": True}
            for name, context in self._runs.list_bases()
        ]
        return {"supported_models": models}

    # Models ----------------------------------------------------------------------------------------------------------

    async def create_model(
        self,
        key: ApiKey,
        session_id: str,
        model_seq_id: int,
        base_model: str,
        lora_config: Json,
        optimizer_config: Json,
    ) -> Json:
        async def make_request() -> CreateModel:
            if optimizer_config.get("type", "adamw") != "adamw":
                raise UserError(f"optimizer {reprlib.repr(optimizer_config['type'])} is not supported: use 'adamw'")
            return _create_request(base_model, lora_config)

        return await self._create(key, f"{session_id}:train:{model_seq_id}", session_id, make_request)

    async def _create(self, key: ApiKey, model: str, session: str, make_request: Callable[[], Awaitable[CreateModel]]) -> Json:
        """Request the creation of a model. An error of `make_request` is the failure of the future."""
        owner = owner_of(key)
        async with self._creating:  # so that two requests together cannot exceed the quota
            known = await run_in_thread(self._store.find_model, model)
            if known is not None and known.owner != owner:
                raise HttpProblem("not-found", f"session {session!r} belongs to another key")
            kind, payload = RequestKind.INVALID, b""
            if known is None and await self._count_models(owner) >= key.models_max:
                payload = f"the key {key.name!r} has {key.models_max} models, its quota: end a session".encode()
            else:
                try:
                    payload = codec.encode(await make_request())
                    kind = RequestKind.CREATE
                except UserError as error:
                    payload = str(error).encode()
            await run_in_thread(self._store.add_model, model, session, owner)
            await self._add(key, model, CREATE_NUMBER, kind, payload)
            await run_in_thread(self._store.drop_old_models, owner, OLD_MODELS_MAX, self._runs.time_ms)
        return {"request_id": request_id(model, CREATE_NUMBER), "model_id": model}

    async def _count_models(self, owner: str) -> int:
        """Return the number of an owner's models that are being created, or whose run is unfinished."""
        jobs = await run_in_thread(self._store.list_owner_jobs, owner)
        return sum(job is None or self._runs.is_unfinished(job) for job in jobs)

    # Checkpoints -----------------------------------------------------------------------------------------------------

    async def save_weights(self, key: ApiKey, model_id: str, seq_id: int, path: Any, ttl_seconds: Any, overwrite: bool) -> Json:
        await self._save(key, model_id, seq_id, WEIGHTS, path, ttl_seconds, overwrite)
        return {"request_id": request_id(model_id, seq_id), "model_id": model_id}

    async def load_weights(
        self,
        key: ApiKey,
        path: str,
        optimizer: bool,
        model_id: str | None,
        seq_id: int | None,
        session_id: str | None,
        model_seq_id: int | None,
    ) -> Json:
        if session_id is not None and model_seq_id is not None:

            async def make_request() -> CreateModel:
                saved = describe_run(self._peer, (await self._checkpoints.find_checkpoint(owner_of(key), path)).job)
                if saved is None:
                    raise UserError(f"no weights {path!r}: the network has deleted their run")
                return replace(saved, path=path, with_moments=optimizer)

            return await self._create(key, f"{session_id}:train:{model_seq_id}", session_id, make_request)
        if model_id is None or seq_id is None:
            raise HttpProblem("malformed", "load_weights needs model_id and seq_id, or session_id and model_seq_id")
        if len(path) > PATH_CHARACTERS_MAX:
            await self._add(key, model_id, seq_id, RequestKind.INVALID, f"no weights {path[:60]!r}…".encode())
        else:
            await self._add(key, model_id, seq_id, RequestKind.LOAD, codec.encode(LoadCheckpoint(path, optimizer)))
        return {"request_id": request_id(model_id, seq_id), "model_id": model_id}

    async def _save(
        self, key: ApiKey, model: str, number: int, kind: str, name: Any, ttl_seconds: Any, overwrite: bool = False
    ) -> None:
        try:
            expires_ms = expiry(self._runs.time_ms, ttl_seconds)
            saved = SaveCheckpoint(f"{kind}/{require_name(name)}", expires_ms, overwrite, key.stored_bytes_max)
            payload = codec.encode(saved)
            await self._add(key, model, number, RequestKind.SAVE, payload)
        except UserError as error:
            await self._add(key, model, number, RequestKind.INVALID, str(error).encode())

    async def get_info(self, key: ApiKey, model_id: str) -> Json:
        known = await self._require_model(key, model_id)
        created = await run_in_thread(self._store.find_created_model, known.owner, model_id)
        if created is None:
            raise HttpProblem("not-found", f"model {model_id!r} was not created: see the failure of create_model")
        model = describe_run(self._peer, known.job) or codec.decode(CreateModel, created.creation)
        return {
            "type": "get_info",
            "model_id": model_id,
            "model_name": model.base,
            "is_lora": True,
            "lora_rank": model.rank,
            "model_data": {"model_name": model.base, "arch": "folkmoot"},
        }

    # Steps -----------------------------------------------------------------------------------------------------------

    async def forward_backward(self, key: ApiKey, body: bytes) -> Json:
        try:
            request = await decode_in_thread(decode_gradient_request, body)
        except RemoteProtocolError as error:  # it names no model or no number, so no future can fail
            raise HttpProblem("malformed", error.detail) from None
        kind, payload = RequestKind.INVALID, (request.problem or "").encode()
        await self._require_model(key, request.model_id)
        # A repeated request costs no tokens.
        known = await run_in_thread(self._store.find_outcome, request.model_id, request.seq_id)
        if known is None and request.body is not None:
            await self._require_place(request.model_id, request.seq_id)
            refusal = self.desk.api_keys.spend_tokens(key, request.body.tokens, time.monotonic())
            payload = (refusal or "").encode() or await decode_in_thread(codec.encode, request.body)
            if not refusal:
                kind = RequestKind.FORWARD if request.forward_only else RequestKind.GRADIENT
        await self._add(key, request.model_id, request.seq_id, kind, payload)
        return {"request_id": request_id(request.model_id, request.seq_id), "model_id": request.model_id}

    async def optim_step(self, key: ApiKey, model_id: str, seq_id: int, adam_params: Json, optimizer_params: Json) -> Json:
        kind, payload = RequestKind.STEP, b""
        try:
            payload = codec.encode(_optimizer_step(adam_params, optimizer_params))
        except UserError as error:
            kind, payload = RequestKind.INVALID, str(error).encode()
        await self._add(key, model_id, seq_id, kind, payload)
        return {"request_id": request_id(model_id, seq_id), "model_id": model_id}

    async def _add(self, key: ApiKey, model: str, number: int, kind: RequestKind, payload: bytes) -> None:
        """Store a request durably, and let its queue compute it. A request beyond the key's quota of bytes becomes invalid."""
        await self._require_model(key, model)
        await self._require_place(model, number)
        # Steps and ends are always allowed, because they free the bytes of gradients.
        stored_max = -1 if kind in (RequestKind.STEP, RequestKind.END) else key.stored_bytes_max
        owner, add = owner_of(key), self._store.add_request
        if not await run_in_thread(add, model, number, kind, payload, owner, self._runs.time_ms, stored_max):
            stored = await run_in_thread(self._store.stored_bytes, owner, self._runs.time_ms)
            fault = f"the key {key.name!r} stores {stored:,} bytes, its quota is {key.stored_bytes_max:,}"
            await run_in_thread(add, model, number, RequestKind.INVALID, fault.encode())
        self._wake_queue(model)

    async def _require_place(self, model: str, number: int) -> None:
        """Raise `HttpProblem` if too many requests of a model have no outcome. The SDK repeats such a request."""
        pending, largest = await run_in_thread(self._store.count_pending, model)
        # A number before others that wait holds them up, so it is accepted longer.
        if number < END_NUMBER and pending >= (PENDING_MAX if number > largest else 2 * PENDING_MAX):
            raise HttpProblem("too-many", f"{pending} requests of {model!r} wait for their results", retry_after=1)

    # Samples ---------------------------------------------------------------------------------------------------------

    async def save_weights_for_sampler(
        self,
        key: ApiKey,
        model_id: str,
        seq_id: int,
        path: Any,
        ttl_seconds: Any,
        sampling_session_seq_id: int | None,
    ) -> Json:
        known = await self._require_model(key, model_id)
        if path is not None or sampling_session_seq_id is None:
            await self._save(key, model_id, seq_id, SAMPLER_WEIGHTS, path, ttl_seconds)
        else:
            payload = codec.encode(CreateSampler(sampler_id(known.session, sampling_session_seq_id)))
            await self._add(key, model_id, seq_id, RequestKind.SAMPLER, payload)
        return {"request_id": request_id(model_id, seq_id), "model_id": model_id}

    async def open_sampling_session(
        self,
        key: ApiKey,
        session_id: str,
        sampling_session_seq_id: int,
        base_model: str | None,
        model_path: str | None,
    ) -> Json:
        sampler = sampler_id(session_id, sampling_session_seq_id)
        try:
            if model_path is not None:
                await self._samplers.open_saved(sampler, await self._checkpoints.find_checkpoint(owner_of(key), model_path))
            elif base_model is not None:
                await self._samplers.open_base(sampler, owner_of(key), base_model)
            else:
                raise UserError("a sampler needs base_model or model_path")
        except UserError as error:
            raise HttpProblem("not-found", str(error)) from None
        await self._require_sampler(key, sampler)
        return {"type": "create_sampling_session", "sampling_session_id": sampler}

    async def get_sampler(self, key: ApiKey, sampler_id: str) -> Json:
        sampler = await self._require_sampler(key, sampler_id)
        try:
            base = self._runs.base_of(sampler.job)
        except UserError as error:
            raise HttpProblem("not-found", str(error)) from None
        return {"sampler_id": sampler_id, "base_model": base, "model_path": sampler.path}

    async def draw_samples(
        self,
        key: ApiKey,
        sampling_session_id: str,
        seq_id: int,
        prompt: Any,
        num_samples: Any,
        sampling_params: Any,
        prompt_logprobs: Any,
        prompt_logprobs_last_n: Any,
        topk_prompt_logprobs: Any,
        topk_sample_logprobs: Any,
        prompt_alt_tokens_k: Any,
        target_prompt_logprobs: Any,
        record_stability_info: Any,
    ) -> Json:
        sampler, name = await self._require_sampler(key, sampling_session_id), request_id(sampling_session_id, seq_id)
        given = {
            "prompt": prompt,
            "num_samples": num_samples,
            "sampling_params": sampling_params,
            "prompt_logprobs": prompt_logprobs,
            "prompt_logprobs_last_n": prompt_logprobs_last_n,
            "topk_prompt_logprobs": topk_prompt_logprobs,
            "topk_sample_logprobs": topk_sample_logprobs,
            "prompt_alt_tokens_k": prompt_alt_tokens_k,
            "target_prompt_logprobs": target_prompt_logprobs,
            "record_stability_info": record_stability_info,
        }

        def spend(tokens: int) -> str | None:
            return self.desk.api_keys.spend_tokens(key, tokens, time.monotonic())

        try:
            self._samplers.request_samples(name, sampler, given, spend)
        except OverflowError:
            raise HttpProblem("too-many", "too many requests for samples wait", retry_after=1) from None
        # The SDK expects an id for each sample, even if the request fails.
        samples = num_samples if type(num_samples) is int else 1
        ids = [f"{name}-{number}" for number in range(min(samples, SAMPLE_IDS_MAX))]
        return {"request_id": name, "sample_sequence_ids": ids}

    async def _require_sampler(self, key: ApiKey, name: str) -> StoredSampler:
        """Return a sampler of this key. Raises `HttpProblem`."""
        sampler = await run_in_thread(self._store.find_sampler, name)
        if sampler is None or sampler.owner != owner_of(key):
            raise HttpProblem("not-found", f"no sampler {name!r}: create one with create_sampling_client")
        return sampler

    # Results ---------------------------------------------------------------------------------------------------------

    async def retrieve_future(self, key: ApiKey, request_id: str) -> Json | BytesReply | HeldReply:
        model, _, number = request_id.rpartition("#")
        if SAMPLER_PART in model:
            await self._require_sampler(key, model)
            return self._samples_reply(request_id)
        known, request = await run_in_thread(self._store.find_model, model), None
        is_number = number.isascii() and number.isdecimal() and len(number) <= len(str(SEQ_ID_MAX))
        if known is not None and known.owner == owner_of(key) and is_number:
            request = await run_in_thread(self._store.find_outcome, model, int(number))
        if request is None:
            unknown = reprlib.repr(request_id)
            raise HttpProblem("not-found", f"no request {unknown}: it was not sent, or its result was dropped after many others")
        return _future_reply(request)

    async def cancel_future(self, key: ApiKey, request_id: str) -> Json:
        """Accept the wish to cancel a request. It is computed nevertheless: the SDK only saves work with this call."""
        return {}

    def _samples_reply(self, name: str) -> Json | BytesReply | HeldReply:
        try:
            result = self._samplers.find_result(name)
        except KeyError:  # For this status alone, the SDK requests the samples again.
            raise HttpProblem("gone", f"no request {name!r}") from None
        if result is None:
            return _try_again(name)
        if isinstance(result, SampleFault):
            return {"error": result.text, "category": "user" if result.is_of_client else "server"}
        return BytesReply(PROTOBUF, result)


def sampler_id(session: str, number: int) -> str:
    return f"{session}{SAMPLER_PART}{number}"


def request_id(model: str, number: int) -> str:
    return f"{model}#{number}"


def _future_reply(request: StoredRequest) -> Json | BytesReply | HeldReply:
    name = request_id(request.model, request.number)
    if request.outcome is Outcome.PENDING:
        return _try_again(name)
    if request.outcome in FAULT_CATEGORIES:
        return {"error": request.result.decode(), "category": FAULT_CATEGORIES[request.outcome]}
    if request.kind in (RequestKind.FORWARD, RequestKind.GRADIENT):
        return BytesReply(PROTOBUF, request.result)
    reply: Json = json.loads(request.result)
    return reply


def _try_again(name: str) -> HeldReply:
    return HeldReply(name, {"type": "try_again", "request_id": name, "queue_state": "active"})


def _create_request(base: str, lora: Json) -> CreateModel:
    """Return the payload of a request that creates a model. Raises `UserError` for an invalid value."""
    rank, seed = lora.get("rank", RANK), lora.get("seed")
    if not 0 < len(base) <= NAME_CHARACTERS_MAX:
        raise UserError(
            f"base_model {reprlib.repr(base)} has {len(base)} characters: a name or id of a job has 1 to {NAME_CHARACTERS_MAX}"
        )
    if type(rank) is not int or not 0 < rank <= RANK_MAX:
        raise UserError(f"rank must be a whole number in 1..{RANK_MAX}, not {reprlib.repr(rank)}")
    if type(seed) is not int and seed is not None:
        raise UserError(f"seed must be a whole number, not {reprlib.repr(seed)}")
    attn, mlp, unembed = (lora.get(name, True) is not False for name in ("train_attn", "train_mlp", "train_unembed"))
    return CreateModel(base, rank, (SEED if seed is None else seed) % SEEDS, attn, mlp, unembed)


def _optimizer_step(adam: Json, other: Json) -> OptimizerStep:
    """Return the terms of a step. Raises `UserError` for an invalid value."""
    if other:
        raise UserError(f"optimizer {reprlib.repr(other.get('type'))} is not supported: use AdamParams")
    # Names and defaults of the SDK's AdamParams.
    usual = {
        "learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0
    }  # fmt: skip
    values = []
    for name, default in usual.items():
        value = adam.get(name, default)
        if type(value) not in (int, float):
            raise UserError(f"{name} must be a number, not {reprlib.repr(value)}")
        try:
            values.append(float(value))
        except OverflowError:
            raise UserError(f"{name} is too large: {reprlib.repr(value)}") from None
    step = OptimizerStep(*values)
    if problem := step.problem():
        term, _, rest = problem.partition(" ")
        raise UserError(f"{SDK_TERMS.get(term, term)} {rest}")
    return step


def _created(model: str) -> bytes:
    return json.dumps({"type": "create_model", "model_id": model}).encode()


def _losses(report: LossReport) -> bytes:
    logprobs = [np.frombuffer(data, dtype="<f4") for data in report.logprobs]
    return encode_gradient_result({"logprobs": logprobs}, {"loss:sum": report.loss})


def _step(outcome: StepOutcome) -> bytes:
    metrics: dict[str, Any] = {"round:max": outcome.round, "refused_rounds:max": sum(outcome.rejected.values())}
    return json.dumps({"metrics": metrics}).encode()


def _saved(path: str) -> bytes:
    return json.dumps({"path": path}).encode()  # without `type`, which would differ between weights and samplers


def _loaded(model: str, path: str) -> bytes:
    return json.dumps({"type": "load_weights", "model_id": model, "path": path}).encode()


def _sampler(sampler: str) -> bytes:
    return json.dumps({"type": "save_weights_for_sampler", "sampling_session_id": sampler}).encode()
