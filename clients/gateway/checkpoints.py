"""The checkpoints of a gateway: models of its runs that every peer keeps under a name.

A client names a checkpoint by a path, `tinker://MODEL/KIND/NAME`. In the ledger it is the checkpoint `KIND/NAME` of the run that
the client's model had when it was saved.
"""

from __future__ import annotations

import re
import reprlib
from typing import Any, Final

from clients.gateway.client_runs import ClientRuns
from clients.gateway.request_store import RequestStore, StoredCheckpoint
from clients.gateway.threads import run_in_thread
from ledger.jobs import ModelReference
from protocol.errors import UserError

SCHEME: Final = "tinker://"
WEIGHTS, SAMPLER_WEIGHTS = "weights", "sampler_weights"  # kinds of checkpoints: to continue from, and to sample from
# The SDK puts names into URLs as they are, where "." and ".." are parts of a relative path.
NAME: Final = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._-]{1,48}")
PATH_CHARACTERS_MAX: Final = 200  # a session and a number, a kind and a name have less than 150
TTL_SECONDS_MAX: Final = 10 * 366 * 86_400  # ten years, as in the SDK
EXPIRED_MS: Final = 1  # an expiry in the past, which deletes a checkpoint


def checkpoint_path(model: str, checkpoint: str) -> str:
    return f"{SCHEME}{model}/{checkpoint}"


def require_name(name: Any) -> str:
    """Return a valid name. Raises `UserError`."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        rule = "must have 1 to 48 letters, digits, dots, hyphens and underscores, and be neither '.' nor '..'"
        raise UserError(f"name {reprlib.repr(name)} {rule}")
    return name


def expiry(time_ms: int, ttl_seconds: Any) -> int:
    """Return the time at which something with this lifetime expires; 0: never. Raises `UserError`."""
    if ttl_seconds is None:
        return 0
    if type(ttl_seconds) is not int or not 0 < ttl_seconds <= TTL_SECONDS_MAX:
        raise UserError(f"ttl_seconds must be a whole number in 1..{TTL_SECONDS_MAX}, not {reprlib.repr(ttl_seconds)}")
    return time_ms + 1_000 * ttl_seconds


class Checkpoints:
    def __init__(self, runs: ClientRuns, store: RequestStore) -> None:
        self._runs, self._store = runs, store

    async def find_checkpoint(self, owner: str, path: str) -> StoredCheckpoint:
        """Return a checkpoint of this owner. Raises `UserError` if there is none, or it has expired."""
        found = await run_in_thread(self._store.find_checkpoint, path)
        if found is None or found.owner != owner or found.is_expired(self._runs.time_ms):
            raise UserError(f"no weights {path[:PATH_CHARACTERS_MAX]!r}: they were not saved, or they have expired")
        return found

    async def save_model(
        self, model: str, job: bytes, checkpoint: str, expires_ms: int, *, overwrite: bool, stored_max: int
    ) -> str:
        """Save the present model of a run, which is that of a client's model. Return the path.

        Raises `UserError` if the model's owner would store more than `stored_max` bytes.
        """
        path = checkpoint_path(model, checkpoint)
        known = await run_in_thread(self._store.find_checkpoint, path)
        if known is not None and not known.is_expired(self._runs.time_ms) and not overwrite:
            saved = ModelReference(known.job, known.round, known.root)
            if known.expires_ms == expires_ms and self._runs.is_present_model(saved, job):
                return path  # This gateway was restarted after it had saved the model.
            raise UserError(f"there are weights {path!r} already: choose another name, or set overwrite")
        owner, size = await run_in_thread(self._store.find_model, model), self._runs.model_bytes(job)
        assert owner is not None
        stored_bytes = await run_in_thread(self._store.stored_bytes, owner.owner, self._runs.time_ms)
        if stored_bytes - (0 if known is None else known.bytes) + size > stored_max:
            raise UserError(
                f"the weights have {size:,} bytes, and your key stores {stored_bytes:,} of {stored_max:,}: delete some"
            )
        saved = await self._runs.save_model(job, checkpoint, expires_ms)
        if known is not None and known.job != job:  # The model was loaded from a checkpoint since then.
            await self._runs.set_expiry(known.job, checkpoint, EXPIRED_MS)
        stored = StoredCheckpoint(path, owner.owner, model, checkpoint, saved.job, saved.round, saved.root, size, expires_ms)
        await run_in_thread(self._store.put_checkpoint, stored)
        return path

    async def set_expiry(self, found: StoredCheckpoint, expires_ms: int) -> bool:
        """Set when a checkpoint expires. Return False if it has expired already."""
        if not await self._runs.set_expiry(found.job, found.checkpoint, expires_ms):
            await run_in_thread(self._store.drop_checkpoint, found.path)
            return False
        await run_in_thread(self._store.set_checkpoint_expiry, found.path, expires_ms)
        return True

    async def delete_checkpoint(self, found: StoredCheckpoint) -> None:
        await self._runs.set_expiry(found.job, found.checkpoint, EXPIRED_MS)
        await run_in_thread(self._store.drop_checkpoint, found.path)

    async def load_checkpoint(self, found: StoredCheckpoint, *, with_moments: bool) -> bytes:
        """Open a run that continues from a checkpoint, and return the id of its job."""
        return await self._runs.continue_run(ModelReference(found.job, found.round, found.root), with_moments=with_moments)
