"""The calls of the gateway's HTTP API that list the models, sessions and checkpoints of a key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import trio

from clients.gateway.checkpoints import WEIGHTS, Checkpoints, checkpoint_path, expiry
from clients.gateway.client_runs import ClientRuns
from clients.gateway.model_queue import CreateModel
from clients.gateway.request_store import CreatedModel, RequestStore, StoredCheckpoint, owner_of
from clients.gateway.threads import run_in_thread
from clients.records import AdapterSettings
from protocol import codec
from protocol.errors import UserError
from storage.api_key_store import ApiKey
from training.job_spec import JobSpec
from training.round_context import TrainingPeer
from web.calls import HttpProblem, Json

LISTED_MAX: Final = 1_000  # entries of a list in one reply, which then has some hundred kilobytes
OFFSET_MAX: Final = (1 << 31) - 1
# Longest wait for the decision of a transaction in seconds: clients and this peer's server give up after 45 to 60 seconds.
DECISION_SECONDS: Final = 30.0
LOCAL_OWNER: Final = "local"  # name of the owner of models that were created without a key


@dataclass
class RestApi:
    peer: TrainingPeer
    store: RequestStore
    checkpoints: Checkpoints
    runs: ClientRuns

    async def list_training_runs(self, key: ApiKey, limit: int, offset: int) -> Json:
        models, total = await run_in_thread(self.store.list_created_models, owner_of(key), limit, offset)
        return {"training_runs": await self._show_runs(key, models), "cursor": _cursor(limit, offset, total)}

    async def get_training_run(self, key: ApiKey, run_id: str) -> Json:
        (shown,) = await self._show_runs(key, [await self._require_run(key, run_id)])
        return shown

    async def list_checkpoints(self, key: ApiKey, run_id: str) -> Json:
        await self._require_run(key, run_id)
        return {"checkpoints": (await run_in_thread(self._show_checkpoints, key, run_id))[0]}

    async def list_all_checkpoints(self, key: ApiKey, limit: int, offset: int) -> Json:
        page, total = await run_in_thread(self._show_checkpoints, key, None, offset, offset + limit)
        return {"checkpoints": page, "cursor": _cursor(limit, offset, total)}

    async def show_weights(self, key: ApiKey, tinker_path: str) -> Json:
        found = await self._require_checkpoint(key, tinker_path)
        model = describe_run(self.peer, found.job)
        if model is None:
            raise HttpProblem("not-found", f"no weights {tinker_path!r}: the network has deleted their run")
        return {
            "base_model": model.base,
            "is_lora": True,
            "lora_rank": model.rank,
            "train_attn": model.train_attn,
            "train_mlp": model.train_mlp,
            "train_unembed": model.train_unembed,
        }

    async def delete_checkpoint(self, key: ApiKey, run_id: str, kind: str, name: str) -> Json:
        found = await self._require_checkpoint(key, checkpoint_path(run_id, f"{kind}/{name}"))
        with _decided_in_time():
            await self.checkpoints.delete_checkpoint(found)
        return {}

    async def set_checkpoint_ttl(self, key: ApiKey, run_id: str, kind: str, name: str, ttl_seconds: Any) -> Json:
        found = await self._require_checkpoint(key, checkpoint_path(run_id, f"{kind}/{name}"))
        try:
            expires_ms = expiry(self.runs.time_ms, ttl_seconds)
        except UserError as error:
            raise HttpProblem("malformed", str(error)) from None
        with _decided_in_time():
            is_set = await self.checkpoints.set_expiry(found, expires_ms)
        if not is_set:
            raise HttpProblem("not-found", f"the weights {found.path!r} have expired")
        return {}

    async def _require_checkpoint(self, key: ApiKey, path: str) -> StoredCheckpoint:
        try:
            return await self.checkpoints.find_checkpoint(owner_of(key), path)
        except UserError as error:
            raise HttpProblem("not-found", str(error)) from None

    async def list_sessions(self, key: ApiKey, limit: int, offset: int) -> Json:
        sessions, total = await run_in_thread(self.store.list_sessions, owner_of(key), limit, offset)
        return {"sessions": sessions, "cursor": _cursor(limit, offset, total)}

    async def get_session(self, key: ApiKey, session_id: str) -> Json:
        owner = owner_of(key)
        models = await run_in_thread(self.store.list_session_models, owner, session_id, LISTED_MAX)
        samplers = await run_in_thread(self.store.list_session_samplers, owner, session_id, LISTED_MAX)
        if not models and not samplers:
            raise HttpProblem("not-found", f"no session {session_id!r} with a model or a sampler")
        return {"training_run_ids": models, "sampler_ids": samplers}

    async def _require_run(self, key: ApiKey, run: str) -> CreatedModel:
        found = await run_in_thread(self.store.find_created_model, owner_of(key), run)
        if found is None:
            raise HttpProblem("not-found", f"no training run {run!r}: `list_training_runs` lists yours")
        return found

    async def _show_runs(self, key: ApiKey, models: Sequence[CreatedModel]) -> list[Json]:
        return await run_in_thread(lambda: [self._show_run(key, model) for model in models])

    def _show_run(self, key: ApiKey, model: CreatedModel) -> Json:
        described = describe_run(self.peer, model.job) or codec.decode(CreateModel, model.creation)
        return {
            "training_run_id": model.model,
            "base_model": described.base,
            "model_owner": key.name or LOCAL_OWNER,
            "is_lora": True,
            "lora_rank": described.rank,
            "last_request_time": _iso(model.last_request_ms),
            "corrupted": False,
        }

    def _show_checkpoints(self, key: ApiKey, model: str | None, begin: int = 0, end: int | None = None) -> tuple[list[Json], int]:
        """Return a page of the checkpoints of a key, or of one of its models, and the number of all of them."""
        found = self.store.list_checkpoints(owner_of(key), self.runs.time_ms, model)
        return [_show_checkpoint(each) for each in found[begin:end]], len(found)


def describe_run(peer: TrainingPeer, key: bytes | None) -> CreateModel | None:
    """Return the request that would create the model of a run; None: there is no run, or the network has deleted it.

    A model that has loaded a checkpoint may have another base and another rank than it was created with.
    """
    jobs = peer.state.jobs.jobs
    job = None if key is None else jobs.get(key)
    if job is None:
        return None
    spec = JobSpec.decode(job.spec)
    own: AdapterSettings = spec.decoded_settings
    base = jobs.get(own.base.job)
    name = own.base.job.hex() if base is None else base.name
    return CreateModel(name, own.rank, spec.seed, own.train_attn, own.train_mlp, own.train_unembed)


@contextmanager
def _decided_in_time() -> Iterator[None]:
    """Answer with 503, so that the SDK tries again, if the network does not decide a transaction within `DECISION_SECONDS`."""
    try:
        with trio.fail_after(DECISION_SECONDS):
            yield
    except UserError as error:
        raise HttpProblem("no-quorum", str(error)) from None
    except trio.TooSlowError:
        detail = f"not decided after {DECISION_SECONDS:.0f} s, and may still be decided: see `peer peers` for missing voters"
        raise HttpProblem("no-quorum", detail) from None


def _show_checkpoint(found: StoredCheckpoint) -> Json:
    kind = found.checkpoint.partition("/")[0]
    return {
        "checkpoint_id": found.checkpoint,
        "checkpoint_type": "training" if kind == WEIGHTS else "sampler",
        "time": _iso(found.created_ms),
        "tinker_path": found.path,
        "size_bytes": found.bytes,
        "expires_at": _iso(found.expires_ms) if found.expires_ms else None,
    }


def _iso(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds")


def _cursor(limit: int, offset: int, total: int) -> Json:
    return {"limit": limit, "offset": offset, "total_count": total}
