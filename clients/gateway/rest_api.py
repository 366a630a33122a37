"""The calls of the gateway's HTTP API that list the models, sessions and checkpoints of a key."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import trio

from clients.gateway.checkpoints import WEIGHTS, Checkpoints, checkpoint_path, expiry
from clients.gateway.client_runs import ClientRuns
from clients.gateway.model_queue import CreateModel
from clients.gateway.request_store import CreatedModel, RequestStore, StoredCheckpoint, owner_of
from protocol import codec
from protocol.errors import UserError
from storage.api_key_store import ApiKey
from web.calls import HttpProblem, Json

LISTED_MAX: Final = 1_000  # entries of a list in one reply, which then has some hundred kilobytes
OFFSET_MAX: Final = (1 << 31) - 1
LOCAL_OWNER: Final = "local"  # name of the owner of models that were created without a key


@dataclass
class RestApi:
    store: RequestStore
    checkpoints: Checkpoints
    runs: ClientRuns

    async def list_training_runs(self, key: ApiKey, limit: int, offset: int) -> Json:
        models, total = await trio.to_thread.run_sync(self.store.list_created_models, owner_of(key), limit, offset)
        return {"training_runs": [_training_run(model, key) for model in models], "cursor": _cursor(limit, offset, total)}

    async def get_training_run(self, key: ApiKey, run_id: str) -> Json:
        return _training_run(await self._require_run(key, run_id), key)

    async def list_checkpoints(self, key: ApiKey, run_id: str) -> Json:
        await self._require_run(key, run_id)
        found = await trio.to_thread.run_sync(self.store.list_checkpoints, owner_of(key), self.runs.time_ms, run_id)
        return {"checkpoints": [_checkpoint(each) for each in found]}

    async def list_all_checkpoints(self, key: ApiKey, limit: int, offset: int) -> Json:
        found = await trio.to_thread.run_sync(self.store.list_checkpoints, owner_of(key), self.runs.time_ms)
        page = [_checkpoint(each) for each in found[offset : offset + limit]]
        return {"checkpoints": page, "cursor": _cursor(limit, offset, len(found))}

    async def show_weights(self, key: ApiKey, tinker_path: str) -> Json:
        found = await self._require_checkpoint(key, tinker_path)
        said = codec.decode(CreateModel, (await self._require_run(key, found.model)).creation)
        return {
            "base_model": said.base,
            "is_lora": True,
            "lora_rank": said.rank,
            "train_attn": said.train_attn,
            "train_mlp": said.train_mlp,
            "train_unembed": said.train_unembed,
        }

    async def delete_checkpoint(self, key: ApiKey, run_id: str, kind: str, name: str) -> Json:
        found = await self._require_checkpoint(key, checkpoint_path(run_id, f"{kind}/{name}"))
        with _undecided():
            await self.checkpoints.delete_checkpoint(found)
        return {}

    async def set_checkpoint_ttl(self, key: ApiKey, run_id: str, kind: str, name: str, ttl_seconds: Any) -> Json:
        found = await self._require_checkpoint(key, checkpoint_path(run_id, f"{kind}/{name}"))
        try:
            expires_ms = expiry(self.runs.time_ms, ttl_seconds)
        except UserError as error:
            raise HttpProblem("malformed", str(error)) from None
        with _undecided():
            await self.checkpoints.set_expiry(found, expires_ms)
        return {}

    async def _require_checkpoint(self, key: ApiKey, path: str) -> StoredCheckpoint:
        try:
            return await self.checkpoints.find_checkpoint(owner_of(key), path)
        except UserError as error:
            raise HttpProblem("not-found", str(error)) from None

    async def list_sessions(self, key: ApiKey, limit: int, offset: int) -> Json:
        sessions, total = await trio.to_thread.run_sync(self.store.list_sessions, owner_of(key), limit, offset)
        return {"sessions": sessions, "cursor": _cursor(limit, offset, total)}

    async def get_session(self, key: ApiKey, session_id: str) -> Json:
        owner = owner_of(key)
        models = await trio.to_thread.run_sync(self.store.list_session_models, owner, session_id, LISTED_MAX)
        samplers = await trio.to_thread.run_sync(self.store.list_session_samplers, owner, session_id, LISTED_MAX)
        if not models and not samplers:
            raise HttpProblem("not-found", f"no session {session_id!r} with a model or a sampler")
        return {"training_run_ids": models, "sampler_ids": samplers}

    async def _require_run(self, key: ApiKey, run: str) -> CreatedModel:
        found = await trio.to_thread.run_sync(self.store.find_created_model, owner_of(key), run)
        if found is None:
            raise HttpProblem("not-found", f"no training run {run!r}: `list_training_runs` lists yours")
        return found


def _training_run(model: CreatedModel, key: ApiKey) -> Json:
    said = codec.decode(CreateModel, model.creation)
    return {
        "training_run_id": model.model,
        "base_model": said.base,
        "model_owner": key.name or LOCAL_OWNER,
        "is_lora": True,
        "lora_rank": said.rank,
        "last_request_time": _iso(model.last_request_ms),
        "corrupted": False,
    }


@contextmanager
def _undecided() -> Iterator[None]:
    """Answer with 503, so that the SDK tries again, if the network decides no transaction."""
    try:
        yield
    except UserError as error:
        raise HttpProblem("no-quorum", str(error)) from None


def _checkpoint(found: StoredCheckpoint) -> Json:
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
